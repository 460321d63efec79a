"""Phases that end before their last round."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedsieve.config.phase_settings import StopSettings
from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from fedsieve.experiment.results import why_over
from fedsieve.runs.checkpoint import Progress
from fedsieve.runs.read import read_metrics
from listeners import Listener, interrupt

Maker = Callable[..., Experiment]
LONG = ("phases.0.rounds=12", "phases.1.rounds=1", "phases.0.local.schedule=constant")


def test_a_target_ends_the_phase_and_what_it_took_is_recorded(experiment: Maker, tmp_path: Path) -> None:
    whole = run(experiment(*LONG), tmp_path / "whole")
    lines = read_metrics(tmp_path / "whole")
    curve = [line["val_accuracy"] for line in lines[:12]]
    target = max(curve[:6])
    first = next(number for number, value in enumerate(curve, 1) if value >= target)
    listener = Listener()
    result = run(experiment(*LONG, f"phases.0.stop={{target: {target}}}"), tmp_path / "cut", callback=listener)
    cut = read_metrics(tmp_path / "cut")
    assert [line["phase"] for line in cut] == ["head"] * first + ["all"]
    assert [line["val_accuracy"] for line in cut[:first]] == curve[:first]
    phase = result["phases"][0]
    assert phase["rounds"] == first < whole["phases"][0]["rounds"] == 12
    assert phase["to_target"]["rounds"] == first
    for key in ("bytes_up", "bytes_down", "seconds"):
        assert phase["to_target"][key] == pytest.approx(sum(line[key] for line in cut[:first]))
    assert any(f"ended after {first} of 12 rounds: validation accuracy reached" in note for note in listener.notes)


def test_a_target_that_is_not_reached(experiment: Maker, tmp_path: Path) -> None:
    result = run(experiment("phases.0.stop={target: 1.0}", "phases.0.rounds=1"), tmp_path)
    assert result["phases"][0]["to_target"] is None and result["phases"][0]["rounds"] == 1
    assert "to_target" not in result["phases"][1]


def test_patience(experiment: Maker, tmp_path: Path) -> None:
    """A learning rate of 0 never improves on the first round."""
    stop = ("phases.0.stop={patience: 3}", "phases.0.local.lr=0.0")
    result = run(experiment(*LONG, *stop), tmp_path)
    assert result["phases"][0]["rounds"] == 4


@pytest.mark.parametrize("rounds", [2, 4])
def test_interrupted_before_and_at_the_end_of_its_patience(rounds: int, experiment: Maker, tmp_path: Path) -> None:
    settings = experiment(*LONG, "phases.0.stop={patience: 3}", "phases.0.local.lr=0.0")
    expected = run(settings, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "cut", callback=interrupt(rounds))
    result = run(settings, tmp_path / "cut", resume=True)
    assert result["model_sha256"] == expected["model_sha256"]
    assert result["phases"][0]["rounds"] == 4


def test_patience_goes_by_accuracy_alone() -> None:
    """An equal accuracy with a lower loss is a better round to keep, but no progress."""
    progress = Progress(fingerprint="", threads=1)
    progress.best = {"round": 8, "val_accuracy": 0.4, "val_loss": 1.0, "since": 5}
    for round, is_over in ((7, False), (8, True)):
        progress.round = round
        assert bool(why_over(StopSettings(patience=3), progress)) == is_over
