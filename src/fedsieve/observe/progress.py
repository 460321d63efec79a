"""What the user sees during a run: a bar with the estimated time left, and notes."""

from importlib.util import find_spec
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from fedsieve.observe.callbacks import Callback
from fedsieve.observe.numbers import number, percent
from fedsieve.observe.profile import Times


class ProgressBar(Callback):
    """A bar for the rounds of the whole run, and one for the images while features or a shared mask are computed."""

    def __init__(self, console: Console, title: str = "") -> None:
        self.console, self.title = console, title  # the title is printed once the input is checked
        # A notebook shows a bar only with ipywidgets.
        self.is_live = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
        self.progress = Progress(
            TextColumn("{task.description} {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not self.is_live,
        )
        self.place = ""  # of the run among those with other seeds
        self.rounds: TaskID | None = None
        self.images: TaskID | None = None
        self.times: Times | None = None  # of a run that is over

    def __enter__(self) -> "ProgressBar":
        self.progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.console.is_jupyter:
            self.progress.refresh()  # there, rich leaves out the last state
        self.progress.stop()

    def note(self, text: str) -> None:
        self.progress.console.print(f"note: {text}", soft_wrap=True)

    def warning(self, text: str) -> None:
        self.progress.console.print(f"warning: {text}", soft_wrap=True)

    def features(self, done: int, total: int) -> None:
        self._show_images("features", done, total)

    def calibration(self, done: int, total: int) -> None:
        self._show_images("calibration", done, total)

    def _show_images(self, label: str, done: int, total: int) -> None:
        self._print_tenth(label, done, total, "")
        if self.images is None:
            self.images = self.progress.add_task(label, total=total, status="")
        self.progress.update(self.images, completed=done, total=total)
        if done >= total:
            self.progress.remove_task(self.images)
            self.images = None

    def repetition(self, number: int, count: int) -> None:
        self.place = f"seed {number} of {count}, "

    def started(self, rounds: int, done: int) -> None:
        if self.title:
            self.console.print(self.title, soft_wrap=True)
            self.title = ""
        if self.rounds is not None:  # of the seed before
            self.progress.remove_task(self.rounds)
        if done:
            self.note(f"going on after round {done} of {rounds}")
        self.rounds = self.progress.add_task(f"{self.place}rounds", total=rounds, completed=done, status="")

    def round(self, line: dict[str, Any]) -> None:
        assert self.rounds is not None
        status = f"{line['phase']}: loss {number(line['train_loss'])}, val {percent(line['val_accuracy'])}"
        self.progress.update(self.rounds, advance=1, status=status)
        task = self.progress.tasks[self.progress.task_ids.index(self.rounds)]
        self._print_tenth(f"{self.place}rounds", int(task.completed), int(task.total or 1), status)

    def finished(self, times: Times) -> None:
        self.times = times

    def _print_tenth(self, label: str, done: int, total: int, status: str) -> None:
        """Print about ten lines if there is no place for a bar: in a log file, for example."""
        if not self.is_live and (done == total or done % max(1, total // 10) == 0):
            self.console.print(f"{label} {done:,} of {total:,} {status}".rstrip(), soft_wrap=True)
