"""Combinations of parts, run: killed in every phase and resumed, or with two workers, they end in the same model.

A few that together have every allowed pair; `make matrix` runs all that are allowed. Each is a phase of an experiment
with several, so that worker processes start once for all of them.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsieve.config.experiment_file import parse_experiment
from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.read import read_metrics
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
def test_killed_and_resumed_or_with_two_workers(
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
    for _ in combinations:  # in the second of each phase's two rounds
        killed_in_a_second_round(experiment, tmp_path / "killed")
    results["killed"] = run(experiment, tmp_path / "killed", resume=True)
    assert not by_workers
    results["two"] = run(experiment.model_copy(update={"workers": 2}), tmp_path / "two")
    assert by_workers.count("train") == 2 * 3 * len(combinations)
    lines = {name: list(map(of_a_round, read_metrics(tmp_path / name))) for name in results}
    for other in ("killed", "two"):
        for line, expected in zip(lines[other], lines["whole"], strict=True):
            assert line == expected and not line["failed"], (other, combinations[int(line["phase"])])
    assert len({result["model_sha256"] for result in results.values()}) == 1


class Killer(Callback):
    """Ends the process, as `kill -9` does, when the first client of a second round has replied."""

    rounds = 0  # of the phase; the first may have been done before

    def phase(self, name: str) -> None:
        self.rounds = 0

    def round(self, line: dict[str, Any]) -> None:
        self.rounds = line["round"]

    def client(self, done: int, total: int) -> None:
        if self.rounds == 1 and done == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_in_a_second_round(experiment: Experiment, folder: Path) -> None:
    """Goes on with a run in a process of its own until that is killed."""
    if not (process := os.fork()):
        try:
            signal.alarm(120)  # rather than waiting forever
            run(experiment, folder, resume=True, callback=Killer())
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def of_a_round(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "seconds"}
