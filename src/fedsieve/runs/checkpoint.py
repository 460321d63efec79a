"""A run's state between two rounds, as one file that is refused if it was changed.

There is no random state in it: randomness is addressed by phase, round and client. It lists the other files of the
run that belong to it, with their digests, so that a lost, altered or swapped one is noticed.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from torch import Tensor
from xxhash import xxh3_128

from fedsieve.errors import RunError
from fedsieve.federate.types import State
from fedsieve.federate.versions import Versions
from fedsieve.files.sealed import OtherVersionError, digest_of_file, load_sealed, save_sealed
from fedsieve.runs.client_memory import States, first_damaged

NAME = re.compile(r"\d{8,}\.safetensors")
METHOD = "method."  # before the names of the method's state
FORMAT = 3  # of checkpoints and clients' states; files of format 1 do not name it
KEPT = 2  # the newest, and the one before in case the newest is damaged
BLOCK = 1 << 16  # weights that are checked at a time
EMPTY = xxh3_128().hexdigest()


@dataclass
class Progress:
    """How far a run has come."""

    phase: int = 0  # the current phase
    round: int = 0  # its rounds that are done
    rounds: int = 0  # done in all phases: as many lines of metrics are valid
    seconds: float = 0.0  # spent so far
    fingerprint: str = ""  # of the data and the weights that the run started from
    threads: int = 0  # of each process
    plugins: dict[str, str] = field(default_factory=dict)  # SHA-256 of each, by name
    best: dict[str, Any] = field(
        default_factory=dict
    )  # of the current phase: round, val_accuracy, val_loss, since (which round)
    norms: list[float] = field(default_factory=list)  # of the last updates of the current phase (NormLimit)
    phases: list[dict[str, Any]] = field(default_factory=list)  # results of the finished phases


@dataclass(frozen=True)
class Companions:
    """The other files of the run that a checkpoint needs, as they were when it was saved."""

    metrics: int = 0  # bytes of metrics.jsonl that were written
    metrics_digest: str = EMPTY  # of these bytes
    files: dict[str, str] = field(default_factory=dict)  # digests of files, by their paths in the run's folder
    folder: str = ""  # of the clients' states: also a path in the run's folder
    states: States = field(default_factory=lambda: States.of([]))
    are_elsewhere: bool = False  # whether these states are at the clients' nodes

    def first_damaged(self, run: Path) -> Path | None:
        """The first of these files that is missing or was changed."""
        metrics = run / "metrics.jsonl"
        written = metrics.read_bytes()[: self.metrics] if metrics.is_file() else b""
        if xxh3_128(written).hexdigest() != self.metrics_digest:
            return metrics
        for name, digest in self.files.items():
            path = run / name
            if digest_of_file(path) != digest:
                return path
        return None if self.are_elsewhere else first_damaged(run / self.folder, self.states)


@dataclass
class Checkpoint:
    progress: Progress
    vector: Tensor  # all weights
    best: Tensor | None  # the weights in scope at the best round so far, with `keep: best`
    versions: Versions  # of the weights, and which of them clients hold
    method: State = field(default_factory=dict)  # the server's state of the current phase's method
    companions: Companions = field(default_factory=Companions)  # as of the last time it was saved
    first: int = 0  # read from a file: where `vector` and `versions.changed` begin; what they leave out never changed

    def onto(self, start: "Checkpoint") -> "Checkpoint":
        """The whole state: `start`, which the run began with, overwritten with this one."""
        part, versions = slice(self.first, self.first + len(self.vector)), start.versions
        start.vector[part] = self.vector.to(start.vector.device)
        versions.changed[part] = self.versions.changed
        versions.seen, versions.now = self.versions.seen, self.versions.now
        method = {name: one.to(start.vector.device) for name, one in self.method.items()}
        return Checkpoint(self.progress, start.vector, self.best, versions, method, self.companions)


def save(folder: Path, checkpoint: Checkpoint) -> int:
    """Write a checkpoint and delete all but the newest ones; returns the rounds done at the oldest one left."""
    versions, companions = checkpoint.versions, checkpoint.companions
    first, end = _ever_changed(versions.changed.numpy())  # the rest is as at the run's start: often a backbone
    tensors = {
        "vector": checkpoint.vector[first:end],
        "changed": _compressed(versions.changed[first:end]),
        "seen": _compressed(versions.seen),
        **companions.states.pack(),
        **{f"{METHOD}{name}": tensor for name, tensor in checkpoint.method.items()},
    }
    if checkpoint.best is not None:
        tensors["best"] = checkpoint.best
    about = {
        "format": FORMAT,
        "progress": asdict(checkpoint.progress),
        "version": versions.now,
        "first": first,
        "metrics": [companions.metrics, companions.metrics_digest],
        "files": companions.files,
        "folder": companions.folder,
        **({"elsewhere": True} if companions.are_elsewhere else {}),
    }
    folder.mkdir(exist_ok=True)
    save_sealed(folder / f"{checkpoint.progress.rounds:08d}.safetensors", json.dumps(about), tensors)
    files = files_in(folder)
    for old in files[KEPT:]:
        old.unlink()
    return int(files[:KEPT][-1].stem)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; ValueError if a single bit of it, or its name, was changed."""
    text, tensors = load_sealed(path)
    try:
        about = json.loads(text)
        if about.get("format") != FORMAT:
            raise OtherVersionError(f"{path} was made by another version")
        progress = Progress(**about["progress"])
    except (KeyError, TypeError):
        raise ValueError(f"{path} is no checkpoint") from None
    if progress.rounds != int(path.stem):
        raise ValueError(f"{path} is a checkpoint of another round")
    changed, seen = _decompressed(tensors["changed"]), _decompressed(tensors["seen"])
    metrics, digest = about["metrics"]
    states, are_elsewhere = States.unpack(tensors), about.get("elsewhere", False)
    companions = Companions(metrics, digest, about["files"], about["folder"], states, are_elsewhere)
    versions = Versions(changed, seen, about["version"])
    method = {name.removeprefix(METHOD): one for name, one in tensors.items() if name.startswith(METHOD)}
    return Checkpoint(progress, tensors["vector"], tensors.get("best"), versions, method, companions, about["first"])


def files_in(folder: Path) -> list[Path]:
    """The files of checkpoints, the newest first."""
    found = [path for path in folder.glob("*.safetensors") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.stem), reverse=True)


def find_newest(run: Path) -> tuple[list[Checkpoint], dict[Path, Path]]:
    """The newest intact checkpoint and the ones before it, and the newer ones, which are damaged.

    A checkpoint is intact if its own file and all files that belong to it are as they were written. Each damaged one
    comes with its damaged file. If all checkpoints' own files are damaged, none is returned and the run can start
    over. RunError if the damage is in other files, of which the user may have a copy.
    """
    passed: dict[Path, Path] = {}
    whole: list[Checkpoint] = []
    for path in files_in(run / "checkpoints"):
        try:
            found = load(path)
        except OtherVersionError:
            raise RunError(
                f"{path} was made by another version of fedsieve; finish the run with that version, or start it anew "
                "in another folder"
            ) from None
        except ValueError:
            if not whole:
                passed[path] = path
            continue
        if not whole and (damaged := found.companions.first_damaged(run)) is not None:
            passed[path] = damaged
        else:
            whole.append(found)
    if not whole and (others := [damaged for path, damaged in passed.items() if damaged != path]):
        raise RunError(f"{others[0]} is damaged or gone, so this run cannot go on; start it anew in another folder")
    return whole, passed


def _ever_changed(changed: np.ndarray) -> tuple[int, int]:
    """The first weight that ever changed and the one after the last; in blocks, since large arrays are slow to make."""
    blocks = [first for first in range(0, len(changed), BLOCK) if changed[first : first + BLOCK].max() > 0]
    if not blocks:
        return 0, 0
    in_first, in_last = (np.flatnonzero(changed[first : first + BLOCK] > 0) for first in (blocks[0], blocks[-1]))
    return blocks[0] + int(in_first[0]), blocks[-1] + int(in_last[-1]) + 1


def _compressed(numbers: Tensor) -> Tensor:
    """This is small: many neighbouring weights last changed in the same round, and many clients saw the same."""
    return torch.from_numpy(np.frombuffer(zstandard.compress(numbers.numpy().data, 1), dtype=np.uint8).copy())


def _decompressed(data: Tensor) -> Tensor:
    return torch.from_numpy(np.frombuffer(zstandard.decompress(data.numpy().data), dtype=np.int32).copy())
