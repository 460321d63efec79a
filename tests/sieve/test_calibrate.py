"""Calibration against a direct reading of the algorithm, and what holds for every rule."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from fedsieve.config.mask_settings import MaskSettings
from fedsieve.errors import InputError, RunError
from fedsieve.model.vit import ViT, ViTShape
from fedsieve.sieve.calibrate import calibrate, calibrate_mask, damped
from fedsieve.sieve.mask import Mask, shapes_of
from fedsieve.sieve.rules import RULES, Evidence
from fedsieve.sieve.sgdm import SparseSGDM

SMALL = ViTShape(image_size=16, patch_size=8, width=8, depth=2, heads=2, hidden=12, layer_scale=True)


def network() -> nn.Module:
    torch.manual_seed(1)
    made = nn.Sequential(ViT(SMALL), nn.Linear(8, 4)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


class Fresh:
    """Batches that are other ones each time they are gone through."""

    def __init__(self) -> None:
        self.rounds = 0

    def draw(self, round: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(round)
        return [
            (torch.randn(3, 3, 16, 16, generator=generator).double(), torch.randint(0, 4, (3,), generator=generator))
            for _ in range(2)
        ]

    def __iter__(self):
        self.rounds += 1
        return iter(self.draw(self.rounds))


def read_directly(model: nn.Module, sparsity: float, rounds: int, damping: float, sign: int, keep_alive: int) -> Tensor:
    """Freeze step by step: score with the frozen weights damped, sort, keep the first. One bool per weight."""
    names = [name for name, _ in model.named_parameters()]
    original = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    n = sum(value.numel() for value in original.values())
    active = {name: torch.ones_like(value, dtype=torch.bool) for name, value in original.items()}
    data = Fresh()
    for r in range(1, rounds + 1):
        weights = {name: torch.where(active[name], original[name], damping * original[name]) for name in names}
        scores = {name: torch.zeros_like(original[name]) for name in names}
        for inputs, labels in data.draw(r):
            for x, y in zip(inputs, labels, strict=True):
                leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
                loss = F.cross_entropy(torch.func.functional_call(model, leaves, (x[None],)), y[None])
                for name, gradient in zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                    scores[name] += gradient**2 / 6
        count = round((1 - sparsity) ** (r / rounds) * n)
        order = []
        for number, name in enumerate(names):
            own = [
                (sign * float(score), number, place)
                for place, (score, is_active) in enumerate(
                    zip(scores[name].flatten(), active[name].flatten(), strict=True)
                )
                if is_active
            ]
            for rank, entry in enumerate(sorted(own)):
                order.append((rank >= keep_alive, *entry))
        active = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in original.items()}
        for _, _, number, place in sorted(order)[:count]:
            active[names[number]].view(-1)[place] = True
    return torch.cat([active[name].flatten() for name in names])


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(("rule", "sign"), [("least_sensitive", 1), ("most_sensitive", -1)])
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_is_the_algorithm_read_directly(rounds: int, rule: str, sign: int, sparsity: float) -> None:
    model = network()
    expected = read_directly(model, sparsity, rounds, 0.1, sign, keep_alive=2)
    found = calibrate(model, Fresh(), sparsity, rule=rule, rounds=rounds, kind="empirical", samples=6, keep_alive=2)
    assert torch.equal(found.unpack(), expected)
    if rounds > 1:  # or the test would not notice rounds that change nothing
        assert not torch.equal(expected, read_directly(model, sparsity, 1, 0.1, sign, keep_alive=2))


def test_exact_labels_are_drawn_anew_each_round() -> None:
    """With exact sensitivity the mask depends on the seed, and on nothing else."""
    masks = [calibrate(network(), Fresh(), 0.8, rounds=2, samples=6, seed=seed) for seed in (1, 1, 2)]
    assert masks[0] == masks[1]
    assert masks[0] != masks[2]


rules = st.sampled_from(list(RULES))
units = st.sampled_from(["weight", "row", "tensor"])


@example([[2], [42], [22]], "least_sensitive", "weight", "tensor", 0.3, 8, 1, 0)  # shares that grow as the total falls
@given(
    shapes=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=5),
    rule=rules,
    unit=units,
    across=st.sampled_from(["model", "tensor"]),
    sparsity=st.floats(0, 0.99),
    rounds=st.integers(1, 4),
    keep_alive=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_what_holds_for_every_rule(
    shapes: list[list[int]],
    rule: str,
    unit: str,
    across: str,
    sparsity: float,
    rounds: int,
    keep_alive: int,
    seed: int,
) -> None:
    if unit == "tensor":
        across = "model"
    named = {f"t{number}": tuple(shape) for number, shape in enumerate(shapes)}
    size = sum(torch.Size(shape).numel() for shape in named.values())
    settings = MaskSettings.model_validate(
        {
            "rule": rule,
            "sparsity": sparsity,
            "calibration_rounds": rounds,
            "unit": unit,
            "across": across,
            "keep_alive": keep_alive,
        }
    )
    seen: list[Mask] = []

    def scored(round: int, active: Mask) -> Tensor:
        seen.append(active)
        return torch.rand(size, generator=torch.Generator().manual_seed(seed + round)) + 0.1

    def made() -> Mask:
        seen.clear()
        weights = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        return calibrate_mask(named, weights, scored, settings, torch.Generator().manual_seed(seed))

    mask = made()
    chain = [*seen, mask]
    asked = rounds if settings.looks_at_data and 1 - sparsity < 1 else 0
    assert len(seen) == asked
    for r, (before, after) in enumerate(itertools.pairwise(chain), start=1):
        assert after <= before  # never revives a weight
        if unit == "weight":
            forced = sum(min(keep_alive, torch.Size(shape).numel()) for shape in named.values())
            assert after.active == max(round((1 - sparsity) ** (r / rounds) * size), forced, 1)
    if unit != "tensor":
        for name, shape in named.items():
            assert int(mask[name].sum()) >= min(keep_alive, torch.Size(shape).numel())
    assert mask.active >= 1
    assert made() == mask


@pytest.mark.parametrize("rule", ["smallest_magnitude", "largest_magnitude"])
def test_magnitude_looks_at_the_weights_alone(rule: str) -> None:
    model = network()
    mask = calibrate(model, [], 0.7, rule=rule, rounds=3, keep_alive=0)
    weights = torch.cat([one.detach().flatten() for one in model.parameters()]).abs()
    active = mask.unpack()
    low, high = (active, ~active) if rule == "smallest_magnitude" else (~active, active)
    assert float(weights[low].max()) <= float(weights[high].min())


def test_random_has_no_favourites() -> None:
    """Over many seeds each weight is active as often as the density says (binomial, five deviations)."""
    model = nn.Linear(10, 5)
    total = sum(calibrate(model, [], 0.8, rule="random", keep_alive=0, seed=seed).unpack().int() for seed in range(500))
    assert int((total - 100).abs().max()) < 5 * (500 * 0.2 * 0.8) ** 0.5
    rows = sum(
        calibrate(model, [], 0.6, rule="random", unit="row", keep_alive=0, seed=seed)["weight"].int()
        for seed in range(300)
    )
    assert float((rows / 300).std()) < 0.1


def test_damping_is_undone_to_the_last_bit() -> None:
    model = network().float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    shapes = shapes_of(parameters.items())
    size = sum(one.numel() for one in parameters.values())
    mask = Mask.pack(shapes, torch.rand(size, generator=torch.Generator().manual_seed(0)) < 0.5)
    with pytest.raises(KeyError), damped(parameters, mask, 0.1):
        for name, parameter in parameters.items():
            expected = before[name] * torch.where(mask[name], 1.0, 0.1)
            torch.testing.assert_close(parameter.detach(), expected)
        raise KeyError
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["exact", "empirical", "batch"])
def test_useless_scores_name_their_tensor(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    batches = [(torch.randn(5, 4), torch.zeros(5).long())]
    with torch.no_grad():
        model[2].weight.zero_()  # so that nothing reaches the first layer
    with pytest.raises(RunError, match=r"the sensitivity of 0\.weight is zero"):
        calibrate(model, batches, 0.5, kind=kind)
    with torch.no_grad():
        model[2].weight.fill_(float("nan"))
    with pytest.raises(RunError, match="not finite"):
        calibrate(model, batches, 0.5, kind=kind)


def test_the_readmes_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines under "On any PyTorch model" are run as they stand."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    section = readme.split("## On any PyTorch model")[1]
    code = section.split("```python\n")[1].split("```")[0]
    assert len(code.strip().splitlines()) <= 13
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    model, before, mask = names["model"], names["before"], names["mask"]
    assert isinstance(model, nn.Module) and isinstance(before, dict) and isinstance(mask, Mask)
    assert mask.active == round(0.1 * mask.size)
    for name, parameter in model.named_parameters():
        changed = parameter.detach() != before[name]
        assert not (changed & ~mask[name]).any()
        assert changed.any()
    assert Mask.load(tmp_path / "mask.safetensors") == mask


# Models and batches as they are.


def hugging_face_model() -> nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=4, **shape))


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).logits


@pytest.mark.parametrize("kind", ["exact", "empirical", "batch"])
def test_models_of_transformers_need_no_wrapper(kind: str) -> None:
    model = hugging_face_model()
    pairs = [(torch.randn(3, 3, 16, 16), torch.randint(0, 4, (3,))) for _ in range(2)]
    dicts = [{"pixel_values": images, "labels": labels} for images, labels in pairs]
    wrapped = calibrate(Wrapped(model), pairs, 0.9, rounds=2, kind=kind)
    for batches in (dicts, pairs, [({"pixel_values": images}, labels) for images, labels in pairs]):
        mask = calibrate(model, batches, 0.9, rounds=2, kind=kind)
        assert torch.equal(mask.bits, wrapped.bits)
        assert list(mask.shapes) == [name for name, _ in model.named_parameters()]
    assert not model._forward_hooks and not model._forward_pre_hooks
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    optimizer = SparseSGDM(model.named_parameters(), mask, lr=0.1)
    model(**dicts[0]).loss.backward()
    optimizer.step()
    for name, one in model.named_parameters():
        assert not (one != before[name])[~mask[name]].any()
    assert any((one != before[name]).any() for name, one in model.named_parameters())


X, Y = torch.zeros(2, 3), torch.tensor([0, 3])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sparsity": 90}, "sparsity is 90.0; 90.0 is no fraction below 1; did you mean 0.9?"),
        ({"sparsity": "high"}, "sparsity is high; it should be a valid number"),
        ({"rule": "best"}, "rule is best; it should be 'least_sensitive'"),
        ({"rounds": 0}, "rounds is 0; it should be greater than or equal to 1"),
        ({"samples": 0}, "samples is 0; it should be greater than or equal to 1"),
        ({"batches": []}, "batches gave no samples; pass a list or a DataLoader"),
        ({"batches": [3]}, "batches gave int; a batch is a pair of inputs and labels, or a dict such as"),
        (
            {"batches": [{"pixel_values": torch.zeros(2, 3)}]},
            "batches gave a dict with pixel_values; a batch is a pair",
        ),
        (
            {"batches": [(torch.zeros(2, 3), torch.zeros(3))]},
            "batches gave inputs and 3 labels that do not go together",
        ),
        ({"model": nn.Linear(3, 4).requires_grad_(False)}, "no parameter of the model requires a"),
        ({"model": "m"}, "the model is of type str; give an nn.Module"),
        ({"batches": None}, "batches is of type NoneType; give a list of batches or a DataLoader"),
        ({"seed": "a"}, "seed is 'a'; give a whole number of 64 bits"),
        ({"seed": 2**64}, "seed is '18446744073709551616'; give a whole number of 64 bits"),
        ({"parameters": [1]}, "parameters is of type list; give a dict of names and parameters"),
        ({"parameters": {}}, "parameters is empty; name some, or leave it out for all that require a gradient"),
        ({"parameters": {"weight": nn.Parameter(torch.zeros(4, 3))}}, "parameters: 'weight' is no parameter of the"),
        ({"kind": "batch", "batches": [(X[:0], Y[:0])]}, "batches gave no samples; pass a list or a DataLoader"),
        ({"kind": "empirical", "batches": [(X, torch.tensor([1, 7]))]}, "a label is 7, and the model has 4 classes"),
        ({"kind": "batch", "batches": [(X, torch.tensor([-1, 0]))]}, "a label is -1, and the model has 4 classes"),
        ({"kind": "batch", "batches": [(X, torch.zeros(2))]}, "labels are float32 of shape [2]; give a whole number"),
        ({"batches": [(torch.zeros(2, 5), Y)]}, "the model fails on a sample of the batches (RuntimeError: mat1"),
        ({"batches": [{"pixels": X, "labels": Y}]}, "the model fails on a sample of the batches (TypeError: "),
        (
            {"model": nn.Conv2d(3, 4, 1), "batches": [(torch.zeros(2, 3, 2, 2), Y)]},
            "the model gives scores of shape [1",
        ),
    ],
)
def test_mistakes_are_one_sentence(arguments: dict, said: str) -> None:
    usual = {"model": nn.Linear(3, 4), "batches": [(X, Y)], "sparsity": 0.5}
    with pytest.raises(InputError) as raised:
        calibrate(**{**usual, **arguments})
    assert str(raised.value).startswith(said) and "\n" not in str(raised.value)


@pytest.mark.parametrize("unit", ["weight", "row"])
def test_random_numbers_are_where_the_weights_are(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a rule may multiply them on any device; here on one without numbers."""
    found = []

    def rule(evidence: Evidence) -> Tensor:
        found.append((evidence.random() * evidence.weights).device.type)
        return torch.arange(12.0)

    monkeypatch.setitem(RULES, "mine", rule)
    settings = MaskSettings(rule="mine", sparsity=0.5, unit=unit)
    weights, generator = torch.zeros(12, device="meta"), torch.Generator().manual_seed(0)
    calibrate_mask({"weight": (4, 3)}, weights, lambda *_: weights, settings, generator)
    assert found == ["meta"]
