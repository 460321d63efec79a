"""Callbacks for tests: one that keeps what it hears, and one that ends a run."""

from fedsieve.observe.callbacks import Callback


class Listener(Callback):
    """Keeps what a run says; after some rounds, if asked, it ends the run as Ctrl-C would."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.left = stop_after

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    def round(self, line: dict) -> None:
        if self.left is not None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt


def interrupt(rounds: int) -> Listener:
    """Ends a run after some rounds."""
    return Listener(stop_after=rounds)
