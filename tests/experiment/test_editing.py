"""Phases with masks, as a whole: against plain torch loops, and against what they promise."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.errors import InputError
from fedsieve.experiment import evaluate_run, run
from fedsieve.federate.batches import batches
from fedsieve.federate.local import sgd, update_of
from fedsieve.federate.schedule import SCHEDULES
from fedsieve.federate.types import Broadcast, LocalSetup, Task
from fedsieve.model.flat import FlatModel
from fedsieve.observe.callbacks import Callback
from fedsieve.phase import mask_source, plan
from fedsieve.randomness import torch_generator
from fedsieve.runs.model_file import load_classifier
from fedsieve.runs.read import read_metrics
from fedsieve.sieve.mask import Mask

Maker = Callable[..., Experiment]
ADAMW = "{adamw: {eps: 0.01}}"  # with a small eps, the last bits of gradients near 0 would decide the step
HEAD_ONLY = "phases=[{name: head, train: head, rounds: 3, local: {epochs: 1, batch_size: 16, lr: 0.05}}]"


class Notes(Callback):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def edit(train: str = "backbone", mask: str = "sparsity: 0.9", rounds: int = 2, local: str = "") -> str:
    """A single masked phase."""
    fisher = "" if "fisher" in mask or "file" in mask else "fisher: {samples: 40}, "
    return (
        f"phases=[{{name: edit, train: {train}, rounds: {rounds}, "
        f"local: {{epochs: 2, batch_size: 16, lr: 0.02, {local}}}, mask: {{{fisher}{mask}}}}}]"
    )


def named(folder: Path) -> dict[str, Tensor]:
    return FlatModel(load_classifier(folder)).tensors()


@pytest.fixture
def start(experiment: Maker, tmp_path: Path) -> Path:
    run(experiment(HEAD_ONLY), tmp_path / "start")
    return tmp_path / "start"


def plain_masked_torch(settings: Experiment, mask: Mask) -> dict[str, Tensor]:
    """Centralized training as in a notebook: masked-out gradients zeroed, dense steps, frozen weights put back."""
    settings = settings.resolved()
    context = RunContext(settings, Callback())
    model, phase = context.classifier.eval(), settings.phases[0]
    samples = context.training[context.partition.clients[0]]
    inputs, labels = (
        context.transform.evaluation(context.data.train.images[samples]),
        context.data.train.labels[samples],
    )
    local = phase.local
    dense = "head." if phase.mask.dense else "nothing"
    trained = {name: one for name, one in model.named_parameters() if name in mask.shapes or name.startswith(dense)}
    masks = {name: mask[name] if name in mask.shapes else torch.ones_like(one) > 0 for name, one in trained.items()}
    frozen = {name: one.detach().clone() for name, one in trained.items()}
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        trained.values(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay, nesterov=local.nesterov
    )
    if local.optimizer != "sgd":
        eps = local.optimizer.adamw.eps
        optimizer = torch.optim.AdamW(trained.values(), local.lr, eps=eps, weight_decay=local.weight_decay)
    for round in range(1, phase.rounds + 1):
        epochs = list(batches(len(samples), local, settings.seed, phase.name, round, 0))
        steps = [batch for epoch in epochs for batch in epoch]
        for step, batch in enumerate(steps):
            optimizer.param_groups[0]["lr"] = local.lr * SCHEDULES[local.schedule](
                (round - 1 + step / len(steps)) / phase.rounds
            )
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            for name, one in trained.items():
                one.grad.mul_(masks[name])
                if phase.mask.rescale and name in mask.shapes:
                    one.grad.div_(mask.density)
            if local.clip_norm is not None:
                nn.utils.clip_grad_norm_(trained.values(), local.clip_norm)
            optimizer.step()
            with torch.no_grad():
                for name, one in trained.items():
                    one.copy_(torch.where(masks[name], one, frozen[name]))
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


TRAINED = [
    ("backbone", "sparsity: 0.9"),
    ("backbone", "sparsity: 0.9, unit: row"),
    ("backbone", "sparsity: 0.8, unit: tensor"),
    ("all", "sparsity: 0.5, rule: random, across: tensor, rescale: true"),
    ("{blocks: [2]}", "sparsity: 0.7, calibration_rounds: 2"),
    ("{blocks: [1, 2], head: true}", "sparsity: 0.8, unit: row, rule: most_sensitive"),
    ("all", "sparsity: 0.3, rule: largest_magnitude, only: [attention, head]"),
    ("backbone", "sparsity: 0.3, rule: smallest_magnitude, scope: server, only: [norm, tokens, scale, patch]"),
    ("head", "sparsity: 0.8, scope: server, fisher: {kind: batch, samples: 16}"),
    ("all", "sparsity: 0.9, calibration_rounds: 2, dense: [head]"),
    ("all", "sparsity: 0.9, rule: random, rescale: true, only: [norm, mlp], dense: [head]"),
    ("{blocks: [1, 2], head: true}", "sparsity: 0.8, unit: row, scope: server, dense: [head]"),
]


@pytest.mark.parametrize(
    ("train", "mask", "optimizer"), [*((*one, "sgd") for one in TRAINED), *((*one, ADAMW) for one in TRAINED[:4])]
)
def test_one_client_is_a_plain_masked_torch_loop(
    experiment: Maker, start: Path, tmp_path: Path, train: str, mask: str, optimizer: str
) -> None:
    phase = edit(train, mask, local=f"clip_norm: 0.5, optimizer: {optimizer}")
    settings = experiment("clients.count=1", "clients.fraction=1.0", f"model.init={start}", phase)
    run(settings, tmp_path / "run")
    (saved,) = [one for one in (tmp_path / "run/masks/edit").glob("*") if one.name != "start.safetensors"]
    found, before, drawn = named(tmp_path / "run"), named(start), Mask.load(saved)
    expected = plain_masked_torch(settings, drawn)
    moved = 0.0
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)
        changed = tensor.view(torch.int32) != before[name].view(torch.int32)  # negative zeros, too
        frozen = ~drawn[name] if name in drawn.shapes else torch.tensor("dense" not in mask or "head" not in name)
        assert not (changed & frozen).any()  # to the last bit
        moved = max(moved, float((tensor - before[name]).abs().max()))
    assert moved > 1e-3


def test_the_frozen_prefix_changes_nothing_but_the_time(
    experiment: Maker, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks 0 and 1 from the cache against computing them in every step, and evaluation alike."""
    settings = experiment(f"model.init={start}", edit("{blocks: [2], head: true}", "sparsity: 0.5"))
    through_cache = run(settings, tmp_path / "cached")
    monkeypatch.setattr(RunContext, "frozen_depth", lambda self, active: 0)
    plain = run(settings, tmp_path / "plain")
    for name, tensor in named(tmp_path / "cached").items():
        torch.testing.assert_close(tensor, named(tmp_path / "plain")[name], rtol=0, atol=1e-5)
    assert through_cache["test_loss"] == pytest.approx(plain["test_loss"], abs=1e-5)
    assert through_cache["val_accuracy"] == plain["val_accuracy"]


def test_the_prefix_is_computed_once(
    experiment: Maker, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No image passes the frozen blocks twice, in whatever round; a second run computes none."""
    from fedsieve.model.vit import ViT

    computed = []
    original = ViT.first_blocks

    def counted(self: ViT, images: Tensor, count: int) -> Tensor:
        computed.append(len(images))
        return original(self, images, count)

    monkeypatch.setattr(ViT, "first_blocks", counted)
    settings = experiment(
        "seed=8", f"model.init={start}", edit("{blocks: [2]}", "sparsity: 0.5", rounds=4), "evaluate.test=never"
    )
    run(settings, tmp_path / "first")
    assert 180 >= sum(computed) - 60 > 60  # at most each training image once, and the validation images
    computed.clear()
    run(settings, tmp_path / "second")
    assert not computed


def test_a_mask_does_not_depend_on_when_its_client_is_drawn(experiment: Maker, start: Path, tmp_path: Path) -> None:
    late = experiment(f"model.init={start}", "clients.fraction=0.2", edit(rounds=5))
    run(late, tmp_path / "late")
    run(experiment(f"model.init={start}", "clients.fraction=1.0", edit(rounds=1)), tmp_path / "at-once")
    first_seen: dict[int, int] = {}
    for line in read_metrics(tmp_path / "late"):
        for client in line["clients"]:
            first_seen.setdefault(client, line["round"])
    assert max(first_seen.values()) > 1
    masks = [Mask.load(tmp_path / f"late/masks/edit/client-{client:06d}.safetensors") for client in first_seen]
    for client, mask in zip(first_seen, masks, strict=True):
        assert mask == Mask.load(tmp_path / f"at-once/masks/edit/client-{client:06d}.safetensors")
    assert len({mask.bits.numpy().tobytes() for mask in masks}) == len(masks)  # each its own


def test_masks_of_a_damaged_or_deleted_file_are_made_again(experiment: Maker, start: Path, tmp_path: Path) -> None:
    settings = experiment(f"model.init={start}", edit(rounds=3))
    whole = run(settings, tmp_path / "run")
    folder = tmp_path / "run/masks/edit"
    files = sorted(folder.glob("client-*"))
    before = files[0].read_bytes()
    files[0].write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    files[1].unlink()
    (tmp_path / "run/result.json").unlink()
    for path in (tmp_path / "run/checkpoints").iterdir():
        path.unlink()
    notes = Notes()
    assert run(settings, tmp_path / "run", resume=True, callback=notes)["model_sha256"] == whole["model_sha256"]
    assert files[0].read_bytes() == before
    assert any("damaged" in note for note in notes.notes)


@pytest.mark.parametrize("scope", ["server", "federated"])
@pytest.mark.parametrize("refresh", ["once", "round"])
def test_one_mask_for_all(experiment: Maker, start: Path, tmp_path: Path, scope: str, refresh: str) -> None:
    """Nothing changes outside one mask, though all clients train."""
    settings = experiment(
        f"model.init={start}", edit(mask=f"sparsity: 0.9, scope: {scope}, refresh: {refresh}", rounds=1)
    )
    run(settings, tmp_path / "run")
    after, before = named(tmp_path / "run"), named(start)
    changed = sum(int((after[name] != before[name]).sum()) for name in after)
    size = sum(before[name].numel() for name in before if name.startswith("backbone."))
    assert 0.05 * size < changed <= round(0.1 * size)
    assert (tmp_path / "run/masks/edit/shared.safetensors").exists() == (refresh == "once")


def test_a_federated_mask_is_that_of_the_pooled_data(experiment: Maker, start: Path, tmp_path: Path) -> None:
    """Summed scores of clients that use all their samples are those of one client that has all of them."""
    mask = "sparsity: 0.9, calibration_rounds: 2, scope: federated, fisher: {kind: empirical, samples: 1000}"
    text = edit(mask=mask, rounds=1)
    run(experiment(f"model.init={start}", text), tmp_path / "many")
    run(experiment(f"model.init={start}", "clients.count=1", text), tmp_path / "one")
    many, one = (Mask.load(tmp_path / name / "masks/edit/shared.safetensors") for name in ("many", "one"))
    assert many.active == one.active
    assert many.overlap(one) > 0.999  # float32 sums in another order


@pytest.mark.parametrize("momentum", ["reset", "carry", "leak"])
def test_masks_redrawn_each_epoch_against_a_naive_loop(
    experiment: Maker, start: Path, tmp_path: Path, momentum: str
) -> None:
    """Report 004's local update, written out, with the masks that the addresses give."""
    mask = f"rule: random, draw: bernoulli, sparsity: 0.7, refresh: epoch, momentum: {momentum}, keep_alive: 0"
    settings = experiment(
        "clients.count=1",
        "clients.fraction=1.0",
        f"model.init={start}",
        edit("backbone", mask, rounds=1, local="weight_decay: 0.0, schedule: constant").replace(
            "epochs: 2", "epochs: 3"
        ),
    )
    run(settings, tmp_path / "run")

    context = RunContext(settings.resolved(), Callback())
    model, local = context.classifier.eval(), settings.phases[0].local
    samples = context.training[context.partition.clients[0]]
    inputs, labels = (
        context.transform.evaluation(context.data.train.images[samples]),
        context.data.train.labels[samples],
    )
    parameters = {name: one for name, one in model.named_parameters() if name.startswith("backbone.")}
    size = sum(one.numel() for one in parameters.values())
    velocity = {name: torch.zeros_like(one) for name, one in parameters.items()}
    for epoch, epoch_batches in enumerate(batches(len(samples), local, settings.seed, "edit", 1, 0)):
        generator = torch_generator(settings.seed, "mask", "edit", 0, 1, epoch)
        draws = torch.rand(size, dtype=torch.float64, generator=generator) < 1 - 0.7
        parts = draws.split([one.numel() for one in parameters.values()])
        active = {name: part.view(one.shape) for (name, one), part in zip(parameters.items(), parts, strict=True)}
        for name, value in velocity.items():
            if momentum == "reset":
                value.zero_()
            elif momentum == "carry":
                value.mul_(active[name])
        for batch in epoch_batches:
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            with torch.no_grad():
                for name, one in parameters.items():
                    velocity[name].mul_(local.momentum).add_(one.grad * active[name])
                    one.sub_(velocity[name], alpha=local.lr)
    for name, tensor in named(tmp_path / "run").items():
        torch.testing.assert_close(tensor, dict(model.named_parameters())[name].detach(), rtol=0, atol=1e-5)


def test_a_leaking_update_is_sent_whole(experiment: Maker, start: Path, tmp_path: Path) -> None:
    """What old momentum moved is in the update too: the server's model is the client's."""
    mask = "rule: random, sparsity: 0.9, refresh: round, momentum: leak"
    settings = experiment(
        "clients.count=1", f"model.init={start}", edit("backbone", mask, rounds=3, local="schedule: constant")
    )
    run(settings, tmp_path / "run")
    densities = [line["density"] for line in read_metrics(tmp_path / "run")]
    assert densities[0] == pytest.approx(0.1, abs=1e-3)
    assert densities[0] < densities[1] < densities[2]
    before, after = named(start), named(tmp_path / "run")
    changed = sum(int((after[name] != before[name]).sum()) for name in after)
    size = sum(before[name].numel() for name in before if name.startswith("backbone."))
    assert 0.2 < changed / size < 0.28  # 1 - 0.9^3 = 0.271


def test_combining_only_the_active(experiment: Maker, start: Path, tmp_path: Path) -> None:
    """With disjoint-ish masks, averaging only the active moves each weight further."""
    moved = {}
    for aggregate in ("mean", "active"):
        settings = experiment(f"model.init={start}", edit(rounds=1), f"phases.*.aggregate={aggregate}")
        run(settings, tmp_path / aggregate)
        after, before = named(tmp_path / aggregate), named(start)
        moved[aggregate] = sum(float((after[name] - before[name]).square().sum()) for name in after)
    assert moved["active"] > 1.2 * moved["mean"]


DENSE = "sparsity: 0.9, dense: [head]"
BEYOND_THE_BACKBONE = [
    ("", DENSE),
    ("phases.*.aggregate=active", DENSE),
    ("phases.*.method={fisher_mixing: {fisher: {samples: 20}}}", DENSE),
    ("clients.secure=zero_sum", f"{DENSE}, scope: federated"),
    ("wire.values=int8", f"{DENSE}, scope: server, refresh: round"),
    ("wire.values=float16", f"{DENSE}, rule: random, refresh: epoch, momentum: carry"),
    ("clients.select=by_size", f"{DENSE}, rule: random, refresh: round, momentum: leak"),
]


@pytest.mark.parametrize(("override", "mask"), BEYOND_THE_BACKBONE)
def test_a_dense_head_is_outside_the_mask(
    experiment: Maker, start: Path, tmp_path: Path, override: str, mask: str
) -> None:
    """Every client trains and sends all of it; the mask, its density, its file and its layers are the backbone's."""
    changes = [override] if override else []
    settings = experiment(*changes, "analyze.level=blocks", f"model.init={start}", edit("all", mask, rounds=3))
    run(settings, tmp_path / "run")
    before, after = named(start), named(tmp_path / "run")
    assert (before["head.weight"] != after["head.weight"]).all()
    lines, masks = read_metrics(tmp_path / "run"), list((tmp_path / "run/masks").rglob("[cs]*d*.safetensors"))
    more = "leak" in mask or "epoch" in mask or "fisher_mixing" in override  # then clients send more than one mask
    for line in lines:
        assert line["density"] == pytest.approx(0.1, abs=1e-3) or more
        assert line["bytes_up"] > 3 * before["head.weight"].numel()  # whole, at 1 byte a value or more, of 3 clients
    assert lines[0]["layers"]["rest"]["head"] is None
    for file in masks:
        assert not any(name.startswith("head.") for name in Mask.load(file).shapes)
        assert Mask.load(file).density == pytest.approx(0.1, abs=1e-3)


def test_all_clients_count_for_a_dense_head(experiment: Maker, start: Path, tmp_path: Path) -> None:
    """After a round, `aggregate: mean` and `active` agree on it, for nobody froze any of it."""
    for aggregate in ("mean", "active"):
        changes = f"model.init={start}", edit("all", DENSE, rounds=1), f"phases.*.aggregate={aggregate}"
        run(experiment(*changes), tmp_path / aggregate)
    one, other = named(tmp_path / "mean"), named(tmp_path / "active")
    assert torch.equal(one["head.weight"], other["head.weight"])
    assert not torch.equal(one["backbone.blocks.0.mlp.fc1.weight"], other["backbone.blocks.0.mlp.fc1.weight"])


def test_carried_momentum_of_a_dense_head(experiment: Maker, start: Path, tmp_path: Path) -> None:
    """Masks are redrawn each round; with `carry` the head's momentum lasts, and takes it further."""
    moved = {}
    for momentum in ("carry", "reset"):
        mask = f"sparsity: 0.9, rule: random, refresh: round, momentum: {momentum}, dense: [head]"
        phase = edit("all", mask, local="schedule: constant")
        run(experiment("clients.count=1", f"model.init={start}", phase), tmp_path / momentum)
        moved[momentum] = (named(tmp_path / momentum)["head.weight"] - named(start)["head.weight"]).norm()
    assert moved["carry"] > 1.1 * moved["reset"]


def test_a_fresh_head_learns_beside_the_least_sensitive_weights(experiment: Maker, tmp_path: Path) -> None:
    """Under one mask with the backbone a fresh head is most sensitive, hence frozen, and the loss stays at chance."""
    losses = {}
    for name, mask in (("literal", "sparsity: 0.9"), ("dense", "sparsity: 0.9, dense: [head]")):
        run(experiment(edit("all", mask, rounds=6).replace("lr: 0.02", "lr: 0.1")), tmp_path / name)
        losses[name] = read_metrics(tmp_path / name)[-1]["val_loss"]
    assert losses["dense"] < 0.7 * losses["literal"]


def test_a_mask_from_a_file(experiment: Maker, start: Path, tmp_path: Path) -> None:
    run(experiment(f"model.init={start}", edit(mask="sparsity: 0.9, scope: server", rounds=2)), tmp_path / "drawn")
    file = tmp_path / "drawn/masks/edit/shared.safetensors"
    run(experiment(f"model.init={start}", edit(mask=f"file: {file}", rounds=2)), tmp_path / "given")
    for name, tensor in named(tmp_path / "drawn").items():
        assert torch.equal(tensor, named(tmp_path / "given")[name])
    assert Mask.load(tmp_path / "given/masks/edit/shared.safetensors") == Mask.load(file)  # a copy stays with the run
    with pytest.raises(InputError, match=r"backbone\.cls_token where head\.weight is expected"):
        run(experiment(edit("head", mask=f"file: {file}")), tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_what_a_person_is_told(experiment: Maker, start: Path, tmp_path: Path) -> None:
    """Few samples and useless calibration rounds are said once each, not once a client."""
    notes = Notes()
    few = edit(mask="sparsity: 0.9, calibration_rounds: 2").replace("samples: 40", "samples: 31")
    run(experiment(f"model.init={start}", few), tmp_path / "few", callback=notes)
    assert [note for note in notes.notes if "fisher.samples (31)" in note] == notes.notes[-1:]
    notes = Notes()
    run(
        experiment(f"model.init={start}", edit(mask="sparsity: 0.9, rule: random")), tmp_path / "random", callback=notes
    )
    assert sum("changes nothing for rule random" in note for note in notes.notes) == 1


def test_the_same_seed_gives_the_same_masks(experiment: Maker, start: Path, tmp_path: Path) -> None:
    results = {}
    for name, changes in {"a": [], "b": [], "c": ["seed=8"]}.items():
        settings = experiment(f"model.init={start}", edit(mask="sparsity: 0.9, refresh: epoch"), *changes)
        results[name] = run(settings, tmp_path / name)["model_sha256"]
    assert results["a"] == results["b"] != results["c"]


@pytest.mark.parametrize("refresh", ["round", "epoch"])
def test_a_clients_training_does_not_depend_on_who_came_before(
    experiment: Maker, start: Path, tmp_path: Path, refresh: str
) -> None:
    """Two clients in one round, weighted alike: the mean of what each does in a run where the other has no say."""
    settings = experiment(
        "clients.count=2",
        "clients.fraction=1.0",
        f"model.init={start}",
        edit(mask=f"sparsity: 0.5, refresh: {refresh}"),
    ).resolved()
    context = RunContext(settings, Callback())
    (phase,) = plan(settings, context)
    before = phase.scope.read()
    masks = mask_source(context, phase, before, None)
    setup = LocalSetup(phase.scope, context.classifier, phase.settings.local, False, settings.seed, masks)
    broadcast = Broadcast("edit", 1, 2, before)

    def update(client: int) -> Tensor:
        task = Task(broadcast, context.client_data(client, 0), setup)
        return update_of(task, sgd(task, before)).vectors["delta"]

    alone = update(1)
    update(0)
    assert torch.equal(update(1), alone)


def test_sparsity_zero_is_dense_training(experiment: Maker, start: Path, tmp_path: Path) -> None:
    dense = edit().replace(", mask: {fisher: {samples: 40}, sparsity: 0.9}", "")
    one = run(experiment(f"model.init={start}", dense), tmp_path / "dense")
    other = run(experiment(f"model.init={start}", edit(mask="sparsity: 0.0")), tmp_path / "masked")
    assert one["model_sha256"] == other["model_sha256"]


def test_a_finished_run_is_evaluated_without_the_file_of_its_mask(experiment: Maker, tmp_path: Path) -> None:
    file = tmp_path / "mask.safetensors"
    run(experiment(edit(mask="sparsity: 0.5, scope: server, rule: random")), tmp_path / "first")
    shutil.move(tmp_path / "first/masks/edit/shared.safetensors", file)
    phase = f"phases=[{{name: edit, train: backbone, rounds: 1, mask: {{file: {file}}}, local: {{steps: 1, lr: 0.1}}}}]"
    run(experiment(phase), tmp_path / "second")
    file.unlink()
    scores = evaluate_run(tmp_path / "second")
    assert all(one["measured"] == one["recorded"] for one in scores.values())
