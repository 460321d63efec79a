"""FedNova's tau, and when it is FedAvg. (Its rounds are compared with plain torch in test_against_a_notebook.py.)"""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import empty

from fedsieve.config.local_settings import LocalSettings
from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from fedsieve.federate.batches import learning_rate
from fedsieve.federate.methods.fednova import tau
from fedsieve.federate.schedule import SCHEDULES
from fedsieve.federate.types import Broadcast
from fedsieve.runs.read import read_metrics
from naive import tau as naive_tau

Maker = Callable[..., Experiment]


@given(
    st.integers(1, 12),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.booleans(),
    st.sampled_from(["cosine", "constant", "linear"]),
    st.integers(1, 5),
)
def test_tau_is_the_norm_of_the_factors_of_all_gradients(
    steps: int, momentum: float, nesterov: bool, schedule: str, round: int
) -> None:
    """Against differentiating SGD's way by each gradient."""
    nesterov = nesterov and momentum > 0
    local = LocalSettings(steps=steps, lr=0.3, momentum=momentum, nesterov=nesterov, schedule=schedule)  # type: ignore[arg-type]
    rates = [learning_rate(local, round, 5, step / steps) for step in range(steps)]
    assert tau(1, local, Broadcast("one", round, 5, empty(0))) == pytest.approx(naive_tau(rates, local))


@pytest.mark.parametrize("mask", ["null", "{sparsity: 0.5, rule: random}"])
def test_equal_steps_are_fedavg_to_the_bit(mask: str, experiment: Maker, tmp_path: Path) -> None:
    steps = ("phases.0.local.epochs=null", "phases.0.local.steps=3", f"phases.1.mask={mask}")
    hashes = {
        method: run(experiment(f"phases.*.method={method}", *steps), tmp_path / method)["model_sha256"]
        for method in ("fedavg", "fednova")
    }
    assert hashes["fedavg"] == hashes["fednova"]


def test_secure_sums_give_the_same(experiment: Maker, tmp_path: Path) -> None:
    more = ("phases.*.method=fednova", "clients.split={kind: dirichlet, alpha: 0.5, balanced: false}")
    results = [run(experiment(f"clients.secure={way}", *more), tmp_path / way) for way in ("none", "zero_sum")]
    losses = [[line["val_loss"] for line in read_metrics(tmp_path / way)] for way in ("none", "zero_sum")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert results[0]["test_accuracy"] == pytest.approx(results[1]["test_accuracy"], abs=0.04)


def test_one_client_forgets_its_momentum(experiment: Maker) -> None:
    """By default one client carries it, which FedNova does not allow."""
    assert experiment("phases.0.method=fednova", "clients.count=1").resolved().phases[0].optimizer_state == "reset"


def test_learning_rates_of_zero(experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that warms up from 0, and clients of one batch: their tau is 0, and they have not moved."""
    monkeypatch.setitem(SCHEDULES, "late", lambda done: done)
    more = ("phases.*.local.schedule=late", "phases.*.local.batch_size=64", "phases.0.rounds=2", "phases.1.rounds=1")
    split = "clients.split={kind: dirichlet, alpha: 0.5, balanced: false}"
    run(experiment("phases.0.method=fednova", split, *more), tmp_path)
    assert not any(line["failed"] for line in read_metrics(tmp_path))
