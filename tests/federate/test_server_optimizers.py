"""Server optimizers against direct readings of their formulas, and against Flower's strategies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from fedsieve.federate.server_optimizers import SERVER_OPTIMIZERS
from fedsieve.federate.server_optimizers.sgd import Sgd
from fedsieve.federate.server_step import MOMENTS, either, server_step
from fedsieve.federate.types import State
from fedsieve.runs.read import read_metrics
from fedsieve.sieve.mask import Mask
from listeners import interrupt

Maker = Callable[..., Experiment]
ADAPTIVE = {"lr": 0.1, "beta1": 0.8, "tau": 0.01}


def made(name: str, **settings: float) -> Any:
    part = SERVER_OPTIMIZERS[name]
    return part(part.Settings(**settings))


def steps(optimizer: Any, weights: Tensor, directions: list[Tensor]) -> Tensor:
    state: State = optimizer.start(weights)
    for direction in directions:
        weights, state = optimizer.step(weights, direction.clone(), state)
        weights = weights.clone()  # it lies in the direction's memory
    return weights


@pytest.fixture
def directions() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 1e-2, 1e-4, 0.0, 3.0], dtype=torch.float64)
    return [torch.randn(5, generator=generator, dtype=torch.float64) * scale for _ in range(6)]


def test_sgd_is_torchs(directions: list[Tensor]) -> None:
    """FedAvgM: the direction is the negative gradient."""
    weights = torch.nn.Parameter(torch.arange(5.0))
    reference = torch.optim.SGD([weights], lr=0.3, momentum=0.9)
    for direction in directions:
        weights.grad = -direction.float()
        reference.step()
    found = steps(made("sgd", lr=0.3, momentum=0.9), torch.arange(5.0), directions)
    torch.testing.assert_close(found, weights.detach(), rtol=1e-5, atol=1e-6)


SECOND = {
    "adam": lambda v, d: 0.95 * v + 0.05 * d**2,
    "yogi": lambda v, d: v - 0.05 * d**2 * np.sign(v - d**2),
    "adagrad": lambda v, d: v + d**2,
}


@pytest.mark.parametrize("name", SECOND)
def test_adaptive_ones_are_their_formulas(name: str, directions: list[Tensor]) -> None:
    """Reddi et al., algorithm 2: no bias correction, v starts at tau^2."""
    beta2 = {} if name == "adagrad" else {"beta2": 0.95}
    found = steps(made(name, **ADAPTIVE, **beta2), torch.arange(5.0), directions)
    w, m, v = np.arange(5.0), np.zeros(5), np.full(5, 0.01**2)
    for d in (direction.numpy() for direction in directions):
        m, v = 0.8 * m + 0.2 * d, SECOND[name](v, d)
        w = w + 0.1 * m / (np.sqrt(v) + 0.01)
    np.testing.assert_allclose(found, w, rtol=1e-5)


@pytest.mark.parametrize("name", ["avgm", *SECOND])
def test_flowers_strategies_take_the_same_steps(name: str, directions: list[Tensor]) -> None:
    """From the same updates of three clients, round by round."""
    strategies = pytest.importorskip("flwr.server.strategy")
    common = pytest.importorskip("flwr.common")
    start = np.arange(5.0)
    first = common.ndarrays_to_parameters([start])
    beta2 = {} if name == "adagrad" else {"beta2": 0.95}
    if name == "avgm":
        flower = strategies.FedAvgM(initial_parameters=first, server_learning_rate=0.3, server_momentum=0.9)
        optimizer = made("sgd", lr=0.3, momentum=0.9)
    else:
        kind = {"adam": "FedAdam", "yogi": "FedYogi", "adagrad": "FedAdagrad"}[name]
        betas = {} if name == "adagrad" else {"beta_1": 0.8, "beta_2": 0.95}
        flower = getattr(strategies, kind)(initial_parameters=first, eta=0.1, tau=0.01, **betas)
        optimizer = made(name, **{**ADAPTIVE, "beta1": betas.get("beta_1", 0.0)}, **beta2)
    weights = torch.from_numpy(start.copy()).float()
    state, theirs = optimizer.start(weights), start
    flower.initialize_parameters(None)
    if hasattr(flower, "v_t"):
        flower.m_t, flower.v_t = [np.zeros(5)], [np.full(5, 0.01**2)]  # as in the paper; Flower starts v at 0
    for number, direction in enumerate(directions, 1):
        sizes, shares = [10, 30, 60], np.array([0.5, 1.5, 5 / 6])  # deltas whose weighted mean is the direction
        deltas = [share * direction.numpy() for share in shares]
        direction = torch.from_numpy(np.average(deltas, axis=0, weights=sizes))
        if name == "adam":  # its learning rate has Adam's bias correction, and counts rounds from 2
            flower.eta = 0.1 / (np.sqrt(1 - 0.95 ** (number + 1)) / (1 - 0.8 ** (number + 1)))
        results = [
            (None, common.FitRes(None, common.ndarrays_to_parameters([theirs + delta]), size, {}))
            for delta, size in zip(deltas, sizes, strict=True)
        ]
        new, _ = flower.aggregate_fit(number, results, [])
        theirs = common.parameters_to_ndarrays(new)[0]
        weights, state = optimizer.step(weights, direction.clone(), state)
        weights = weights.clone()
        np.testing.assert_allclose(weights, theirs, rtol=2e-5, atol=1e-6)


@given(
    st.sampled_from([("sgd", {"lr": 0.5}), ("sgd", {"momentum": 0.9}), ("adam", {}), ("yogi", {}), ("adagrad", {})]),
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.integers(0, 2),
)
def test_what_nobody_trained_keeps_value_and_moments(kind: tuple[str, dict], active: list[bool], buffers: int) -> None:
    optimizer, size = made(kind[0], **kind[1]), 8  # six weights under masks, two always trained, then buffers
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(size + buffers, generator=generator)
    weights[0] = -0.0
    direction = torch.randn(size + buffers, generator=generator, dtype=torch.float64)
    mask = Mask.pack({"a": (6,)}, torch.tensor(active))
    trained = torch.tensor([*active, True, True])
    direction[:size] *= trained
    before = {name: torch.rand(size, generator=generator) for name in optimizer.start(weights[:size])}
    server = {f"{MOMENTS}{name}": one.clone() for name, one in before.items()} | {"m": torch.ones(3)}  # of the method
    after, state = server_step(optimizer, weights, direction.clone(), server, mask, size)
    plain, moments = optimizer.step(weights[:size], direction[:size].clone(), {n: o.clone() for n, o in before.items()})
    assert torch.equal(after[:size][~trained].view(torch.int32), weights[:size][~trained].view(torch.int32))
    torch.testing.assert_close(after[:size][trained], plain[trained])
    torch.testing.assert_close(after[size:], (weights.double() + direction)[size:].float())
    for name, one in before.items():
        assert torch.equal(state[f"{MOMENTS}{name}"][~trained], one[~trained])
        torch.testing.assert_close(state[f"{MOMENTS}{name}"][trained], moments[name][trained])
    assert torch.equal(state["m"], torch.ones(3))


def test_the_weights_that_some_client_trained() -> None:
    one, other = (Mask.pack({"a": (4,)}, torch.tensor(bits) > 0) for bits in ([1, 0, 0, 1], [0, 0, 1, 1]))
    assert either(one, one) is one and either(one, None) is None and either(None, one) is None
    union = either(one, other)
    assert union is not None and union.positions.tolist() == [0, 2, 3]


@pytest.mark.parametrize("kind", ["{sgd: {momentum: 0.9}}", "adam", "{yogi: {lr: 0.02}}", "adagrad"])
def test_a_run_with_masks_moves_only_what_was_trained(kind: str, experiment: Maker, tmp_path: Path) -> None:
    mask = "phases.1.mask={sparsity: 0.7, rule: random, scope: server, refresh: round}"
    run(experiment(mask, "phases.1.rounds=3", f"phases.*.server_optimizer={kind}"), tmp_path)
    lines = read_metrics(tmp_path)
    assert not any(line["failed"] for line in lines)
    dense = lines[0]["bytes_down"]
    assert dense > 0 and lines[-1]["val_accuracy"] is not None


def test_an_optimizer_derived_from_sgd_keeps_its_state(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    class Counts(Sgd):
        def start(self, weights: Tensor) -> State:
            return {"count": torch.zeros_like(weights)}

        def step(self, weights: Tensor, direction: Tensor, state: State) -> tuple[Tensor, State]:
            seen.append(float(state["count"].max()))
            return super().step(weights, direction, {})[0], {"count": state["count"] + 1}

    monkeypatch.setitem(SERVER_OPTIMIZERS, "counts", Counts)
    run(experiment("phases.0.server_optimizer=counts", "phases.1.rounds=1"), tmp_path)
    assert seen == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("method", ["scaffold", "{fisher_mixing: {fisher: {samples: 4}}}"])
def test_a_method_and_an_optimizer_may_give_their_memories_the_same_names(
    method: str, experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a run that is interrupted."""

    def optimizer(names: tuple[str, str]) -> type:
        class Mine:
            def __init__(self, settings: Any) -> None: ...

            def start(self, weights: Tensor) -> State:
                assert len(weights)  # asked once, for the weights in scope
                return {name: torch.zeros_like(weights) for name in names}

            def step(self, weights: Tensor, direction: Tensor, state: State) -> tuple[Tensor, State]:
                state = {name: 0.5 * one + direction.float() for name, one in state.items()}
                return weights + state[names[0]], state

        return Mine

    changes = (f"phases.0.method={method}", "phases.0.local.momentum=0.0", "phases.1.rounds=1")
    hashes = set()
    for names in (("control", "clients"), ("fisher", "momentum"), ("one", "other")):
        monkeypatch.setitem(SERVER_OPTIMIZERS, "mine", optimizer(names))
        settings, folder = experiment(*changes, "phases.0.server_optimizer=mine"), tmp_path / names[0]
        with pytest.raises(KeyboardInterrupt):
            run(settings, folder, callback=interrupt(2))
        hashes.add(run(settings, folder, resume=True)["model_sha256"])
    assert len(hashes) == 1
