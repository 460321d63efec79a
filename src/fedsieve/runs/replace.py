"""Deleting a run to replace it: only what fedsieve itself wrote, and nothing if there is anything else."""

import fcntl
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from fedsieve.errors import InputError
from fedsieve.runs.folder import FILES
from fedsieve.runs.read import read_experiment

SEED = re.compile(r"seed-\d+")
# What a run's folder holds, by the parts of the path in it; trackers have a folder of their own.
OURS = re.compile(
    r"\.lock|\.claim"
    rf"|\.?({'|'.join(re.escape(name) for name in FILES)})(\.partial)?"
    r"|checkpoints/\.?\d{8,}\.(safetensors|damaged)(\.partial)?"
    r"|masks/[\w-]+/\.?((start|shared|client-\d{6,})\.safetensors|bytes\.json)(\.partial)?"
    r"|clients/[\w-]+/\.?client-\d{6,}-round-\d{8,}\.safetensors(\.partial)?"
    r"|plugins/\.?[^/]+\.py(\.partial)?"
    r"|tracking/.+"
)


def runs_to_replace(folder: Path) -> list[Path]:
    """The run in a folder, or its runs over seeds; none if it is empty or not there.

    InputError if it holds anything else.
    """
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise InputError(f"--out {folder} is a file, and --force replaces only runs; give the name of a folder")
    names = {entry.name for entry in folder.iterdir()}
    if "experiment.yaml" in names:
        runs = [folder]
    else:
        runs = sorted(folder / name for name in names if SEED.fullmatch(name))
        if others := sorted(names - {run.name for run in runs} - {"seeds.json", ".lock"}):
            raise InputError(f"--out {folder} holds {others[0]}, which is no run; --force replaces only runs")
    for run in runs:
        _refuse_unless_a_run(run)
    return runs


def _refuse_unless_a_run(run: Path) -> None:
    for path in _all_in(run):
        name = path.relative_to(run).as_posix()
        if path.is_symlink() or not OURS.fullmatch(name):
            raise InputError(f"--out {run} holds {name}, which is not of a run; --force replaces nothing else")
    if not (run / "experiment.yaml").exists():
        raise InputError(f"--out {run} is no run, for it has no experiment.yaml; --force replaces nothing else")
    read_experiment(run)


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Keep other processes out of a run; InputError if one is at it."""
    with (run / ".lock").open("a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"--out {run} is in use by another process; wait for it or give another") from None
        yield


def _all_in(run: Path) -> Iterator[Path]:
    """All files, links and empty folders, but no folder of ours that holds something."""
    for path in sorted(run.iterdir()):
        is_ours = path.name in ("checkpoints", "masks", "clients", "plugins", "tracking") and not path.is_symlink()
        if path.is_dir() and is_ours:
            yield from (one for one in path.rglob("*") if one.is_symlink() or not one.is_dir())
        else:
            yield path


def described(folder: Path, runs: list[Path]) -> str:
    """`the run in DIR (23 rounds, finished 2026-01-31 12:30)`."""
    if len(runs) == 1 and runs[0] == folder:
        return f"the run in {folder} ({_state(folder)})"
    finished = sum((run / "result.json").exists() for run in runs)
    return f"the {len(runs)} runs in {folder} ({finished} finished)"


def _state(run: Path) -> str:
    lines = 0
    with suppress(OSError):
        lines = (run / "metrics.jsonl").read_bytes().count(b"\n")
    rounds = "1 round" if lines == 1 else f"{lines:,} rounds"
    if not (run / "result.json").exists():
        return f"{rounds}, not finished"
    return f"{rounds}, finished {datetime.fromtimestamp((run / 'result.json').stat().st_mtime):%Y-%m-%d %H:%M}"


def delete_runs(folder: Path) -> None:
    """Delete the run, or runs over seeds, in a folder; looks again whether there is nothing else.

    experiment.yaml goes last, so that what an interruption leaves is still a run. A single run's lock stays, as always.
    """
    with ExitStack() as stack:
        runs = runs_to_replace(folder)
        for run in runs:  # all of them first: either every run is deleted or none
            stack.enter_context(_locked(run))
        (folder / "seeds.json").unlink(missing_ok=True)
        for run in runs:
            for path in sorted(run.iterdir(), key=lambda path: path.name == "experiment.yaml"):
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != ".lock":
                    path.unlink()
            if run != folder:
                (run / ".lock").unlink()
                run.rmdir()
