"""What methods of the literature need of the seams: each of these is one small class, and nothing else changes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsieve.config.schema import Experiment
from fedsieve.config.settings import Real
from fedsieve.config.settings import Settings as AnySettings
from fedsieve.context import RunContext
from fedsieve.errors import InputError, RunError
from fedsieve.experiment import run
from fedsieve.federate.aggregators import AGGREGATORS
from fedsieve.federate.batches import batches, learning_rate, number_of_steps
from fedsieve.federate.local import Trained, sgd, update_of
from fedsieve.federate.methods import METHODS
from fedsieve.federate.methods.fedavg import FedAvg
from fedsieve.federate.preparation import Preparation
from fedsieve.federate.server_optimizers import SERVER_OPTIMIZERS
from fedsieve.federate.types import State, Task, Update
from fedsieve.model.flat import FlatModel
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.model_file import load_classifier
from fedsieve.runs.read import read_metrics, read_result
from listeners import Listener, interrupt

Maker = Callable[..., Experiment]
ROWS = "phases.1.mask={sparsity: 0.5, rule: random, unit: row, scope: server}"
OWN = "phases.1.mask={sparsity: 0.5, rule: random}"


class FedProx(FedAvg):
    """Clients minimise their loss + mu / 2 |w - w_server|^2 (Li et al., MLSys 2020)."""

    class Settings(AnySettings):
        mu: Real = 0.1

    settings: Settings

    def train(self, task: Task, mine: State) -> tuple[Update, State]:
        server = self.scope.split(task.broadcast.weights)
        pull = lambda name, own, select: self.settings.mu * (own - select(server[name]))  # noqa: E731
        trained = sgd(task, task.broadcast.weights, mine, penalty=pull)
        return update_of(task, trained), trained.momentum


class Scaffold(FedAvg):
    """Control variates, option II (Karimireddy et al., ICML 2020)."""

    is_hidden_by_sums = False

    @property
    def extras(self) -> dict[str, int]:
        return {"control": self.scope.weights}

    @property
    def replies(self) -> dict[str, int]:
        return {**super().replies, "control": self.scope.weights}

    def start(self, weights: Tensor, preparation: Preparation) -> State:
        clients = torch.tensor(float(len(preparation.sizes)))
        state = {"control": torch.zeros_like(weights[: self.scope.weights]), "clients": clients}
        return super().start(weights, preparation) | state

    def send(self, server: State) -> dict[str, Tensor]:
        return {"control": server["control"]}

    def train(self, task: Task, mine: State) -> tuple[Update, State]:
        broadcast, local, size = task.broadcast, task.setup.local, self.scope.weights
        control = broadcast.extras["control"]
        own = mine.get("control", torch.zeros_like(control)).to(control.device)
        shift = self.scope.split(control - own)
        trained = sgd(task, broadcast.weights, mine, correction=lambda name, select: select(shift[name]))
        steps = number_of_steps(len(task.data), local)
        way = sum(learning_rate(local, broadcast.round, broadcast.rounds, step / steps) for step in range(steps))
        new = own - control + (broadcast.weights - trained.weights)[:size] / way
        update = update_of(task, trained)
        change = {"control": new - own}
        return replace(update, vectors={**update.vectors, **change}), {**trained.momentum, "control": new.cpu()}

    def fold(self, weights: Tensor, updates: Iterator[Update], server: State) -> tuple[Tensor, State]:
        control = server["control"]

        def passing() -> Iterator[Update]:
            for update in updates:
                control.add_(update.vectors["control"] / server["clients"])
                yield update

        return super().fold(weights, passing(), server)


class FedAdam:
    """m <- b1 m + (1 - b1) d;  v <- b2 v + (1 - b2) d^2;  w <- w + lr m / (sqrt(v) + tau) (Reddi et al., ICLR 2021)."""

    def __init__(self, settings: AnySettings) -> None: ...

    def start(self, weights: Tensor) -> State:
        return {name: torch.zeros_like(weights, dtype=torch.float64) for name in ("m", "v")}

    def step(self, weights: Tensor, direction: Tensor, state: State) -> tuple[Tensor, State]:
        d = direction
        m, v = state["m"].mul_(0.9).add_(d, alpha=0.1), state["v"].mul_(0.99).addcmul_(d, d, value=0.01)
        return (weights.double() + 0.01 * m / (v.sqrt() + 1e-3)).float(), {"m": m, "v": v}


class Median:
    """The median of each weight's changes (Yin et al., ICML 2018); what a mask froze counts as unchanged."""

    needs_all = True

    def __init__(self, settings: AnySettings, weights: Tensor) -> None:
        self.size, self.kept = len(weights), list[Update]()

    def add(self, update: Update) -> None:
        self.kept.append(update)

    def finish(self) -> Tensor:
        changes = torch.zeros(len(self.kept), self.size)
        for row, update in zip(changes, self.kept, strict=True):
            where = update.positions(self.size)
            row[slice(None) if where is None else where] = update.vectors["delta"]
        return changes.quantile(0.5, dim=0).double()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry, parts in ((METHODS, (FedProx, Scaffold)), (AGGREGATORS, (Median,))):
        for part in parts:
            monkeypatch.setitem(registry, part.__name__.lower(), part)


def weights(folder: Path) -> Tensor:
    return FlatModel(load_classifier(folder)).vector


@pytest.mark.parametrize("mask", ["phases.1.mask=null", ROWS, OWN, "phases.1.optimizer_state=carry"])
@pytest.mark.parametrize("part", ["method=fedprox", "method=scaffold", "aggregate=median", "adam"])
def test_killed_and_resumed_the_same_model(
    part: str, mask: str, experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What server and clients remember is in the checkpoints, with and without masks."""
    plain = run(experiment(mask, "phases.1.rounds=4"), tmp_path / "plain")
    if part == "adam":
        monkeypatch.setitem(SERVER_OPTIMIZERS, "sgd", FedAdam)
    settings = experiment(mask, "phases.1.rounds=4", *([f"phases.*.{part}"] if part != "adam" else []))
    expected = run(settings, tmp_path / "whole")
    monkeypatch.setattr("fedsieve.runs.folder.CHECKPOINT_SHARE", float("inf"))  # one each round
    for rounds in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            run(settings, tmp_path / "cut", resume=True, callback=interrupt(rounds))
    assert run(settings, tmp_path / "cut", resume=True)["model_sha256"] == expected["model_sha256"]
    assert plain["model_sha256"] != expected["model_sha256"]
    assert not any(line["failed"] for line in read_metrics(tmp_path / "whole"))


@pytest.mark.parametrize("train", ["head", "all"])
def test_fedprox_is_plain_torch_with_a_term_in_the_loss(train: str, experiment: Maker, tmp_path: Path) -> None:
    """By the quick way for a head, and by the general one."""
    phase = f"{{name: one, train: {train}, rounds: 1, local: {{steps: 5, lr: 0.05, batch_size: 16, clip_norm: 1.0}}}}"
    method = "phases.*.method={fedprox: {mu: 3.0}}"
    settings = experiment("clients.count=1", f"phases=[{phase}]", method, "data.augment=[]").resolved()
    run(settings, tmp_path / "run")

    context, (phase_settings,) = RunContext(settings, Callback()), settings.phases
    model, local = context.classifier.eval(), phase_settings.local
    own = context.training[context.partition.clients[0]]
    inputs, labels = context.transform.evaluation(context.data.train.images[own]), context.data.train.labels[own]
    trained = list((model.head if train == "head" else model).parameters())
    start = [one.detach().clone() for one in trained]
    optimizer = torch.optim.SGD(trained, local.lr, local.momentum, weight_decay=local.weight_decay)
    drawn = [one for epoch in batches(len(own), local, settings.seed, "one", 1, 0) for one in epoch]
    for step, positions in enumerate(drawn):
        optimizer.param_groups[0]["lr"] = learning_rate(local, 1, 1, step / len(drawn))
        far = sum((one - first).square().sum() for one, first in zip(trained, start, strict=True))
        loss = torch.nn.functional.cross_entropy(model(inputs[positions]), labels[positions]) + 1.5 * far
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    torch.testing.assert_close(FlatModel(model).vector, weights(tmp_path / "run"), rtol=1e-4, atol=1e-6)


def test_scaffolds_server_control_is_the_mean_of_the_clients(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controls: dict[str, Any] = {}

    class Watched(Scaffold):
        def train(self, task: Task, mine: State) -> tuple[Update, State]:
            update, state = super().train(task, mine)
            controls[str(task.data.client)] = state["control"].clone()
            return update, state

        def fold(self, weights: Tensor, updates: Iterator[Update], server: State) -> tuple[Tensor, State]:
            new, state = super().fold(weights, updates, server)
            mean = sum(controls.values()) / 6  # of six clients; those that were never asked have none
            torch.testing.assert_close(state["control"], mean, rtol=1e-4, atol=1e-6)
            return new, state

    monkeypatch.setitem(METHODS, "watched", Watched)
    run(experiment("phases.0.method=watched", "phases.0.rounds=5", "phases.1.rounds=1"), tmp_path / "run")
    assert len(controls) == 6
    run(experiment("phases.0.rounds=1", "phases.1.rounds=1"), tmp_path / "plain")
    sent, plain = (read_metrics(tmp_path / name)[0] for name in ("run", "plain"))
    for way in ("bytes_up", "bytes_down"):  # a second vector goes both ways, and is counted
        assert sent[way] > 1.5 * plain[way]


def test_scaffold_with_one_client_is_fedavg(experiment: Maker, tmp_path: Path) -> None:
    """Its control variate is the server's, so that they cancel."""
    for method in ("fedavg", "scaffold"):
        run(experiment("clients.count=1", f"phases.*.method={method}"), tmp_path / method)
    torch.testing.assert_close(weights(tmp_path / "scaffold"), weights(tmp_path / "fedavg"), rtol=1e-3, atol=1e-6)


def test_the_median_is_numpys(experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five clients' updates that are still what they were when all have arrived."""
    seen: list[np.ndarray] = []

    class Watched(Median):
        def add(self, update: Update) -> None:
            super().add(update)
            seen.append(update.vectors["delta"].numpy().copy())

        def finish(self) -> Tensor:
            direction = super().finish()
            np.testing.assert_allclose(direction.numpy(), np.median(np.stack(seen), axis=0), rtol=1e-6)
            seen.clear()
            return direction

    monkeypatch.setitem(AGGREGATORS, "median", Watched)
    run(experiment("phases.*.aggregate=median", "clients.count=5", "clients.fraction=1.0"), tmp_path)
    assert read_result(tmp_path)["test_accuracy"] > 0.5


def test_adam_is_its_formula(experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    class Watched(FedAdam):
        def step(self, weights: Tensor, direction: Tensor, state: State) -> tuple[Tensor, State]:
            before, change = weights.clone(), direction.clone()
            after, state = super().step(weights, direction, state)
            seen.append((before, change, after.clone()))
            return after, state

    monkeypatch.setitem(SERVER_OPTIMIZERS, "sgd", Watched)
    run(experiment("phases.0.rounds=4", "phases.1.rounds=1"), tmp_path)
    m = v = 0.0
    for before, d, after in seen[:4]:
        m, v = 0.9 * m + 0.1 * d, 0.99 * v + 0.01 * d**2
        torch.testing.assert_close(after, (before + 0.01 * m / (v**0.5 + 1e-3)).float())


# -------------------------------------------------------------------------------- what a part may do wrong


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
    settings = experiment("phases.0.method=scaffold", "phases.1.rounds=1")
    with pytest.raises(RunError, match="new weights are not finite"):
        run(settings, tmp_path / "run")
    fails = False
    result = run(settings, tmp_path / "run", resume=True)
    assert result["model_sha256"] == run(settings, tmp_path / "other")["model_sha256"]


def test_a_client_that_does_not_train_leaves_the_servers_weights_alone(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Idle(FedAvg):
        def train(self, task: Task, mine: State) -> tuple[Update, State]:
            return update_of(task, Trained(task.broadcast.weights, 0.0)), {}

    monkeypatch.setitem(METHODS, "idle", Idle)
    settings = experiment("phases.*.method=idle").resolved()
    run(settings, tmp_path)
    assert torch.equal(weights(tmp_path), RunContext(settings, Callback()).model.vector)


def test_what_needs_single_updates_does_not_go_with_secure_sums(experiment: Maker, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"median needs single updates, which clients\.secure: zero_sum hides"):
        run(experiment("clients.secure=zero_sum", "phases.*.aggregate=median"), tmp_path / "median")
    with pytest.raises(InputError, match="scaffold sends more than the updates"):
        experiment("clients.secure=zero_sum", "phases.*.method=scaffold")


def test_added_methods_run_in_one_process(experiment: Maker, tmp_path: Path) -> None:
    settings, listener = experiment("phases.*.method=fedprox", "workers=2", "phases.*.rounds=1"), Listener()
    run(settings, tmp_path, callback=listener)
    assert sum("going on in one process" in note for note in listener.notes) == 1
