"""kill -9 at any moment and --resume end in the same model as a run that nobody disturbed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsieve.config.schema import Experiment

HEAD, ALL = 12, 8  # rounds


def command(file: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "fedsieve", "run", str(file), "--out", str(out), "--resume"]


def finished_rounds(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else -1


def is_writing_a_checkpoint(out: Path) -> bool:
    return finished_rounds(out) >= 1 and any((out / "checkpoints").glob(".*.partial"))


# In this order each moment is still to come when the run goes on after the one before.
MOMENTS: dict[str, Callable[[Path], bool]] = {
    "the folder is just there": lambda out: (out / "experiment.yaml").exists(),
    "while a checkpoint is written": lambda out: is_writing_a_checkpoint(out) or finished_rounds(out) >= 4,
    "in the first phase": lambda out: finished_rounds(out) >= 8,
    "between the phases": lambda out: finished_rounds(out) >= HEAD,
    "in the second phase": lambda out: finished_rounds(out) >= HEAD + 4,
}


def outcome(out: Path) -> tuple[str, list[dict]]:
    """The model's hash, and the metrics less what is measured in seconds."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"]
    return json.loads((out / "result.json").read_text())["model_sha256"], lines


@pytest.fixture
def file(experiment: Callable[..., Experiment], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with all that a checkpoint has to hold: carried momentum, the best weights, masks."""
    settings = experiment(
        f"phases.0.rounds={HEAD}",
        f"phases.1.rounds={ALL}",
        "phases.1.local.steps=12",
        "evaluate.keep=best",
        "phases.0.optimizer_state=carry",
        "phases.1.optimizer_state=carry",
        "phases.1.mask={sparsity: 0.5, calibration_rounds: 2, fisher: {samples: 16}}",
    )
    path = tmp_path_factory.mktemp("killed") / "experiment.yaml"
    path.write_text(settings.to_yaml())
    return path


def killed_at(moment: str, file: Path, out: Path) -> None:
    assert not MOMENTS[moment](out), f"{moment}: the run is past it"
    process = subprocess.Popen(command(file, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not MOMENTS[moment](out):
        assert process.poll() is None, f"the run ended before it could be killed ({moment})"
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / "result.json").exists()


def test_killed_at_every_moment_and_resumed(file: Path, tmp_path: Path) -> None:
    """One run that is killed at one moment after the other: each resumed run starts from what the last kill left."""
    whole, out = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(file, whole), check=True, stdout=subprocess.DEVNULL)
    assert len(outcome(whole)[1]) == HEAD + ALL
    for moment in MOMENTS:
        killed_at(moment, file, out)
    subprocess.run(command(file, out), check=True, stdout=subprocess.DEVNULL)
    assert outcome(out) == outcome(whole)
