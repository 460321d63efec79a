"""Callbacks for the events of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsieve.observe.profile import Times


class Callback:
    """Called at each event of a run. This one does nothing; that of the command line shows events to the user.

    `attached(experiment, folder)` comes first, and only to users' own callbacks (`@fedsieve.callback`).
    """

    def attached(self, experiment: Any, folder: Path) -> None: ...
    def note(self, text: str) -> None: ...
    def warning(self, text: str) -> None: ...
    def features(self, done: int, total: int) -> None: ...
    def calibration(self, done: int, total: int) -> None: ...
    def repetition(self, number: int, count: int) -> None: ...
    def planned(self, experiment: Any, phases: Sequence[tuple[str, int]]) -> None: ...  # names and rounds
    def started(self, rounds: int, done: int) -> None: ...
    def phase(self, name: str) -> None: ...  # begins, or goes on after an interruption
    def client(self, done: int, total: int) -> None: ...  # replies of a round so far, first 0
    def round(self, line: dict[str, Any]) -> None: ...
    def concluded(self, result: dict[str, Any]) -> None: ...
    def finished(self, times: Times) -> None: ...
    def ended(self) -> None: ...


class Forward(Callback):
    """Passes every event on to another callback; subclasses override what they handle themselves."""

    def __init__(self, inner: Callback) -> None:
        self.inner = inner

    def attached(self, experiment: Any, folder: Path) -> None:
        self.inner.attached(experiment, folder)

    def note(self, text: str) -> None:
        self.inner.note(text)

    def warning(self, text: str) -> None:
        self.inner.warning(text)

    def features(self, done: int, total: int) -> None:
        self.inner.features(done, total)

    def calibration(self, done: int, total: int) -> None:
        self.inner.calibration(done, total)

    def repetition(self, number: int, count: int) -> None:
        self.inner.repetition(number, count)

    def planned(self, experiment: Any, phases: Sequence[tuple[str, int]]) -> None:
        self.inner.planned(experiment, phases)

    def started(self, rounds: int, done: int) -> None:
        self.inner.started(rounds, done)

    def phase(self, name: str) -> None:
        self.inner.phase(name)

    def client(self, done: int, total: int) -> None:
        self.inner.client(done, total)

    def round(self, line: dict[str, Any]) -> None:
        self.inner.round(line)

    def concluded(self, result: dict[str, Any]) -> None:
        self.inner.concluded(result)

    def finished(self, times: Times) -> None:
        self.inner.finished(times)

    def ended(self) -> None:
        self.inner.ended()
