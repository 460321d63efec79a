"""The quick way to train a linear head against the slow one, to the bit."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedsieve.config.local_settings import LocalSettings
from fedsieve.errors import RunError
from fedsieve.federate import local as general
from fedsieve.federate.linear import is_linear
from fedsieve.federate.local import Trained, sgd, update_of
from fedsieve.federate.types import Broadcast, ClientData, LocalSetup, Task
from fedsieve.model.flat import FlatModel


def setup_of(network: nn.Module, local: LocalSettings, **more: Any) -> LocalSetup:
    model = FlatModel(nn.ModuleDict({"head": network}))
    return LocalSetup(model.scope("head"), network, local, more.pop("carry_momentum", False), 3, **more)


def shapes(setup: LocalSetup) -> dict[str, torch.Size]:
    return {name: one.shape for name, one in setup.scope.named.items()}


def scope_sizes(setup: LocalSetup) -> list[int]:
    return [one.numel() for one in setup.scope.parameters]


def slowly(task: Task, start: torch.Tensor, **more: Any) -> Trained:
    """Without the quick way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(general, "is_linear", lambda setup: False)
        return sgd(task, start, **more)


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
    optimizer=st.sampled_from(
        [
            {"momentum": 0.0},
            {"momentum": 0.9},
            {"nesterov": True},
            {"optimizer": "adamw"},
            {"optimizer": {"adamw": {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3}}},
        ]
    ),
    weight_decay=st.sampled_from([0.0, 1e-4, 0.1]),
    clip_norm=st.sampled_from([None, 0.1, 100.0]),
    schedule=st.sampled_from(["constant", "cosine"]),
    method=st.sampled_from(["plain", "penalty", "correction"]),
)
def test_the_same_bits(
    samples, width, classes, batch, length, optimizer, weight_decay, clip_norm, schedule, method
) -> None:
    local = LocalSettings(
        **length,
        batch_size=batch,
        lr=0.3,
        **optimizer,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        schedule=schedule,
    )
    torch.manual_seed(width)
    setup = setup_of(nn.Linear(width, classes), local)
    assert is_linear(setup)
    weights = setup.scope.read()
    task = Task(Broadcast("head", 2, 5, weights), client(samples, width, classes), setup)
    anchor = dict(zip(setup.scope.named, torch.randn(len(weights)).split(scope_sizes(setup)), strict=True))
    methods: dict[str, dict] = {
        "plain": {},
        "penalty": {"penalty": lambda name, own, select: 0.1 * (own - select(anchor[name].view_as(own)))},
        "correction": {"correction": lambda name, select: select(anchor[name].view(shapes(setup)[name]))},
    }
    quick, slow = sgd(task, weights, **methods[method]), slowly(task, weights, **methods[method])
    assert torch.equal(slow.weights, quick.weights) and slow.loss == quick.loss
    assert slow.momentum == quick.momentum == {} and slow.mask is quick.mask is None
    assert not torch.equal(quick.weights, weights)
    if method != "plain":
        assert not torch.equal(quick.weights, sgd(task, weights).weights)  # it is not skipped


def test_the_received_weights_stay() -> None:
    setup = setup_of(nn.Linear(4, 3), LocalSettings(epochs=2, lr=0.5))
    weights = setup.scope.read()
    before = weights.clone()
    sgd(Task(Broadcast("head", 1, 1, weights), client(9, 4, 3), setup), weights)
    assert torch.equal(weights, before) and torch.equal(setup.scope.read(), before)


def test_a_loss_that_explodes_is_an_error_with_advice() -> None:
    setup = setup_of(nn.Linear(4, 3), LocalSettings(epochs=9, lr=1e30))
    task = Task(Broadcast("head", 1, 1, setup.scope.read()), client(9, 4, 3), setup)
    with pytest.raises(RunError, match=r"became .*lower phases\.\*\.local\.lr"):
        update_of(task, sgd(task, task.broadcast.weights))


@pytest.mark.parametrize(
    ("network", "more"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), {}),
        (nn.Linear(4, 3, bias=False), {}),
        (nn.Linear(4, 3), {"carry_momentum": True}),
        (nn.Linear(4, 3), {"precision": "bfloat16"}),
        (nn.Linear(4, 3), {"masks": object()}),
    ],
)
def test_what_is_not_plain_and_linear_goes_the_slow_way(network: nn.Module, more: dict) -> None:
    assert not is_linear(setup_of(network, LocalSettings(epochs=1, lr=0.1), **more))
