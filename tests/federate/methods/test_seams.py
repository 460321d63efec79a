"""What parts of a user's own may rely on, and what they may do wrong."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.errors import InputError, RunError
from fedsieve.experiment import run
from fedsieve.federate.aggregators import AGGREGATORS
from fedsieve.federate.aggregators.mean import Mean
from fedsieve.federate.aggregators.median import Median
from fedsieve.federate.local import Trained, update_of
from fedsieve.federate.methods import METHODS
from fedsieve.federate.methods.fedavg import FedAvg
from fedsieve.federate.methods.scaffold import Scaffold
from fedsieve.federate.types import State, Task, Update
from fedsieve.model.flat import FlatModel
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.model_file import load_classifier
from listeners import Listener

Maker = Callable[..., Experiment]


class Idle(FedAvg):
    """Clients do nothing."""

    def train(self, task: Task, mine: State) -> tuple[Update, State]:
        return update_of(task, Trained(task.broadcast.weights, 0.0)), {}


def test_a_client_that_does_not_train_leaves_the_servers_weights_alone(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "idle", Idle)
    settings = experiment("phases.*.method=idle").resolved()
    run(settings, tmp_path)
    assert torch.equal(FlatModel(load_classifier(tmp_path)).vector, RunContext(settings, Callback()).model.vector)


def test_a_round_that_fails_leaves_the_server_as_it_was(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the method has changed its memory in place."""
    fails = True

    class Failing(Scaffold):
        def fold(self, weights: Tensor, updates: Iterator[Update], server: State) -> tuple[Tensor, State]:
            new, state = super().fold(weights, updates, server)
            return (new * torch.nan if fails and float(server["control"].abs().sum()) > 1 else new), state

    monkeypatch.setitem(METHODS, "scaffold", Failing)
    settings = experiment("phases.0.method=scaffold", "phases.0.local.momentum=0.0", "phases.1.rounds=1")
    with pytest.raises(RunError, match="new weights are not finite"):
        run(settings, tmp_path / "run")
    fails = False
    result = run(settings, tmp_path / "run", resume=True)
    assert result["model_sha256"] == run(settings, tmp_path / "other")["model_sha256"]


def test_updates_that_an_aggregator_keeps_stay_as_they_were(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until all have arrived, with two workers."""
    copies: list[Tensor] = []

    class Watched(Median):
        def add(self, update: Update) -> None:
            super().add(update)
            copies.append(update.vectors["delta"].clone())

        def finish(self) -> Tensor:
            assert all(torch.equal(kept, copy) for (kept, _), copy in zip(self.updates, copies, strict=True))
            copies.clear()
            return super().finish()

    monkeypatch.setitem(AGGREGATORS, "median", Watched)
    mask = "phases.1.mask={sparsity: 0.5, rule: random}"
    run(experiment("phases.*.aggregate=median", "clients.fraction=1.0", "workers=2", mask), tmp_path)
    assert not copies


def test_what_needs_single_updates_does_not_go_with_secure_sums(
    experiment: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(Mean):
        """An aggregator of one's own, which may look at single updates although it derives from the mean."""

    class Sums(Mean):
        """An aggregator for which the average of all updates does."""

        takes_averages = True

    class Tells(FedAvg):
        """A method that sends something in the open."""

        is_hidden_by_sums = False

    monkeypatch.setitem(AGGREGATORS, "mine", Mine)
    monkeypatch.setitem(AGGREGATORS, "sums", Sums)
    monkeypatch.setitem(METHODS, "tells", Tells)
    with pytest.raises(
        InputError, match=r"phases\.0\.aggregate: mine does not go with clients\.secure: zero_sum: it nee"
    ):
        experiment("clients.secure=zero_sum", "phases.*.aggregate=mine")
    assert experiment("clients.secure=zero_sum", "phases.*.aggregate=sums").phases[0].aggregate == "sums"
    with pytest.raises(
        InputError, match=r"phases\.0\.method: tells does not go with clients\.secure: zero_sum: it sends"
    ):
        experiment("clients.secure=zero_sum", "phases.*.method=tells")


def test_added_methods_run_in_one_process(experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "idle", Idle)
    settings, listener = experiment("phases.*.method=idle", "workers=2", "phases.*.rounds=1"), Listener()
    run(settings, tmp_path, callback=listener)
    assert sum("going on in one process" in note for note in listener.notes) == 1
