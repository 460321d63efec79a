"""SCAFFOLD's control variates: who keeps what, what is sent, and what the server accepts."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsieve.config.schema import Experiment
from fedsieve.errors import RunError
from fedsieve.experiment import run
from fedsieve.federate.methods import METHODS
from fedsieve.federate.methods.scaffold import Scaffold
from fedsieve.federate.types import State, Task, Update
from fedsieve.model.flat import FlatModel
from fedsieve.runs.model_file import load_classifier
from fedsieve.runs.read import read_metrics

Maker = Callable[..., Experiment]
PLAIN = "phases.*.local.momentum=0.0"
OWN = "phases.1.mask={sparsity: 0.9, rule: random}"
EPOCHS = "phases.1.mask={sparsity: 0.5, rule: random, refresh: epoch}"
SHARED = "phases.1.mask={sparsity: 0.9, rule: random, scope: server}"


def weights(folder: Path) -> Tensor:
    return FlatModel(load_classifier(folder)).vector


class Watched(Scaffold):
    """Records what clients remember, and the server's control variate after each round."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.own: dict[int, Tensor] = {}
        made.append(self)

    def train(self, task: Task, mine: State) -> tuple[Update, State]:
        update, state = super().train(task, mine)
        self.own[task.data.client] = state["control"].clone()
        return update, state

    def fold(self, weights: Tensor, updates: Iterator[Update], server: State) -> tuple[Tensor, State]:
        new, state = super().fold(weights, updates, server)
        self.control = state["control"].clone()
        return new, state


made: list[Watched] = []


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    made.clear()
    monkeypatch.setitem(METHODS, "scaffold", Watched)
    return made


@pytest.mark.parametrize("mask", ["phases.1.mask=null", OWN, SHARED, EPOCHS])
@pytest.mark.parametrize("secure", ["none", "zero_sum"])
def test_the_servers_control_is_the_mean_of_all_clients(
    mask: str, secure: str, experiment: Maker, tmp_path: Path, watched: list[Watched]
) -> None:
    """Those that were never asked have none; with secure sums the same comes out, up to their rounding."""
    if secure == "zero_sum" and mask not in ("phases.1.mask=null", SHARED):
        pytest.skip("masks of their own do not go with secure sums")
    run(experiment("phases.*.method=scaffold", PLAIN, mask, f"clients.secure={secure}", "phases.1.rounds=4"), tmp_path)
    phase = watched[1]
    assert len(phase.own) > 3
    mean = torch.stack(list(phase.own.values())).sum(0) / 6
    torch.testing.assert_close(phase.control, mean, rtol=1e-4, atol=1e-6)
    assert float(mean.abs().max()) > 1e-4


def test_with_eight_bits_the_servers_control_stays_near_the_mean(
    experiment: Maker, tmp_path: Path, watched: list[Watched]
) -> None:
    """What rounding takes away is sent with the next message, for both vectors."""
    more = ("wire.values=int8", "phases.1.rounds=8", "clients.fraction=1.0", "phases.1.local.schedule=constant")
    run(experiment("phases.1.method=scaffold", PLAIN, OWN, *more), tmp_path)
    control, mean = watched[0].control, torch.stack(list(watched[0].own.values())).mean(0)
    assert float((control - mean).norm()) < 0.05 * float(mean.norm())


def test_a_client_that_failed_changes_neither_side(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's control is the mean of what the clients remember that were not left out."""
    kept: dict[int, Tensor] = {}

    class Keeps(Watched):
        def train(self, task: Task, mine: State) -> tuple[Update, State]:
            before = kept.get(task.data.client)
            assert before is None if "control" not in mine else torch.equal(before, mine["control"])
            return super().train(task, mine)

        def fold(self, weights: Tensor, updates: Iterator[Update], server: State) -> tuple[Tensor, State]:
            def passing() -> Iterator[Update]:
                for update in updates:
                    kept[update.client] = self.own[update.client]
                    yield update

            new, state = super().fold(weights, passing(), server)
            torch.testing.assert_close(state["control"], sum(kept.values()) / 6, rtol=1e-4, atol=1e-6)
            return new, state

    monkeypatch.setitem(METHODS, "scaffold", Keeps)
    more = ("clients.fail_rate=0.4", "clients.fraction=1.0", "phases.1.rounds=5", "seed=3")
    run(experiment("phases.1.method=scaffold", PLAIN, *more), tmp_path)
    assert sum(len(line["failed"]) for line in read_metrics(tmp_path)[3:]) > 3


def test_the_first_round_is_fedavgs_to_the_bit(experiment: Maker, tmp_path: Path) -> None:
    for method in ("fedavg", "scaffold"):
        one = ("phases.0.rounds=1", "phases.1.rounds=1", OWN, PLAIN, f"phases.*.method={method}")
        run(experiment(*one), tmp_path / method)
    assert torch.equal(weights(tmp_path / "fedavg"), weights(tmp_path / "scaffold"))


def test_one_client_is_fedavg(experiment: Maker, tmp_path: Path) -> None:
    """Its control variate is the server's, so that they cancel."""
    for method in ("fedavg", "scaffold"):
        run(experiment("clients.count=1", PLAIN, f"phases.*.method={method}"), tmp_path / method)
    torch.testing.assert_close(weights(tmp_path / "scaffold"), weights(tmp_path / "fedavg"), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("mask", "least", "most"), [("phases.1.mask=null", 1.95, 2.05), (SHARED, 1.8, 2.05)])
def test_both_vectors_are_counted_and_masks_save_bytes_of_both(
    mask: str, least: float, most: float, experiment: Maker, tmp_path: Path
) -> None:
    """In the third round of the phase all clients have the weights of the first."""
    for method in ("fedavg", "scaffold"):
        run(experiment(PLAIN, mask, f"phases.1.method={method}", "wire.broadcast=full"), tmp_path / method)
    plain, sent = (read_metrics(tmp_path / name)[4] for name in ("fedavg", "scaffold"))
    assert least < sent["bytes_up"] / plain["bytes_up"] < most
    down = sent["bytes_down"] - plain["bytes_down"]  # one vector more, and only the active weights of it
    up = sent["bytes_up"] - plain["bytes_up"]
    assert 0.9 < down / up < 1.1


def test_an_absurd_control_variate_is_left_out(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lies(Scaffold):
        def train(self, task: Task, mine: State) -> tuple[Update, State]:
            update, state = super().train(task, mine)
            if task.data.client == 2 and task.broadcast.round > 1:
                update.vectors["control"].fill_(1e8)
            return update, state

    monkeypatch.setitem(METHODS, "scaffold", Lies)
    more = ("clients.fraction=1.0", "phases.0.rounds=2", "phases.1.rounds=1")
    run(experiment("phases.0.method=scaffold", PLAIN, *more), tmp_path)
    lines = read_metrics(tmp_path)
    assert [list(line["failed"]) for line in lines] == [[], ["2"], []]
    assert "the norm of its update" in lines[1]["failed"]["2"]


def test_numbers_too_large_for_secure_sums_are_refused(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Explodes(Scaffold):
        def train(self, task: Task, mine: State) -> tuple[Update, State]:
            update, state = super().train(task, mine)
            update.vectors["control"][0] = 1e12
            return update, state

    monkeypatch.setitem(METHODS, "scaffold", Explodes)
    with pytest.raises(RunError, match=r"a value of size 1e\+12 exceeds"):
        run(experiment("phases.0.method=scaffold", PLAIN, "clients.secure=zero_sum"), tmp_path)


@pytest.mark.parametrize("secure", ["none", "zero_sum"])
def test_the_order_of_vectors_does_not_matter(
    secure: str, experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Backwards(Scaffold):
        @property
        def replies(self) -> dict[str, int]:
            return dict(reversed(super().replies.items()))

        def train(self, task: Task, mine: State) -> tuple[Update, State]:
            update, state = super().train(task, mine)
            return replace(update, vectors=dict(reversed(update.vectors.items()))), state

    changes = ("phases.*.method=scaffold", PLAIN, SHARED, f"clients.secure={secure}")
    run(experiment(*changes), tmp_path / "usual")
    monkeypatch.setitem(METHODS, "scaffold", Backwards)
    run(experiment(*changes), tmp_path / "backwards")
    assert torch.equal(weights(tmp_path / "usual"), weights(tmp_path / "backwards"))
