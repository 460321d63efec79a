"""Who hears what a run does."""

from typing import Any

from fedsieve.profile import Times


class Observer:
    """Hears what a run does; this one keeps silent, the command line's shows it to a person."""

    def note(self, text: str) -> None: ...
    def warning(self, text: str) -> None: ...
    def features(self, done: int, total: int) -> None: ...
    def calibration(self, done: int, total: int) -> None: ...
    def repetition(self, number: int, count: int) -> None: ...
    def started(self, rounds: int, done: int) -> None: ...
    def round(self, line: dict[str, Any]) -> None: ...
    def concluded(self, result: dict[str, Any]) -> None: ...
    def finished(self, times: Times) -> None: ...
    def ended(self) -> None: ...


class Relay(Observer):
    """Passes on what it hears; who wants to do more about something overrides that."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def note(self, text: str) -> None:
        self.observer.note(text)

    def warning(self, text: str) -> None:
        self.observer.warning(text)

    def features(self, done: int, total: int) -> None:
        self.observer.features(done, total)

    def calibration(self, done: int, total: int) -> None:
        self.observer.calibration(done, total)

    def repetition(self, number: int, count: int) -> None:
        self.observer.repetition(number, count)

    def started(self, rounds: int, done: int) -> None:
        self.observer.started(rounds, done)

    def round(self, line: dict[str, Any]) -> None:
        self.observer.round(line)

    def concluded(self, result: dict[str, Any]) -> None:
        self.observer.concluded(result)

    def finished(self, times: Times) -> None:
        self.observer.finished(times)

    def ended(self) -> None:
        self.observer.ended()
