"""kill -9 at any moment and --resume end in the same model as a run that nobody disturbed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fedsieve.config import Experiment

ROUNDS = (12, 8)


def command(file: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "fedsieve", "run", str(file), "--out", str(out), "--resume"]


def finished_rounds(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else -1


def kill_when(reached: Callable[[], bool], file: Path, out: Path) -> int:
    """Start the run and SIGKILL it as soon as `reached`; the rounds done by then (it must not be all)."""
    process = subprocess.Popen(command(file, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not reached():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / "result.json").exists()
    return finished_rounds(out)


def test_killed_at_five_moments(experiment: Callable[..., Experiment], tmp_path: Path) -> None:
    settings = experiment(
        f"phases.0.rounds={ROUNDS[0]}",
        f"phases.1.rounds={ROUNDS[1]}",
        "phases.1.local.steps=12",
        "evaluate.keep=best",
        "phases.0.optimizer_state=carry",
        "phases.1.optimizer_state=carry",
    )
    file = tmp_path / "experiment.yaml"
    file.write_text(settings.to_yaml())
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(file, whole), check=True, stdout=subprocess.DEVNULL)
    expected = json.loads((whole / "result.json").read_text())

    checkpoints = killed / "checkpoints"
    moments: list[Callable[[], bool]] = [
        lambda: (killed / "experiment.yaml").exists(),  # the folder is just there
        lambda: finished_rounds(killed) >= 3,
        lambda: any(checkpoints.glob(".*.partial")) or finished_rounds(killed) >= ROUNDS[0] - 1,  # while one is written
        lambda: finished_rounds(killed) >= ROUNDS[0],  # between the phases
        lambda: finished_rounds(killed) >= ROUNDS[0] + 4,
    ]
    rounds = [kill_when(moment, file, killed) for moment in moments]
    assert rounds[-1] >= ROUNDS[0] + 4
    subprocess.run(command(file, killed), check=True, stdout=subprocess.DEVNULL)
    result = json.loads((killed / "result.json").read_text())
    assert result["model_sha256"] == expected["model_sha256"]
    same = ("phase", "round", "clients", "train_loss", "val_accuracy", "val_loss", "drift_mean", "bytes_up")
    lines = [
        [{key: line[key] for key in same} for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]
        for run in (whole, killed)
    ]
    assert lines[0] == lines[1] and len(lines[0]) == sum(ROUNDS)
