"""Combinations of parts, run: cut and resumed in every phase, or with two workers, they end in the same model.

A few that together have every allowed pair; `make matrix` runs all that are allowed. Each is a phase of an experiment
with several, so that worker processes start once for all of them.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsieve.config.experiment_file import parse_experiment
from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from fedsieve.runs.read import read_metrics
from listeners import interrupt
from matrix import CHOICES, Combination, all_combinations, covering, refusal, settings_of

PHASES = 12  # of an experiment
LOCAL = {"epochs": 2, "batch_size": 16, "lr": 0.01, "clip_norm": 1.0}
BASE: dict[str, Any] = {
    "seed": 5,
    "device": "cpu",
    "threads": 1,
    "workers": 1,
    "data": {"name": "npz", "path": "given below", "image_size": 16, "limit": 120, "validation": 0.2},
    "clients": {"count": 5, "fraction": 0.6},
    "phases": [{"name": "one", "train": "all", "rounds": 2, "local": LOCAL}],
    "evaluate": {"every": 2},
}
ALLOWED = [one for one in all_combinations() if refusal(settings_of(one, BASE)) is None]
CHOSEN = ALLOWED if os.environ.get("FEDSIEVE_MATRIX") == "all" else covering(ALLOWED)


def several() -> list[list[Combination]]:
    """The chosen combinations in lists of a few; all of a list have the same secure sums, a setting of experiments."""
    found = []
    for secure in CHOICES["secure"]:
        those = [one for one in CHOSEN if one[-1] == secure]
        found += [those[first : first + PHASES] for first in range(0, len(those), PHASES)]
    return found


def experiment_of(combinations: list[Combination], backbone: Path, images: Path) -> Experiment:
    """An experiment with a phase for each combination."""
    each = [settings_of(one, BASE) for one in combinations]
    phases = [{**one["phases"][0], "name": str(number)} for number, one in enumerate(each)]
    settings = {**each[0], "model": {"backbone": str(backbone)}, "phases": phases}
    settings["data"]["path"] = str(images)
    return parse_experiment(yaml.safe_dump(settings))


@pytest.mark.parametrize("combinations", several(), ids=lambda some: f"{' '.join(some[0])} and {len(some) - 1} more")
def test_cut_and_resumed_or_with_two_workers(
    combinations: list[Combination],
    backbone: Path,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    by_workers: list[str],
) -> None:
    monkeypatch.setattr("fedsieve.runs.folder.CHECKPOINT_SHARE", float("inf"))  # a checkpoint after each round
    experiment = experiment_of(combinations, backbone, images)
    results = {"whole": run(experiment, tmp_path / "whole")}
    for number in range(len(combinations)):  # after the first of a phase's two rounds
        with pytest.raises(KeyboardInterrupt):
            run(experiment, tmp_path / "cut", resume=number > 0, callback=interrupt(2 if number else 1))
    results["cut"] = run(experiment, tmp_path / "cut", resume=True)
    assert not by_workers
    results["two"] = run(experiment.model_copy(update={"workers": 2}), tmp_path / "two")
    assert by_workers.count("train") == 2 * 3 * len(combinations)
    lines = {name: list(map(of_a_round, read_metrics(tmp_path / name))) for name in results}
    for other in ("cut", "two"):
        for line, expected in zip(lines[other], lines["whole"], strict=True):
            assert line == expected and not line["failed"], (other, combinations[int(line["phase"])])
    assert len({result["model_sha256"] for result in results.values()}) == 1


def of_a_round(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "seconds"}
