"""Combinations of parts, run: cut and resumed with two workers, they end in the same model as at one go with one.

A few that together have every allowed pair; `make matrix` runs all that are allowed.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsieve.config.experiment_file import parse_experiment
from fedsieve.experiment import run
from fedsieve.runs.read import read_metrics
from listeners import interrupt
from matrix import Combination, all_combinations, covering, refusal, settings_of

LOCAL = {"epochs": 2, "batch_size": 16, "lr": 0.01, "clip_norm": 1.0}
BASE: dict[str, Any] = {
    "seed": 5,
    "device": "cpu",
    "threads": 1,
    "data": {"name": "npz", "path": "given below", "image_size": 16, "limit": 120, "validation": 0.2},
    "clients": {"count": 5, "fraction": 0.6},
    "phases": [{"name": "one", "train": "all", "rounds": 2, "local": LOCAL}],
    "evaluate": {"every": 2},
}
ALLOWED = [one for one in all_combinations() if refusal(settings_of(one, BASE)) is None]
CHOSEN = ALLOWED if os.environ.get("FEDSIEVE_MATRIX") == "all" else covering(ALLOWED)


@pytest.mark.parametrize("combination", CHOSEN, ids=", ".join)
def test_killed_and_resumed_with_more_workers(
    combination: Combination, backbone: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(combination, BASE)
    settings["data"]["path"], settings["model"] = str(images), {"backbone": str(backbone)}
    experiment = parse_experiment(yaml.safe_dump(settings))
    expected = run(experiment, tmp_path / "whole")
    monkeypatch.setattr("fedsieve.runs.folder.CHECKPOINT_SHARE", float("inf"))  # one each round
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "cut", callback=interrupt(1))
    workers = experiment.model_copy(update={"workers": 2})
    assert run(workers, tmp_path / "cut", resume=True)["model_sha256"] == expected["model_sha256"]
    assert not any(line["failed"] for line in read_metrics(tmp_path / "whole"))
