"""Clients that lie: messages in perfect form whose content is not true. Who tells them is left out, and named."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedsieve.config import Experiment
from fedsieve.errors import RunError
from fedsieve.experiment import run
from fedsieve.federate.jobs import Answer, Job
from fedsieve.federate.versions import Versions
from fedsieve.observer import Observer
from fedsieve.phases import plan, prepare
from fedsieve.runs.checkpoint import Checkpoint, Progress
from fedsieve.runs.folder import RunFolder, read_metrics
from fedsieve.sieve.mask import Mask, packed
from fedsieve.wire import Message, Vector, decode, encode
from fedsieve.workbench import Workbench, configure_torch

Maker = Callable[..., Experiment]
Lie = Callable[[Message], Message]
LOCAL = "local: {steps: 2, batch_size: 16, lr: 0.02}"
SHARED = f"phases=[{{name: edit, train: backbone, rounds: 3, {LOCAL}, mask: {{sparsity: 0.9, rule: random, %s}}}}]"


class Rounds:
    """The first round of a phase, to be done again and again, with what one of its clients sends altered."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        experiment = experiment.resolved()
        configure_torch(experiment)
        bench = Workbench(experiment, Observer())
        self.folder = RunFolder(folder, experiment, resume=False)
        self.folder.start()
        versions = Versions.at_start(bench.model, experiment.clients.count, have_backbone=True)
        state = Checkpoint(Progress(), bench.model.vector, None, versions)
        self.server = prepare(experiment, plan(experiment, bench)[0], bench, state, self.folder)
        self.exchange, self.scope, self.sizes = self.server.exchange, self.server.exchange.scope, self.server.sizes
        self.before, self.seen, self.changed = self.scope.read(), versions.seen.clone(), versions.changed.clone()
        self.warnings: list[str] = []
        self.server.warn = self.warnings.append
        self.really, self.told = self.server.ask, []
        self.server.ask = self._listen
        self.line = self.server.round(1, 0)
        self.honest = self.scope.read()
        self.order = sorted(self.line["clients"], key=lambda client: -self.sizes[client])

    def _listen(self, jobs: Iterable[Job]) -> Iterable[Answer]:
        for answer in self.really(jobs):
            self.told.append(Answer(answer.about, bytes(answer.data)))
            yield answer

    def again(self, lies: dict[int, Callable[[bytes], bytes]]) -> dict:
        """The round once more; the replies with these places in the order of arrival are others. Its line."""
        told = [Answer(one.about, bytearray(lies.get(n, bytes)(one.data))) for n, one in enumerate(self.told)]
        self.server.ask = lambda jobs: (answer for _, answer in zip(jobs, told, strict=True))
        versions = self.exchange.versions
        self.scope.write(self.before)
        versions.seen, versions.changed, versions.now = self.seen.clone(), self.changed.clone(), 0
        self.warnings.clear()
        return self.server.round(1, 0)

    def altered(self, lie: Lie) -> Callable[[bytes], bytes]:
        """A true message decoded, altered in one thing, and encoded again."""

        def alter(data: bytes) -> bytes:
            message = decode(data, self.exchange.layout, "update", self.exchange._known(), self.exchange._redraw)
            return bytes(encode(lie(message), self.exchange.layout, self.exchange.settings.values).data)

        return alter


def told(name: str, number: float) -> Lie:
    return lambda message: replace(message, numbers={**message.numbers, name: number})


def sent(change: Callable[[Vector], Vector], name: str = "delta") -> Lie:
    return lambda message: replace(message, vectors={**message.vectors, name: change(message.vectors[name])})


def without_client(rounds: Rounds, place: int) -> Tensor:
    """The average of all replies but one, by a plain loop over plain tensors."""
    total, weight = torch.zeros(len(rounds.before), dtype=torch.float64), 0.0
    for number, (client, answer) in enumerate(zip(rounds.order, rounds.told, strict=True)):
        if number != place:
            update = rounds.exchange.decode_update(bytearray(answer.data), client, 1)
            where = update.positions(len(total))
            samples = float(rounds.sizes[client])
            total[slice(None) if where is None else where] += samples * update.vectors["delta"].double()
            weight += samples
    return (rounds.before.double() + total / weight).float()


def moved(vector: Vector, size: int) -> Vector:
    """As many values at other positions."""
    active = torch.zeros(size, dtype=torch.bool)
    active[: int(sum(int(byte).bit_count() for byte in vector.bits))] = True
    return Vector(vector.values, packed(active))


# ------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("mask", ["scope: server", "scope: server, refresh: round", "scope: client"])
def test_nobody_changes_what_its_mask_freezes(experiment: Maker, tmp_path: Path, mask: str) -> None:
    """Other positions, all positions, or a few more: the others go on, and what is frozen keeps its bits."""
    rounds = Rounds(experiment(SHARED % mask), tmp_path / "run")
    size = rounds.scope.weights
    everything = torch.ones(size)
    masks = rounds.exchange.masks
    own = masks.known(rounds.order[1], 1)
    more = Mask.pack(own.shapes, own.unpack() | (torch.arange(size) < 9))
    lies = {
        "other positions": sent(lambda vector: moved(vector, size)),
        "dense": sent(lambda _: Vector(everything)),
        "all positions": sent(lambda _: Vector(everything, Mask.full(own.shapes).bits)),
        "a few more": sent(lambda _: Vector(torch.ones(more.active), more.bits)),
        "none": sent(lambda _: Vector(torch.ones(0), Mask.empty(own.shapes).bits)),
    }
    if "client" in mask:
        seed = masks.seed_of(rounds.order[0], 1)
        lies["another client's seed"] = sent(lambda vector: Vector(vector.values, masks.drawn(seed).bits, seed=seed))
    expected = without_client(rounds, 1)
    for name, lie in lies.items():
        line = rounds.again({1: rounds.altered(lie)})
        assert list(line["failed"]) == [rounds.order[1]], name
        assert "mask" in line["failed"][rounds.order[1]] and "was left out" in rounds.warnings[0]
        torch.testing.assert_close(rounds.scope.read(), expected, rtol=0, atol=1e-7)
    written_out = rounds.again({1: rounds.altered(sent(lambda vector: Vector(vector.values, vector.bits)))})
    assert not written_out["failed"] and torch.equal(rounds.scope.read(), rounds.honest)  # the same in other words


def test_own_masks_have_the_number_of_weights_that_the_settings_allow(experiment: Maker, tmp_path: Path) -> None:
    """The server cannot know a mask made from a client's own data, but it knows how many weights are active."""
    mask = "rule: smallest_magnitude, draw: exact"
    rounds = Rounds(experiment((SHARED % mask).replace("rule: random, ", "")), tmp_path / "run")
    size = rounds.scope.weights
    allowed = round(0.1 * size)
    for count in (1, allowed - 1, allowed + 1, size):
        bits = packed(torch.arange(size) < count)
        line = rounds.again({0: rounds.altered(sent(lambda _, n=count, b=bits: Vector(torch.ones(n), b)))})
        assert f"changes {count} weights, and its mask leaves {allowed} active" in line["failed"][rounds.order[0]]


# ----------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("number", [1e300, 1.7e308, 1.0, 0.0, -3.0, 10.5, float("nan")])
def test_nobody_has_more_samples_than_it_was_dealt(experiment: Maker, tmp_path: Path, number: float) -> None:
    rounds = Rounds(experiment("clients.holdout=0.2"), tmp_path / "run")
    line = rounds.again({1: rounds.altered(told("samples", number))})
    assert "samples" in line["failed"][rounds.order[1]]
    torch.testing.assert_close(rounds.scope.read(), without_client(rounds, 1), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("samples", "weight", "reason"),
    [(0, 1, "tell of 0 samples together"), (1, 1, "tell of .* and they have"), (None, -1, "positive")],
)
def test_hidden_sums_are_checked(
    experiment: Maker, tmp_path: Path, samples: int | None, weight: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients together tell of no samples, or of other ones than they have: one line, and nothing is aggregated."""
    from fedsieve.federate.hidden import HiddenUpdates

    encode_hidden = HiddenUpdates.encode

    def lying(self, update, participant):
        self.weight_of = lambda _: weight
        return encode_hidden(self, replace(update, samples=update.samples if samples is None else samples), participant)

    monkeypatch.setattr(HiddenUpdates, "encode", lying)
    with pytest.raises(RunError, match=f"phase head, round 1: .*{reason}.*nothing was aggregated"):
        Rounds(experiment("clients.secure=zero_sum"), tmp_path / "run")


# ----------------------------------------------------------------------------------------- honesty

CARRIED = "phases.0.optimizer_state=carry"
MIXED = "clients.combine={fisher_mixing: {fisher: {samples: 10}}}"


@pytest.mark.parametrize(
    "changes",
    [
        [SHARED % "scope: server, refresh: round, momentum: leak", CARRIED],
        [SHARED % "refresh: round, momentum: leak", CARRIED, "wire.values=float16"],
        [SHARED % "refresh: epoch, momentum: leak", CARRIED, "phases.0.local.steps=9"],
        [SHARED % "refresh: epoch, draw: bernoulli", "phases.0.local.steps=9"],
        [SHARED % "scope: server, refresh: round", MIXED],
        [SHARED % "refresh: once", MIXED],
        [SHARED % "unit: row, across: tensor, keep_alive: 3", "wire.values=int8"],
        [(SHARED % "unit: tensor").replace("rule: random", "rule: largest_magnitude")],
    ],
)
def test_honest_clients_are_never_left_out(experiment: Maker, tmp_path: Path, changes: list[str]) -> None:
    """Momentum that leaks and Fisher mixing change more weights than the mask of the round leaves active."""
    run(experiment(*changes, "clients.count=3", "clients.fraction=1.0", "evaluate.test=never"), tmp_path / "run")
    assert [line["failed"] for line in read_metrics(tmp_path / "run")] == [{}] * 3
