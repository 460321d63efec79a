"""Sensitivity against its slow twin: one backward pass per sample, written out."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsieve.model.vit import ViT, ViTShape
from fedsieve.sieve.sensitivity import sensitivity

pytestmark = pytest.mark.filterwarnings("ignore:the sensitivity of")  # a test of its own is about that
Batches = list[tuple[Tensor, Tensor]]
EVERY_KIND = ViTShape(
    image_size=16, patch_size=8, width=12, depth=2, heads=3, hidden=20, layer_scale=True, registers=2, epsilon=1e-6
)


def vit() -> nn.Module:
    return nn.Sequential(ViT(EVERY_KIND), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5))


class Odd(nn.Module):
    """Parameters without a rule, a layer used twice, tied weights, and a layer that mixes up the batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 16 * 16, 6)
        self.twice = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.also_tied = nn.Linear(6, 6)
        self.also_tied.weight = self.tied.weight
        self.shift = nn.Parameter(torch.randn(6))
        self.by_feature = nn.Linear(6, 4)
        self.last = nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(images.flatten(1)))
        hidden = self.twice(torch.tanh(self.twice(hidden))) * self.shift
        hidden = torch.tanh(self.also_tied(torch.tanh(self.tied(hidden))))
        mixed = self.by_feature(torch.stack([hidden, hidden.cos()], dim=0))  # (2, batch, 6)
        return self.last(mixed.sum(dim=0))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, stride=2),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 3, groups=2, dilation=2),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(6),
        nn.Linear(6, 5, bias=False),
    )


class UsedElsewhere(nn.Module):
    """Weights that layers use, and F.linear, too; only the last layer is as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 16 * 16, 6)
        self.middle = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(images.flatten(1)))
        hidden = F.linear(torch.tanh(self.middle(hidden)), self.middle.weight.T)
        return self.last(self.norm(hidden) * self.norm.weight)


class SequenceFirst(nn.Module):
    """Layers that see (tokens, batch, width), with as many tokens as some batches have samples."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.embed = nn.Linear(3 * 16 * 16, 6 * tokens)
        self.mix = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images.flatten(1)).view(len(images), self.tokens, 6).transpose(0, 1)
        return self.last(self.norm(torch.tanh(self.mix(tokens))).sum(dim=0))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "vit": vit,
    "odd": Odd,
    "convolutional": convolutional,
    "used elsewhere": UsedElsewhere,
    "as many tokens as samples": lambda: SequenceFirst(4),
    "as many tokens as samples in the last batch": lambda: SequenceFirst(3),
}
SLOW = {  # layers that a warning must name
    "odd": "twice, by_feature",
    "used elsewhere": "middle, norm",
    "as many tokens as samples": "mix, norm",
    "as many tokens as samples in the last batch": "mix, norm",
}


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(3)
    made = NETWORKS[request.param]().double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for module in made.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    return made


def some_batches(sizes: tuple[int, ...] = (4, 3)) -> Batches:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(n, 3, 16, 16, generator=generator).double(), torch.randint(0, 5, (n,), generator=generator))
        for n in sizes
    ]


def one_backward_per_sample(
    network: nn.Module, batches: Batches, labels_of: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The sum of squared gradients of log p(y | x), sample by sample and label by label."""
    network.eval()
    totals = [torch.zeros_like(parameter) for parameter in network.parameters()]
    for inputs, labels in batches:
        chosen = labels_of(inputs, labels)
        for sample in range(len(inputs)):
            for label in chosen[sample]:
                network.zero_grad()
                F.log_softmax(network(inputs[sample : sample + 1]), dim=1)[0, label].backward()
                for total, parameter in zip(totals, network.parameters(), strict=True):
                    total += parameter.grad**2
    network.zero_grad()
    return torch.cat([total.flatten() for total in totals])


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8 * float(expected.median()))


@pytest.mark.parametrize("draws", [1, 3])
def test_exact_draws_labels_from_the_prediction(network: nn.Module, draws: int) -> None:
    batches = some_batches()
    found, count = sensitivity(
        network, dict(network.named_parameters()), batches, "exact", draws, torch.Generator().manual_seed(9)
    )
    generator = torch.Generator().manual_seed(9)

    def drawn(inputs: Tensor, _: Tensor) -> Tensor:
        probabilities = network(inputs).detach().softmax(dim=1)
        return torch.multinomial(probabilities, draws, replacement=True, generator=generator)

    same(found, one_backward_per_sample(network, batches, drawn))
    assert count == 7 * draws


def test_empirical_takes_the_datas_labels(network: nn.Module) -> None:
    batches = some_batches()
    found, count = sensitivity(network, dict(network.named_parameters()), batches, "empirical")
    same(found, one_backward_per_sample(network, batches, lambda _, labels: labels[:, None]))
    assert count == 7


def test_batch_squares_each_batchs_gradient(network: nn.Module) -> None:
    batches = some_batches()
    found, count = sensitivity(network, dict(network.named_parameters()), batches, "batch")
    expected = torch.zeros_like(found)
    for inputs, labels in batches:
        network.zero_grad()
        F.cross_entropy(network.eval()(inputs), labels).backward()
        expected += torch.cat([parameter.grad.flatten() for parameter in network.parameters()]) ** 2
    same(found, expected)
    assert count == 2


def test_batches_of_one_are_the_empirical_ones(network: nn.Module) -> None:
    batches, parameters = some_batches((1, 1, 1)), dict(network.named_parameters())
    same(
        sensitivity(network, parameters, batches, "batch")[0], sensitivity(network, parameters, batches, "empirical")[0]
    )


def test_how_samples_are_batched_changes_nothing(network: nn.Module) -> None:
    inputs, labels = some_batches((7,))[0]
    parameters = dict(network.named_parameters())
    whole = sensitivity(network, parameters, [(inputs, labels)], "empirical")[0]
    cut = sensitivity(network, parameters, list(zip(inputs.split(3), labels.split(3), strict=True)), "empirical")[0]
    same(cut, whole)


def test_a_part_of_the_parameters(network: nn.Module) -> None:
    """Only what is asked for, whatever it is: as in the whole, and in the order asked for."""
    batches, everything = some_batches(), dict(network.named_parameters())
    whole, _ = sensitivity(network, everything, batches, "empirical")
    parts = dict(zip(everything, whole.split([one.numel() for one in everything.values()]), strict=True))
    for names in (list(everything)[-2:], list(everything)[3:5], list(everything)[:1]):
        found, _ = sensitivity(network, {name: everything[name] for name in names}, batches, "empirical")
        same(found, torch.cat([parts[name] for name in names]))


def test_the_expectation_of_exact_is_the_fisher_information() -> None:
    """A linear model's has a closed form: mean of x_j^2 (p_k - p_k^2), which many draws come close to."""
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 3).double(), torch.randn(10, 4).double()
    total, count = sensitivity(
        model,
        dict(model.named_parameters()),
        [(inputs, torch.zeros(10).long())],
        "exact",
        4_000,
        torch.Generator().manual_seed(1),
    )
    p = model(inputs).softmax(dim=1).detach()
    variance = p * (1 - p)
    expected = torch.cat(((variance.T @ inputs**2).flatten(), variance.sum(dim=0))) / 10
    torch.testing.assert_close(total / count, expected, rtol=0.06, atol=0)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_warning_names_the_layers_that_take_a_backward_pass_per_sample(name: str) -> None:
    torch.manual_seed(0)
    network, heard = NETWORKS[name](), list[str]()
    batch = (torch.randn(4, 3, 16, 16), torch.arange(4))
    sensitivity(network, dict(network.named_parameters()), [batch], warn=heard.append)
    assert [text.split(" takes")[0] for text in heard] == [f"the sensitivity of {SLOW.get(name)}"] * (name in SLOW)


def test_a_gradient_that_is_only_rounding_noise_is_no_reason_for_a_warning() -> None:
    """The bias of the keys moves all logits of a softmax alike; here a layer has no other weight."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.value = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, tokens: Tensor) -> Tensor:
            keys = tokens + self.shift.bias + 0 * self.shift(tokens)
            return (torch.softmax(tokens @ keys.mT, dim=-1) @ self.value(tokens)).mean(dim=1)

    torch.manual_seed(0)
    network, heard = Attention(), list[str]()
    batch = (torch.randn(4, 9, 16), torch.arange(4))
    sensitivity(network, dict(network.named_parameters()), [batch], warn=heard.append)
    assert heard == []


def test_the_network_is_left_as_it_was(network: nn.Module) -> None:
    network.train()
    next(iter(network.parameters())).requires_grad_(False)
    flags = [one.requires_grad for one in network.parameters()]
    state = {name: value.clone() for name, value in network.state_dict().items()}
    for kind in ("exact", "empirical", "batch"):
        sensitivity(network, dict(network.named_parameters()), some_batches(), kind)
    assert [one.requires_grad for one in network.parameters()] == flags
    assert all(module.training for module in network.modules())
    assert all(parameter.grad is None for parameter in network.parameters())
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_nothing_of_it_stays_in_memory() -> None:
    """At once, not when the garbage collector comes by: in a round of many clients that may be too late."""
    network = ViT(ViTShape(image_size=8, patch_size=4, width=16, depth=2, heads=2, hidden=32))
    parameters = dict(network.named_parameters())
    images, labels = torch.randn(3, 3, 8, 8), torch.tensor([0, 1, 2])
    gc.disable()
    try:
        found, _ = sensitivity(network, parameters, [(images, labels)], "empirical")
        kept = weakref.ref(found)
        del found
        assert kept() is None
    finally:
        gc.enable()
