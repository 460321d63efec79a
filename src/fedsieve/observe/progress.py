"""What the user sees during a run: a bar with the estimated time left, and notes."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from fedsieve.observe.callbacks import Callback
from fedsieve.observe.numbers import number, percent
from fedsieve.observe.profile import Times
from fedsieve.observe.time_left import Others, PhaseEstimate, TimeLeft

EstimatePhases = Callable[[Any], Sequence[PhaseEstimate]]  # of an experiment, phase by phase


class Shown(ProgressColumn):
    """Asks a function for its text whenever the bar is drawn, which is ten times a second."""

    def __init__(self, text: Callable[[Task], str]) -> None:
        super().__init__()
        self.text = text

    def render(self, task: Task) -> Text:
        return Text(self.text(task))


class ProgressBar(Callback):
    """A bar for the rounds of the whole run, and one for the images while features or a shared mask are computed."""

    def __init__(self, console: Console, title: str = "", estimate: EstimatePhases | None = None) -> None:
        """The title is printed once the input is checked. `estimate` is called only if there is a terminal.

        Without it, the bar shows the time left in the current phase.
        """
        self.console, self.title, self.estimate = console, title, estimate
        # A notebook shows a bar only with ipywidgets.
        self.is_live = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
        self.progress = Progress(
            Shown(self._place),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[status]}"),
            Shown(self._left),
            console=console,
            disable=not self.is_live,
        )
        self.place = ""  # of the run among those with other seeds
        self.rounds: TaskID | None = None
        self.images: TaskID | None = None
        self.clients = (0, 0)  # of the current round: those that have replied, and all
        self.phases: Sequence[PhaseEstimate] = ()
        self.is_timed = False  # whether they are estimates in seconds
        self.others, self.time_left = Others(), TimeLeft([PhaseEstimate("", (1.0,))], is_timed=False)
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
            self.images = self.progress.add_task(label, total=total, status="", began=time.monotonic())
        self.progress.update(self.images, completed=done, total=total)
        if done >= total:
            self.progress.remove_task(self.images)
            self.images = None

    def repetition(self, number: int, count: int) -> None:
        self.place = f"seed {number} of {count}, "
        self.others.left = count - number

    def planned(self, experiment: Any, phases: Sequence[tuple[str, int]]) -> None:
        estimates: Sequence[PhaseEstimate] = ()
        if self.estimate is not None and self.is_live:
            with suppress(Exception):  # a run does not end because its time could not be estimated
                estimates = self.estimate(experiment)
        self.is_timed = [(one.name, len(one.rounds)) for one in estimates] == list(phases)
        self.phases = estimates if self.is_timed else [PhaseEstimate(name, (1.0,) * rounds) for name, rounds in phases]

    def started(self, rounds: int, done: int) -> None:
        if self.title:
            self.console.print(self.title, soft_wrap=True)
            self.title = ""
        if self.rounds is not None:  # of the seed before
            self.progress.remove_task(self.rounds)
        if done:
            self.note(f"going on after round {done} of {rounds}")
        phases = self.phases or [PhaseEstimate("", (1.0,) * rounds)]
        self.time_left = TimeLeft(phases, done, self.is_timed, self.others)
        self.rounds = self.progress.add_task(f"{self.place}rounds", total=rounds, completed=done, status="")

    def phase(self, name: str) -> None:
        assert self.rounds is not None
        self.time_left.enter(name)
        self.progress.update(self.rounds, status=f"{name}: …")

    def client(self, done: int, total: int) -> None:
        """Quick, since small clients reply thousands of times a second: the bar looks when it is drawn."""
        self.clients = done, total
        self.time_left.client(done, total)

    def round(self, line: dict[str, Any]) -> None:
        assert self.rounds is not None
        self.clients = 0, 0
        self.time_left.round(line["round"])
        status = f"{line['phase']}: loss {number(line['train_loss'])}, val {percent(line['val_accuracy'])}"
        self.progress.update(self.rounds, advance=1, status=status)
        task = self.progress.tasks[self.progress.task_ids.index(self.rounds)]
        self._print_tenth(f"{self.place}rounds", int(task.completed), int(task.total or 1), status)

    def finished(self, times: Times) -> None:
        self.times = times
        self.time_left.finished()

    def _place(self, task: Task) -> str:
        """`rounds 3/23, clients 4/10`, or `features 2,000/60,000`."""
        text = f"{task.description} {task.completed:,.0f}/{task.total or 0:,.0f}"
        done, total = self.clients
        return f"{text}, clients {done:,}/{total:,}" if total and "began" not in task.fields else text

    def _left(self, task: Task) -> str:
        if "began" not in task.fields:  # the rounds'; self.rounds is not known when they are drawn first
            seconds, time_left = self.time_left.seconds(), self.time_left
            place = "" if time_left.is_whole else f" in {time_left.phases[time_left.phase].name}"
        else:
            done = task.completed / (task.total or 1)
            seconds = (time.monotonic() - task.fields["began"]) * (1 / done - 1) if done else None
            place = f" of {task.description}"
        return f"{'-:--' if seconds is None else clock_time(seconds)} left{place}"

    def _print_tenth(self, label: str, done: int, total: int, status: str) -> None:
        """Print about ten lines if there is no place for a bar: in a log file, for example."""
        if not self.is_live and (done == total or done % max(1, total // 10) == 0):
            self.console.print(f"{label} {done:,} of {total:,} {status}".rstrip(), soft_wrap=True)


def clock_time(seconds: float) -> str:
    """`0:09`, `12:30` or `1:02:30`; rounded up, so that only what is over shows 0:00."""
    minutes, rest = divmod(int(-(-seconds // 1)), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
