"""The bar as it is drawn on a terminal, and what a run tells it."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from fedsieve.observe.callbacks import Callback, Forward
from fedsieve.observe.progress import ProgressBar, clock_time
from fedsieve.observe.time_left import PhaseEstimate

LINE = {"phase": "head", "round": 1, "train_loss": 1.0, "val_accuracy": 0.5}


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, highlight=False)


def drawn(bar: ProgressBar) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(bar.progress.get_renderable())
    return console.file.getvalue()


def test_the_bar_shows_rounds_clients_and_time_left() -> None:
    bar = ProgressBar(
        terminal(), estimate=lambda _: [PhaseEstimate("head", (1.0,) * 20), PhaseEstimate("edit", (600.0,) * 3)]
    )
    bar.planned(None, [("head", 20), ("edit", 3)])
    bar.started(23, 0)
    assert "rounds 0/23" in drawn(bar) and "30:20 left" in drawn(bar)
    bar.client(4, 10)
    assert "rounds 0/23, clients 4/10" in drawn(bar)
    bar.round(LINE)
    shown = drawn(bar)
    assert "rounds 1/23 " in shown and "head: loss 1.000, val 50.0%" in shown
    assert "30:" in shown or "29:" in shown  # twenty head rounds say little about hours of editing
    bar.phase("edit")  # the head's phase ended early
    bar.client(3, 10)
    shown = drawn(bar)
    assert "clients 3/10" in shown and "edit: …" in shown and "head" not in shown


def test_a_resumed_run_is_drawn_from_its_first_moment() -> None:
    bar = ProgressBar(terminal(), estimate=lambda _: [PhaseEstimate("head", (60.0,) * 20)])
    with bar:
        bar.planned(None, [("head", 20)])
        bar.started(20, 15)
        assert "rounds 15/20 " in drawn(bar) and "5:00 left" in drawn(bar)
    shown = bar.console.file.getvalue()
    assert "going on after round 15 of 20" in shown and "left of rounds" not in shown


def test_without_an_estimate_it_says_which_phase_is_meant() -> None:
    for estimate in (None, lambda _: 1 / 0, lambda _: [PhaseEstimate("another", (1.0,))]):
        bar = ProgressBar(terminal(), estimate=estimate)
        bar.planned(None, [("head", 20), ("edit", 3)])
        bar.started(23, 0)
        assert "-:-- left in head" in drawn(bar)


def test_nothing_is_estimated_for_a_log_file() -> None:
    asked: list[Any] = []
    log = io.StringIO()
    bar = ProgressBar(Console(file=log), estimate=asked.append)
    bar.planned(None, [("head", 1)])
    bar.started(1, 0)
    bar.client(1, 1)
    bar.round(LINE)
    assert not asked and log.getvalue() == "rounds 1 of 1 head: loss 1.000, val 50.0%\n"


def test_images_have_a_time_of_their_own() -> None:
    bar = ProgressBar(terminal())
    bar.features(1000, 4000)
    assert re.search(r"features 1,000/4,000 .* \d:\d\d left of features", drawn(bar))


def test_times_are_rounded_up() -> None:
    assert [clock_time(one) for one in (0, 0.2, 59.1, 3599.5, 3750)] == ["0:00", "0:01", "1:00", "1:00:00", "1:02:30"]


class Heard(Callback):
    def __init__(self) -> None:
        self.events: list[tuple] = []

    def planned(self, experiment: Experiment, phases: list[tuple[str, int]]) -> None:
        self.events.append(("planned", experiment.seed, list(phases)))

    def phase(self, name: str) -> None:
        self.events.append(("phase", name))

    def client(self, done: int, total: int) -> None:
        self.events.append(("client", done, total))

    def round(self, line: dict[str, Any]) -> None:
        self.events.append(("round", line["phase"], line["round"]))


def test_a_run_tells_its_phases_and_every_reply(experiment: Callable[..., Experiment], tmp_path: Path) -> None:
    heard = Heard()
    settings = experiment("model.head=ridge", "phases.0.rounds=1", "phases.1.rounds=1")
    run(settings, tmp_path / "run", callback=Forward(heard))
    assert heard.events == [
        ("planned", 7, [("ridge", 1), ("head", 1), ("all", 1)]),
        ("phase", "ridge"),
        *(("client", done, 6) for done in range(7)),
        ("round", "ridge", 1),
        ("phase", "head"),
        *(("client", done, 3) for done in range(4)),
        ("round", "head", 1),
        ("phase", "all"),
        *(("client", done, 3) for done in range(4)),
        ("round", "all", 1),
    ]


def test_forward_passes_on_every_event() -> None:
    own = {name for name in vars(Forward) if not name.startswith("_")}
    assert own == {name for name in vars(Callback) if not name.startswith("_")}
