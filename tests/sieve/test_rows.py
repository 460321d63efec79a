"""Gradients of active rows against those that plain autograd computes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsieve.sieve.adamw import SparseAdamW
from fedsieve.sieve.mask import Mask, shapes_of
from fedsieve.sieve.rows import active_rows, only_active
from fedsieve.sieve.sgdm import SparseSGDM


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed = self.mix(self.norm(inputs))
        inputs = inputs + torch.softmax(mixed @ mixed.transpose(-1, -2), -1) @ mixed
        return inputs + self.down(nn.functional.gelu(self.up(inputs)))


class Network(nn.Module):
    """Tokens of three dimensions, then a head on two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([Block(8, 12), Block(8, 12)])
        self.head = nn.Linear(8, 5)
        self.middle: Tensor | None = None  # what leaves the first block

    def forward(self, inputs: Tensor) -> Tensor:
        self.middle = self.blocks[0](self.embed(inputs))
        return self.head(self.blocks[1](self.middle)[:, 0])


def mask_with(network: nn.Module, chosen: dict[str, object]) -> Mask:
    """`chosen`: what is active of each named tensor, as an index; nothing of the others."""
    active = {name: torch.zeros_like(one, dtype=torch.bool) for name, one in network.named_parameters()}
    for name, where in chosen.items():
        active[name][where] = True  # type: ignore[index]
    return Mask.pack(shapes_of(active.items()), torch.cat([one.flatten() for one in active.values()]))


def backward(network: nn.Module) -> None:
    inputs = torch.randn(4, 7, 6, generator=torch.Generator().manual_seed(1))
    nn.functional.cross_entropy(network(inputs), torch.tensor([0, 1, 2, 3])).backward()


ALL = slice(None)
SOME: dict[str, object] = {
    "embed.weight": [0, 5],
    "blocks.0.norm.weight": [1],
    "blocks.0.mix.weight": [7],
    "blocks.0.up.weight": [2, 3, 11],
    "blocks.0.up.bias": [2],
    "blocks.1.down.weight": (ALL, [1]),  # a column is no row
    "blocks.1.up.weight": ALL,
    "head.weight": [4],
}
ROWS = {"embed.weight", "blocks.0.mix.weight", "blocks.0.up.weight", "head.weight"}


def test_the_gradients_are_those_of_plain_autograd() -> None:
    network, plain = Network(), Network()
    mask = mask_with(network, SOME)
    backward(plain)
    with only_active(network, dict(network.named_parameters()), mask):
        backward(network)
        for (name, parameter), expected in zip(network.named_parameters(), plain.parameters(), strict=True):
            assert expected.grad is not None
            if name not in SOME:
                assert parameter.grad is None
                continue
            assert parameter.grad is not None
            assert parameter.grad.is_sparse is (name in ROWS)
            if name in ROWS:
                assert parameter.grad._indices().tolist() == [SOME[name]]
                assert parameter.grad._values().shape == (len(SOME[name]), parameter.shape[1])  # type: ignore[arg-type]
            active = mask[name] if name in ROWS else torch.ones_like(parameter, dtype=torch.bool)
            torch.testing.assert_close(parameter.grad.to_dense(), expected.grad * active, rtol=1e-6, atol=1e-6)


def test_nothing_is_computed_before_the_earliest_active_tensor() -> None:
    network = Network()
    with only_active(network, dict(network.named_parameters()), mask_with(network, {"blocks.1.mix.weight": [0]})):
        backward(network)
        assert network.middle is not None and not network.middle.requires_grad
        assert [name for name, one in network.named_parameters() if one.grad is not None] == ["blocks.1.mix.weight"]
    backward(network)
    assert network.middle.requires_grad
    assert all(one.grad is not None and not one.grad.is_sparse for one in network.parameters())


def test_a_gradient_of_the_input_costs_none_of_the_weight_and_the_reverse() -> None:
    linear = nn.Linear(4, 6)
    mask = mask_with(linear, {"weight": [1, 2]})
    inputs = torch.randn(3, 4)
    with only_active(linear, dict(linear.named_parameters()), mask):
        saved = linear(inputs).grad_fn.saved_tensors
        assert saved[0] is inputs and saved[1] is None  # no gradient of the input: the weight need not be kept
        linear.weight.requires_grad_(False)
        saved = linear(inputs.requires_grad_()).grad_fn.saved_tensors
        assert saved[0] is None and torch.equal(saved[1], linear.weight)
        linear.weight.requires_grad_(True)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 1, 3, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_inputs_of_any_dimension(shape: tuple[int, ...], bias: bool) -> None:
    linear = nn.Linear(4, 6, bias=bias)
    chosen: dict[str, object] = {"weight": [0, 5]} | ({"bias": [3]} if bias else {})
    inputs = torch.randn(shape, requires_grad=True)
    wanted = torch.autograd.grad(linear(inputs).square().sum(), [inputs, *linear.parameters()])
    with only_active(linear, dict(linear.named_parameters()), mask_with(linear, chosen)):
        got = torch.autograd.grad(linear(inputs).square().sum(), [inputs, *linear.parameters()])
        torch.testing.assert_close(got[0], wanted[0])
        torch.testing.assert_close(got[1].values(), wanted[1][[0, 5]])
        torch.testing.assert_close(got[2:], wanted[2:])


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_under_autocast_it_is_what_a_plain_layer_is(shape: tuple[int, ...], bias: bool, given: torch.dtype) -> None:
    linear = nn.Linear(64, 6, bias=bias)
    chosen: dict[str, object] = {"weight": [0, 5]} | ({"bias": [3]} if bias else {})
    inputs = torch.randn(shape, dtype=given, requires_grad=True)
    target = torch.randn(*shape[:-1], 6)

    def output_and_gradients() -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.autocast("cpu", torch.bfloat16):
            output = linear(inputs)
        loss = (output.float() - target).square().sum()
        return output, torch.autograd.grad(loss, [inputs, *linear.parameters()])

    plain, wanted = output_and_gradients()
    with only_active(linear, dict(linear.named_parameters()), mask_with(linear, chosen)):
        output, got = output_and_gradients()
    assert output.dtype == torch.bfloat16 and torch.equal(output, plain)
    assert [one.dtype for one in got] == [one.dtype for one in wanted] == [given] + [torch.float32] * (1 + bias)
    bounds = {"rtol": 2**-8, "atol": 2**-8}  # the last bit may be another where the sum is in another order
    torch.testing.assert_close(got[0], wanted[0], **bounds)
    torch.testing.assert_close(got[1].values(), wanted[1][[0, 5]], **bounds)
    torch.testing.assert_close(got[2:], wanted[2:], **bounds)


def test_autocast_leaves_float64_alone() -> None:
    linear = nn.Linear(4, 6, dtype=torch.float64)
    inputs = torch.randn(3, 4, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        plain = linear(inputs)
        with only_active(linear, dict(linear.named_parameters()), mask_with(linear, {"weight": [1]})):
            output = linear(inputs)
    assert plain.dtype == output.dtype == torch.float64 and torch.equal(output, plain)


def test_a_layer_used_twice_adds_up() -> None:
    linear = nn.Linear(5, 5)
    inputs = torch.randn(3, 5)
    linear(linear(inputs)).square().sum().backward()
    assert linear.weight.grad is not None
    wanted = linear.weight.grad[[1, 3]]
    linear.weight.grad = None
    with only_active(linear, dict(linear.named_parameters()), mask_with(linear, {"weight": [1, 3]})):
        linear(linear(inputs)).square().sum().backward()
        torch.testing.assert_close(linear.weight.grad.coalesce().values(), wanted)


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before(fails: bool) -> None:
    network = Network()
    network.head.bias.requires_grad_(False)  # by its owner
    required = [one.requires_grad for one in network.parameters()]
    mask = mask_with(network, SOME)
    try:
        with only_active(network, dict(network.named_parameters()), mask):
            backward(network)
            assert "forward" in vars(network.head)
            if fails:
                raise KeyError("an error in training")
    except KeyError:
        assert fails
    assert [one.requires_grad for one in network.parameters()] == required
    assert not any("forward" in vars(one) for one in network.modules())
    for name, one in network.named_parameters():
        assert (one.grad is None) is (name not in SOME or name in ROWS)


def test_tensors_unknown_to_the_mask_are_frozen_and_those_not_given_are_left_alone() -> None:
    network = Network()
    mask = mask_with(network.blocks[1], {"up.weight": [0]})
    given = dict(network.blocks[1].named_parameters()) | {"other": network.head.weight}
    with only_active(network, given, mask):
        assert not network.head.weight.requires_grad and network.embed.weight.requires_grad
        backward(network)
        assert network.blocks[1].up.weight.grad.is_sparse  # type: ignore[union-attr]


def test_only_plain_linear_layers_are_changed() -> None:
    class Own(nn.Linear):
        pass

    network = nn.Sequential(Own(4, 4), nn.Linear(4, 4))
    network[1].forward = lambda inputs: inputs * network[1].weight.sum()  # somebody else's
    mask = mask_with(network, {"0.weight": [1], "1.weight": [1]})
    with only_active(network, dict(network.named_parameters()), mask):
        network(torch.randn(2, 4)).sum().backward()
        assert not any(one.weight.grad.is_sparse for one in network)
    assert "forward" in vars(network[1])


def test_active_rows() -> None:
    active = torch.zeros(4, 2, 3, dtype=torch.bool)
    assert active_rows(active).tolist() == []  # type: ignore[union-attr]
    active[[0, 2]] = True
    assert active_rows(active).tolist() == [0, 2]  # type: ignore[union-attr]
    active[2, 1, 2] = False
    assert active_rows(active) is None
    assert active_rows(torch.ones(4, dtype=torch.bool)) is None


@pytest.mark.parametrize(
    ("policy", "optimizer_class", "options"),
    [
        ("carry", SparseSGDM, {"lr": 0.1, "momentum": 0.9}),
        ("leak", SparseSGDM, {"lr": 0.1, "momentum": 0.9}),
        ("carry", SparseAdamW, {"lr": 0.01, "eps": 1e-3}),
    ],
)
def test_training_is_the_same_with_and_without(policy: str, optimizer_class: Any, options: dict[str, float]) -> None:
    """Rows that are redrawn, too: with "leak" the rows of the gradient are fewer than those that move."""
    networks = Network(), Network()
    masks = [mask_with(networks[0], SOME), mask_with(networks[0], {"embed.weight": [1, 5], "head.weight": [0, 4]})]
    for network, sparse in zip(networks, (True, False), strict=True):
        optimizer = optimizer_class(network.named_parameters(), masks[0], clip_norm=0.5, **options)
        for mask in masks:
            if mask is not masks[0]:
                optimizer.set_mask(mask, policy)
            for _ in range(3):
                optimizer.zero_grad()
                if sparse:
                    with only_active(network, dict(network.named_parameters()), mask):
                        backward(network)
                        optimizer.step()
                else:
                    backward(network)
                    optimizer.step()
    for one, other in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not torch.equal(networks[0].head.weight, Network().head.weight)
