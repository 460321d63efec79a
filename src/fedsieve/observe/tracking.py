"""Logs a run to TensorBoard, Weights & Biases or MLflow while it runs (`track:` in an experiment).

metrics.jsonl is the truth, and a tracker a copy of it: when a run starts or resumes, a tracker gets the rounds that it
lacks, and none twice. If a tracker fails, there is a warning, and the run goes on.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

from fedsieve.config.dotted import flat
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError
from fedsieve.files.atomic import write_text
from fedsieve.observe.callbacks import Callback, Forward
from fedsieve.observe.profile import section
from fedsieve.observe.trackers import TRACKERS, TrackedRun, Tracker
from fedsieve.runs.read import FIGURES, read_metrics

METRICS = ("train_loss", "val_accuracy", "val_loss", "drift_mean", "bytes_up", "bytes_down", "seconds")


def tracked(experiment: Experiment, out: Path, callback: Callback) -> Callback:
    """The callback, with the experiment's trackers; InputError if one of them is not installed."""
    for name in experiment.track:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder called `wandb` in the current one is no package
            raise InputError(f"track: {name} needs the package {name}; pip install 'fedsieve[{name}]'")
    return Tracking(experiment, out, callback) if experiment.track else callback


class Tracking(Forward):
    """Logs events to the trackers, and passes every event on."""

    def __init__(self, experiment: Experiment, out: Path, callback: Callback) -> None:
        super().__init__(callback)
        self.experiment, self.out = experiment, out
        self.trackers: dict[str, Tracker] = {}
        self.step = 0  # rounds done, over all phases
        self.is_concluded = False

    def started(self, rounds: int, done: int) -> None:
        self.inner.started(rounds, done)
        self.step = done
        for name in dict.fromkeys(self.experiment.track):
            with self._whatever_happens(name):
                self.trackers[name] = TRACKERS[name](self._tracked_run(name, done))

    def _tracked_run(self, tracker: str, done: int) -> TrackedRun:
        run = self.out.resolve()
        return TrackedRun(
            folder=run / "tracking" / tracker,
            name=f"{run.parent.name}/{run.name}",
            identity=identity_of(run),
            settings=flat(self.experiment.model_dump(mode="json")),
            rounds=[known(line, METRICS) for line in read_metrics(run)[:done]],
        )

    def round(self, line: dict[str, Any]) -> None:
        self.step += 1
        self._tell(lambda tracker: tracker.log(self.step, known(line, METRICS)))
        self.inner.round(line)

    def concluded(self, result: dict[str, Any]) -> None:
        numbers = {f"result/{name}": value for name, value in known(result, FIGURES).items()}
        self._tell(lambda tracker: tracker.log(self.step, numbers))
        self.is_concluded = True
        self.inner.concluded(result)

    def ended(self) -> None:
        self._tell(lambda tracker: tracker.close(self.is_concluded))
        self.inner.ended()

    def _tell(self, what: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            with self._whatever_happens(name):
                what(tracker)

    @contextmanager
    def _whatever_happens(self, name: str) -> Iterator[None]:
        """A full disk or a lost network at a tracker does not end a run, whose own files have everything."""
        try:
            with section("tracking"):
                yield
        except Exception as error:
            self.trackers.pop(name, None)
            reason = shorten(str(error) or type(error).__name__, 200, placeholder="…")  # it may hold whole queries
            self.inner.warning(f"track: {name} failed ({reason}); the run goes on without it")


def identity_of(run: Path) -> str:
    """The run's id for trackers, the same after an interruption; made on first use, or if it is damaged."""
    path = run / "tracking" / "id"
    with suppress(OSError, ValueError):
        return uuid.UUID(path.read_text(encoding="utf-8")).hex
    path.parent.mkdir(exist_ok=True)
    identity = uuid.uuid4().hex
    write_text(path, identity)
    return identity


def known(line: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """The numbers that are present: not every round is evaluated."""
    return {name: line[name] for name in names if line.get(name) is not None}
