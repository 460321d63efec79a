"""The quick way to train a linear head against the slow one, to the bit."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedsieve.config import LocalSettings
from fedsieve.errors import RunError
from fedsieve.federate.client import Broadcast, ClientData, Context, train_client
from fedsieve.federate.linear import is_linear, train_linear
from fedsieve.model.flat import FlatModel


def context_of(network: nn.Module, local: LocalSettings, **more: Any) -> Context:
    model = FlatModel(nn.ModuleDict({"head": network}))
    return Context(model.scope("head"), network, local, more.pop("carry_momentum", False), 3, **more)


def client(samples: int, width: int, classes: int) -> ClientData:
    generator = torch.Generator().manual_seed(samples)
    features = 3 * torch.randn(samples, width, generator=generator)
    labels = torch.randint(0, classes, (samples,), generator=generator)
    return ClientData(5, lambda positions, _: features[positions], labels)


@given(
    samples=st.integers(1, 40),
    width=st.sampled_from([1, 3, 16, 37, 192]),
    classes=st.sampled_from([2, 7, 10, 100]),
    batch=st.integers(1, 20),
    length=st.sampled_from([{"epochs": 1}, {"epochs": 3}, {"steps": 1}, {"steps": 7}]),
    momentum=st.sampled_from([(0.0, False), (0.9, False), (0.9, True)]),
    weight_decay=st.sampled_from([0.0, 1e-4, 0.1]),
    clip_norm=st.sampled_from([None, 0.1, 100.0]),
    schedule=st.sampled_from(["constant", "cosine"]),
)
def test_the_same_bits(samples, width, classes, batch, length, momentum, weight_decay, clip_norm, schedule) -> None:
    local = LocalSettings(
        **length,
        batch_size=batch,
        lr=0.3,
        momentum=momentum[0],
        nesterov=momentum[1],
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        schedule=schedule,
    )
    torch.manual_seed(width)
    context = context_of(nn.Linear(width, classes), local)
    assert is_linear(context)
    broadcast = Broadcast("head", 2, 5, context.scope.read())
    slow, slow_state = train_client(broadcast, client(samples, width, classes), {}, context)
    quick, quick_state = train_linear(broadcast, client(samples, width, classes), {}, context)
    assert torch.equal(slow.vectors["delta"], quick.vectors["delta"])
    assert slow.metrics == quick.metrics and slow.samples == quick.samples and slow_state == quick_state == {}
    assert float(quick.vectors["delta"].abs().max()) > 0


def test_the_received_weights_stay() -> None:
    context = context_of(nn.Linear(4, 3), LocalSettings(epochs=2, lr=0.5))
    weights = context.scope.read()
    before = weights.clone()
    train_linear(Broadcast("head", 1, 1, weights), client(9, 4, 3), {}, context)
    assert torch.equal(weights, before) and torch.equal(context.scope.read(), before)


def test_a_loss_that_explodes_is_an_error_with_advice() -> None:
    context = context_of(nn.Linear(4, 3), LocalSettings(epochs=9, lr=1e30))
    with pytest.raises(RunError, match=r"became .*lower phases\.\*\.local\.lr"):
        train_linear(Broadcast("head", 1, 1, context.scope.read()), client(9, 4, 3), {}, context)


@pytest.mark.parametrize(
    ("network", "more"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), {}),
        (nn.Linear(4, 3, bias=False), {}),
        (nn.Linear(4, 3), {"carry_momentum": True}),
        (nn.Linear(4, 3), {"precision": "bfloat16"}),
        (nn.Linear(4, 3), {"masks": object()}),
        (nn.Linear(4, 3), {"mixing": object()}),
    ],
)
def test_what_is_not_plain_and_linear_goes_the_slow_way(network: nn.Module, more: dict) -> None:
    assert not is_linear(context_of(network, LocalSettings(epochs=1, lr=0.1), **more))
