"""One experiment from several seeds."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedsieve.analysis.repeat import repeat
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError
from fedsieve.experiment import run
from fedsieve.experiment.export_split import export_split
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.read import read_result

Maker = Callable[..., Experiment]
SMALL = ("phases.0.rounds=2", "phases.1.rounds=1")


class Listener(Callback):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def note(self, text: str) -> None:
        self.heard.append(text)

    def repetition(self, number: int, count: int) -> None:
        self.heard.append(f"{number} of {count}")


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_seed_is_the_run_it_would_be_alone(experiment: Maker, tmp_path: Path) -> None:
    listener = Listener()
    results = repeat(experiment(*SMALL), tmp_path / "all", 3, callback=listener)
    assert [result["seed"] for result in results] == [7, 8, 9]
    assert len({result["model_sha256"] for result in results}) == 3
    alone = run(experiment(*SMALL, "seed=8"), tmp_path / "alone")
    assert alone["model_sha256"] == results[1]["model_sha256"] == read_result(tmp_path / "all/seed-8")["model_sha256"]
    assert [text for text in listener.heard if " of 3" in text] == ["1 of 3", "2 of 3", "3 of 3"]

    said = json.loads((tmp_path / "all/seeds.json").read_text())
    values = [read_result(tmp_path / f"all/seed-{seed}")["test_loss"] for seed in (7, 8, 9)]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert said["seeds"] == [7, 8, 9] and said["test_loss"]["values"] == values
    assert said["test_loss"]["mean"] == pytest.approx(np.mean(values))
    assert (said["test_loss"]["low"], said["test_loss"]["high"]) == pytest.approx((low, high))


def test_more_seeds_join_those_that_are_finished(experiment: Maker, tmp_path: Path) -> None:
    first = repeat(experiment(*SMALL, "evaluate.test=never"), tmp_path, 2)
    listener = Listener()
    results = repeat(experiment(*SMALL, "evaluate.test=never"), tmp_path, 3, resume=True, callback=listener)
    assert results[:2] == first and len(results) == 3
    assert sum("finished already" in text for text in listener.heard) == 2
    said = json.loads((tmp_path / "seeds.json").read_text())
    assert len(said["val_loss"]["values"]) == 3 and said["test_accuracy"] is None


def test_a_folder_that_is_not_ours_is_left_as_it_is(experiment: Maker, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/letter.txt").touch()
    run(experiment(*SMALL), tmp_path / "single")
    repeat(experiment(*SMALL, "seed=8"), tmp_path / "seeds", 1)
    before = content(tmp_path)
    for name, resume, overrides, part in [
        ("file", True, (), "is a file"),
        ("other", True, (), "something else than runs over seeds"),
        ("single", True, (), "holds a single run"),
        ("seeds", False, (), "runs of this experiment already; add --resume"),
        (
            "seeds",
            True,
            ("clients.count=5",),
            "seed-8 holds a different run (clients.count is 6 in its experiment.yaml, 5 here)",
        ),
    ]:
        with pytest.raises(InputError) as error:
            repeat(experiment(*SMALL, *overrides), tmp_path / name, 2, resume)
        assert part in str(error.value)
    assert content(tmp_path) == before


def test_killed_in_the_second_seed_and_resumed(experiment: Maker, tmp_path: Path) -> None:
    file, out = tmp_path / "small.yaml", tmp_path / "killed"
    settings = experiment("phases.0.rounds=30")
    file.write_text(settings.to_yaml())
    command = [sys.executable, "-m", "fedsieve", "run", str(file), "--out", str(out), "--seeds", "2", "--resume"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    metrics = out / "seed-8/metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, "the command ended before it could be killed"
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    first = content(out / "seed-7")
    assert (out / "seed-7/result.json").exists() and not (out / "seed-8/result.json").exists()
    assert not (out / "seeds.json").exists()
    results = repeat(settings, out, 2, resume=True)
    assert content(out / "seed-7") == first
    whole = repeat(settings, tmp_path / "whole", 2)
    assert [one["model_sha256"] for one in results] == [one["model_sha256"] for one in whole]


# ---------------------------------------------------------------------------------------- the command


@pytest.fixture
def file(experiment: Maker, tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(experiment(*SMALL).to_yaml())
    return path


def test_run_over_seeds_ends_with_a_table(fedsieve: Callable, file: Path) -> None:
    code, printed, _ = fedsieve("run", str(file), "--seeds", "3")
    assert code == 0 and "seed 2 of 3, rounds 3 of 3" in printed
    accuracies = [read_result(Path(f"runs/small/seed-{seed}"))["test_accuracy"] for seed in (7, 8, 9)]
    rows = {line.split("│")[1].strip(): line for line in printed.splitlines() if line.startswith("│")}
    for seed, accuracy in zip("789", accuracies, strict=True):
        assert f" {100 * accuracy:.1f}% " in rows[seed]
    margin = stats.t.ppf(0.975, 2) * stats.sem(accuracies)
    assert f"{100 * np.mean(accuracies):.1f} ± {100 * margin:.1f}%" in rows["mean"]
    assert "written to runs/small, figures in seeds.json" in printed and Path("runs/small/seeds.json").exists()


def test_one_seed_is_the_run_itself(fedsieve: Callable, file: Path) -> None:
    assert fedsieve("run", str(file), "--seeds", "1", "--out", "one")[0] == 0
    assert Path("one/result.json").exists() and not Path("one/seeds.json").exists()


def test_bad_input_over_seeds_writes_nothing(fedsieve: Callable, file: Path) -> None:
    for arguments, part in [
        (["--seeds", "0"], "--seeds"),
        (["--seeds", "2", "clients.count=500"], "500"),
        (["--seeds", "2", "--profile"], "--profile looks at one run"),
        (["--seeds", "2", "--resume"], "add --out DIR"),
        (["--seeds", "2", f"seed={2**63 - 1}"], "use a lower seed"),
    ]:
        code, printed, said = fedsieve("run", str(file), *arguments)
        assert code == 2 and said.startswith("error: ") and part in said and not printed
        assert len(said.splitlines()) == 1
    assert list(Path.cwd().iterdir()) == []


def test_data_of_one_seed_at_nodes(fedsieve: Callable, file: Path, experiment: Maker, tmp_path: Path) -> None:
    """The manifest of a federation says so before the first run begins, and before --force deletes anything."""
    export_split(experiment(), tmp_path / "shards")
    (tmp_path / "nodes").mkdir()
    engine = f"engine={{sockets: {{folder: {tmp_path}/nodes, manifest: {tmp_path}/shards/federation.json, wait: 0}}}}"
    assert fedsieve("run", str(file), "--out", "all", "--seeds", "2")[0] == 0
    before = content(Path("all"))
    for arguments in (["--out", "new"], ["--out", "new", "--dry-run"], ["--out", "all", "--force", "--yes"]):
        code, printed, said = fedsieve("run", str(file), engine, "--seeds", "2", *arguments)
        assert code == 2 and not printed
        assert said == (
            "error: 2 seeds are asked for, and the federation's data were split for seed 7; use that one, or remove "
            "made_for from the manifest\n"
        )
    assert content(Path("all")) == before and not Path("new").exists()
    with pytest.raises(InputError, match="for seed 7;"):
        repeat(experiment(engine), tmp_path / "new", 2)
    with pytest.raises(InputError, match="0 of 6 nodes came"):
        repeat(experiment(engine), tmp_path / "new", 1)
