"""Deleting a run to replace it: only what fedsieve itself wrote, and nothing if there is anything else."""

import fcntl
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError
from fedsieve.runs.folder import FILES
from fedsieve.runs.read import PLUGINS, read_experiment

SEED = re.compile(r"seed-\d+")
WANDB = r"tracking/wandb/wandb"
WANDB_RUN = rf"{WANDB}/(offline-)?run-\d{{8}}_\d{{6}}-[0-9a-f]{{32}}"
# What a run's folder holds, by the parts of the path in it. What trackers write is what those of today write.
OURS = re.compile(
    r"\.lock|\.claim"
    rf"|\.?({'|'.join(re.escape(name) for name in FILES)})(\.partial)?"
    r"|checkpoints/\.?\d{8,}\.(safetensors|damaged)(\.partial)?"
    r"|masks/[\w-]+/\.?((start|shared|client-\d{6,})\.safetensors|bytes\.json)(\.partial)?"
    r"|clients/[\w-]+/\.?client-\d{6,}-round-\d{8,}\.safetensors(\.partial)?"
    r"|tracking/(id|\.id\.partial)"
    r"|tracking/tensorboard/events\.out\.tfevents\.\d+"
    r"|tracking/mlflow/(ready|mlflow\.db(-journal|-wal|-shm)?)"
    r"|tracking/wandb/(step|\.step\.partial)"
    rf"|{WANDB}/debug(-\w+)?\.log"
    rf"|{WANDB_RUN}/(run-[0-9a-f]{{32}}\.wandb(\.synced)?|logs/debug(-\w+)?\.log)"
    rf"|{WANDB_RUN}/files/(config\.yaml|output\.log|requirements\.txt|conda-environment\.yaml|diff\w*\.patch"
    r"|wandb-(metadata|summary)\.json)"
)
LINKS = re.compile(rf"{WANDB}/latest-run|({WANDB}|{WANDB_RUN}/logs)/debug(-\w+)?\.log")
FOLDERS = re.compile(
    r"checkpoints|masks|clients|plugins|tracking(/(tensorboard|wandb|mlflow|mlflow/artifacts))?"
    rf"|{WANDB}|{WANDB_RUN}(/(files|logs|tmp|tmp/code))?"
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
        runs = sorted(folder / name for name in names if SEED.fullmatch(name) and _is_folder(folder / name))
        ours = {name for name in ("seeds.json", ".lock") if _is_file(folder / name)}
        if others := sorted(names - {run.name for run in runs} - ours):
            raise InputError(f"--out {folder} holds {others[0]}, which is no run; --force replaces only runs")
    for run in runs:
        _contents(run)
    return runs


def _contents(run: Path) -> list[Path]:
    """All that is in a run's folder, in the order in which it can be deleted; InputError if any of it is not ours.

    experiment.yaml goes last, so that what an interruption leaves is still a run.
    """
    if not (run / "experiment.yaml").exists():
        raise InputError(f"--out {run} is no run, for it has no experiment.yaml; --force replaces nothing else")
    experiment = read_experiment(run)
    phases = [phase.name for phase in experiment.phases]
    plugins = [Path(path).name for path in experiment.plugins]
    copies = {f"{PLUGINS}/{name}" for plugin in plugins for name in (plugin, f".{plugin}.partial")}
    found = sorted(run.rglob("*"), reverse=True)  # what is in a folder comes before it
    for path in found:
        name = path.relative_to(run).as_posix()
        if path.is_symlink():
            is_ours = bool(LINKS.fullmatch(name))
        elif _is_folder(path):
            top, _, phase = name.partition("/")
            is_ours = bool(FOLDERS.fullmatch(name)) or (top in ("masks", "clients") and phase in phases)
        else:
            is_ours = _is_file(path) and (bool(OURS.fullmatch(name)) or name in copies)
        if not is_ours:
            raise InputError(f"--out {run} holds {name}, which is not of a run; --force replaces nothing else")
    return sorted(found, key=lambda path: path == run / "experiment.yaml")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def refuse_to_lose_input(experiment: Experiment, folder: Path) -> None:
    """InputError if an experiment reads something that lies in the folder: it would be gone when the run begins."""
    settings = experiment.resolved()
    masks = {f"phases.{number}.mask.file": phase.mask for number, phase in enumerate(settings.phases)}
    inputs = {
        "model.init": settings.model.init,
        "model.backbone": settings.model.backbone,
        "data.path": settings.data.path,
        **{key: mask.file for key, mask in masks.items() if mask is not None},
        **{f"plugin {Path(path).name}": path for path in settings.plugins},
    }
    for name, path in inputs.items():
        if path is not None and Path(path).is_relative_to(folder.resolve()):  # names, such as pico, are relative
            raise InputError(f"{name} lies in {folder}, which --force would delete; give another --out")


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Keep other processes out of a run; InputError if one is at it."""
    with (run / ".lock").open("a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"--out {run} is in use by another process; wait for it or give another") from None
        yield


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

    Only what was looked at is deleted. A single run's lock stays, as always.
    """
    with ExitStack() as stack:
        runs = runs_to_replace(folder)
        for run in runs:  # all of them first: either every run is deleted or none
            stack.enter_context(_locked(run))
        contents = {run: _contents(run) for run in runs}
        (folder / "seeds.json").unlink(missing_ok=True)
        for run, paths in contents.items():
            for path in paths:
                if path != run / ".lock":
                    _delete(path, run)
            if run != folder:
                (run / ".lock").unlink()
                _delete(run, folder)


def _delete(path: Path, run: Path) -> None:
    try:
        if _is_folder(path):
            path.rmdir()
        else:
            path.unlink()
    except OSError as error:  # a folder into which somebody has put something since, say
        raise InputError(f"--out {run}: {path} cannot be deleted ({error.strerror}); give another folder") from None
