"""A run told to TensorBoard, Weights & Biases or MLflow while it goes on (`track:` in an experiment).

metrics.jsonl is the truth, and a tracker a copy of it: what a tracker lacks when a run starts or goes on is told to
it again, and nothing twice. A tracker that fails costs a warning, never the run.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

from fedsieve.config import Experiment
from fedsieve.errors import InputError
from fedsieve.observer import Observer, Relay
from fedsieve.profile import section
from fedsieve.runs.atomic import write_text
from fedsieve.runs.collection import FIGURES, flat
from fedsieve.runs.read import read_metrics
from fedsieve.runs.trackers import TRACKERS, Story, Tracker

METRICS = ("train_loss", "val_accuracy", "val_loss", "drift_mean", "bytes_up", "bytes_down", "seconds")


def tracked(experiment: Experiment, out: Path, observer: Observer) -> Observer:
    """The observer, with the trackers that the experiment asks for; an error if one of them is not installed."""
    for name in experiment.track:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder called `wandb` in the current one is no package
            raise InputError(f"track: {name} needs the package {name}; pip install 'fedsieve[{name}]'")
    return Tracking(experiment, out, observer) if experiment.track else observer


class Tracking(Relay):
    """Tells the trackers what it hears, and passes everything on."""

    def __init__(self, experiment: Experiment, out: Path, observer: Observer) -> None:
        super().__init__(observer)
        self.experiment, self.out = experiment, out
        self.trackers: dict[str, Tracker] = {}
        self.step = 0  # rounds done, over all phases
        self.is_concluded = False

    def started(self, rounds: int, done: int) -> None:
        self.observer.started(rounds, done)
        self.step = done
        for name in dict.fromkeys(self.experiment.track):
            with self._whatever_happens(name):
                self.trackers[name] = TRACKERS[name](self._story(name, done))

    def _story(self, tracker: str, done: int) -> Story:
        run = self.out.resolve()
        return Story(
            folder=run / "tracking" / tracker,
            name=f"{run.parent.name}/{run.name}",
            identity=identity_of(run),
            settings=flat(self.experiment.model_dump(mode="json")),
            rounds=[known(line, METRICS) for line in read_metrics(run)[:done]],
        )

    def round(self, line: dict[str, Any]) -> None:
        self.step += 1
        self._tell(lambda tracker: tracker.log(self.step, known(line, METRICS)))
        self.observer.round(line)

    def concluded(self, result: dict[str, Any]) -> None:
        numbers = {f"result/{name}": value for name, value in known(result, FIGURES).items()}
        self._tell(lambda tracker: tracker.log(self.step, numbers))
        self.is_concluded = True
        self.observer.concluded(result)

    def ended(self) -> None:
        self._tell(lambda tracker: tracker.close(self.is_concluded))
        self.observer.ended()

    def _tell(self, what: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            with self._whatever_happens(name):
                what(tracker)

    @contextmanager
    def _whatever_happens(self, name: str) -> Iterator[None]:
        """A full disk or a lost network is no reason to end a run; its own files have everything."""
        try:
            with section("tracking"):
                yield
        except Exception as error:
            self.trackers.pop(name, None)
            reason = shorten(str(error) or type(error).__name__, 200, placeholder="…")  # it may hold whole queries
            self.observer.warning(f"track: {name} failed ({reason}); the run goes on without it")


def identity_of(run: Path) -> str:
    """What trackers know the run by, before and after an interruption; made up when first asked for, or if damaged."""
    path = run / "tracking" / "id"
    with suppress(OSError, ValueError):
        return uuid.UUID(path.read_text(encoding="utf-8")).hex
    path.parent.mkdir(exist_ok=True)
    identity = uuid.uuid4().hex
    write_text(path, identity)
    return identity


def known(line: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Those of the numbers that there are: not every round is evaluated."""
    return {name: line[name] for name in names if line.get(name) is not None}
