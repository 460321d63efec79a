"""`run --force`: a run of our own is replaced, and nothing else is ever deleted."""

import fcntl
import json
import os
import pty
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedsieve.analysis.repeat import repeat
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError
from fedsieve.experiment import run
from fedsieve.runs.replace import delete_runs, described, runs_to_replace
from listeners import interrupt

Maker = Callable[..., Experiment]
MASKED = ("phases.1.mask={sparsity: 0.5, calibration_rounds: 1, fisher: {samples: 8}}", "wire.values=int8")


@pytest.fixture
def file(experiment: Maker, tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(experiment("phases.1.rounds=1", "phases.0.rounds=1").to_yaml())
    return path


def seed_of(folder: Path) -> int:
    return json.loads((folder / "result.json").read_text())["seed"]


@contextmanager
def terminal(answer: str) -> Iterator[None]:
    """A terminal as standard input, at which somebody has typed this."""
    keyboard, end = pty.openpty()
    os.write(keyboard, answer.encode())
    before = sys.stdin
    with os.fdopen(end) as sys.stdin:
        try:
            yield
        finally:
            sys.stdin = before
            os.close(keyboard)


def test_it_asks(fedsieve: Callable, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fedsieve("run", str(file), "--out", str(out))[0] == 0
    again = ("run", str(file), "seed=8", "--out", str(out), "--force")
    with terminal("n\n"):
        code, printed, told = fedsieve(*again)
    assert code == 2 and f"replace the run in {out} (2 rounds, finished 20" in printed.replace("\n", "")
    assert "was not replaced" in told and seed_of(out) == 7
    with terminal("y\n"):
        assert fedsieve(*again)[0] == 0
    assert seed_of(out) == 8


def test_yes_answers_it_and_without_a_terminal_it_must(fedsieve: Callable, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    again = ("run", str(file), "seed=8", "--out", str(out), "--force")
    assert fedsieve("run", str(file), "--out", str(out))[0] == 0
    code, _, told = fedsieve(*again)
    assert code == 2 and told.count("\n") == 1 and "add --yes" in told and seed_of(out) == 7
    assert fedsieve(*again, "--yes")[0] == 0 and seed_of(out) == 8
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--out", "run", "--force", "--resume"], "give one of them"),
        (["--force"], "add --out DIR"),
        (["--out", "run", "--yes"], "add --force"),
    ],
)
def test_options_that_do_not_go_together(fedsieve: Callable, file: Path, options: list[str], told: str) -> None:
    code, _, said = fedsieve("run", str(file), *options)
    assert code == 2 and told in said and said.count("\n") == 1 and not Path("run").exists()


def test_wrong_input_deletes_nothing(fedsieve: Callable, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fedsieve("run", str(file), "--out", str(out))[0] == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for wrong in ("data.path=nowhere.npz", "clients.count=5000", "model.backbone=./nowhere.pth"):
        code, _, told = fedsieve("run", str(file), wrong, "--out", str(out), "--force", "--yes")
        assert code == 2 and told.startswith("error: ")
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("reads", "named"),
    [
        ("model.init=old", "model.init"),
        ("model.init=link", "model.init"),
        ("model.backbone=old/model.safetensors", "model.backbone"),
        ("data.path=old/split.json", "data.path"),
        ("phases.1.mask={file: old/masks/all/client-000000.safetensors}", "phases.1.mask.file"),
        ("plugins=[place/old/plugins/mine.py]", "plugin mine.py"),
    ],
)
def test_a_run_that_the_new_one_reads_is_kept(
    fedsieve: Callable, file: Path, experiment: Maker, reads: str, named: str
) -> None:
    Path("mine.py").write_text("import fedsieve\n\n\n@fedsieve.schedule\ndef mine(done):\n    return 1.0\n")
    Path("link").symlink_to("old")
    run(experiment("phases.1.rounds=1", *MASKED), Path("old"), plugins=["mine.py"])
    before = {path: path.read_bytes() for path in Path("old").rglob("*") if path.is_file()}
    for more in (["--yes"], ["--dry-run"], []):
        code, printed, told = fedsieve("run", str(file), reads, "--out", "old", "--force", *more)
        assert (code, printed) == (2, "")
        assert told == f"error: {named} lies in old, which --force would delete; give another --out\n"
    assert before == {path: path.read_bytes() for path in Path("old").rglob("*") if path.is_file()}


def test_a_seed_that_the_new_seeds_start_from_is_kept(fedsieve: Callable, file: Path) -> None:
    assert fedsieve("run", str(file), "--out", "old", "--seeds", "2")[0] == 0
    again = ("run", str(file), "model.init=old/seed-7", "--seeds", "2", "--force")
    code, _, told = fedsieve(*again, "--out", "old", "--yes")
    assert code == 2 and "model.init lies in old," in told and seed_of(Path("old", "seed-7")) == 7
    assert fedsieve(*again, "--out", "old/seed-8", "--dry-run")[0] == 0


def test_seeds_are_replaced_together(fedsieve: Callable, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fedsieve("run", str(file), "--out", str(out), "--seeds", "3")[0] == 0
    code, _, told = fedsieve("run", str(file), "--out", str(out), "--seeds", "2", "--force")
    assert code == 2 and f"the 3 runs in {out} (3 finished)" in told
    assert fedsieve("run", str(file), "seed=8", "--out", str(out), "--seeds", "2", "--force", "--yes")[0] == 0
    assert {path.name for path in out.iterdir()} == {"seed-8", "seed-9", "seeds.json"}


def test_whatever_a_run_writes_is_ours(experiment: Maker, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (tmp_path / "mine.py").write_text("import fedsieve\n\n\n@fedsieve.schedule\ndef mine(done):\n    return 1.0\n")
    with pytest.raises(KeyboardInterrupt):
        settings = experiment(*MASKED, "track=[tensorboard]")
        run(settings, out, callback=interrupt(4), plugins=[tmp_path / "mine.py"])
    names = {path.relative_to(out).parts[0] for path in out.rglob("*")}
    assert {"checkpoints", "masks", "clients", "plugins", "tracking", "metrics.jsonl", ".lock"} <= names
    (out / "checkpoints" / ".00000004.safetensors.partial").touch()
    (out / "checkpoints" / "00000001.damaged").touch()
    (out / "plugins" / ".mine.py.partial").touch()
    assert runs_to_replace(out) == [out] and described(out, [out]) == f"the run in {out} (4 rounds, not finished)"
    delete_runs(out)
    assert {path.name for path in out.rglob("*")} == {".lock"}
    delete_runs(out)  # of nothing
    run(experiment(), out)


@pytest.mark.parametrize(
    "stranger",
    [
        "thesis.tex",
        "checkpoints/mine.safetensors",
        "masks/head/notes.txt",
        "notes/a.txt",
        ".hidden",
        "tracking/my-thesis.txt",
        "tracking/tensorboard/notes.txt",
        "tracking/wandb/wandb/mine/run.wandb",
        "plugins/notes.txt",
        "plugins/more/mine.py",
        "plugins/mine.py",
        "plugins/.mine.py.partial",
        ".split.json.partial/notes.txt",
        "checkpoints/00000009.safetensors/notes.txt",
    ],
)
def test_a_folder_with_anything_else_is_refused(experiment: Maker, tmp_path: Path, stranger: str) -> None:
    out = tmp_path / "run"
    run(experiment("phases.1.rounds=1"), out)
    (out / stranger).parent.mkdir(parents=True, exist_ok=True)
    (out / stranger).write_text("my own")
    with pytest.raises(InputError, match="--force replaces nothing else"):
        delete_runs(out)
    assert (out / stranger).read_text() == "my own" and (out / "result.json").exists()


@pytest.mark.parametrize(
    "stranger", ["masks/my-empty-dir", "mine", ".lock", ".claim", "checkpoints/00000009.safetensors", "tracking/mine"]
)
def test_a_folder_that_no_run_makes_is_refused(experiment: Maker, tmp_path: Path, stranger: str) -> None:
    out = tmp_path / "run"
    run(experiment("phases.1.rounds=1"), out)
    (out / ".lock").unlink()
    (out / stranger).mkdir(parents=True)
    with pytest.raises(InputError, match="--force replaces nothing else"):
        delete_runs(out)
    assert (out / stranger).is_dir() and (out / "result.json").exists()


def test_seeds_that_are_links_or_files_are_refused(experiment: Maker, tmp_path: Path) -> None:
    run(experiment("phases.1.rounds=1"), tmp_path / "elsewhere")
    out = tmp_path / "runs"
    out.mkdir()
    (out / "seed-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="holds seed-1, which is no run"):
        delete_runs(out)
    (out / "seed-1").unlink()
    (out / "seed-1").write_text("my own")
    with pytest.raises(InputError, match="holds seed-1, which is no run"):
        delete_runs(out)
    assert (tmp_path / "elsewhere" / "result.json").exists() and (out / "seed-1").read_text() == "my own"


def test_links_folders_without_a_run_and_files_are_refused(experiment: Maker, tmp_path: Path) -> None:
    out, mine = tmp_path / "run", tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("my own")
    run(experiment("phases.1.rounds=1"), out)
    (out / "masks").symlink_to(mine)
    for folder in (out, mine, mine / "thesis.tex"):
        with pytest.raises(InputError, match="--force"):
            delete_runs(folder)
    assert (mine / "thesis.tex").exists() and (out / "result.json").exists()


def test_one_bad_run_among_seeds_keeps_all(experiment: Maker, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    repeat(experiment("phases.1.rounds=1", "phases.0.rounds=1"), out, 2)
    (out / "seed-8" / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"thesis\.tex"):
        delete_runs(out)
    (out / "seed-8" / "thesis.tex").unlink()
    with (out / "seed-8" / ".lock").open("w") as lock:  # as if another process were at it
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="in use by another process"):
            delete_runs(out)
    assert all((out / f"seed-{seed}" / "result.json").exists() for seed in (7, 8)) and (out / "seeds.json").exists()
