"""A run's state between two rounds, as one file that can be trusted or is refused.

There is no random state in it: randomness is addressed by phase, round and client.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_128

from fedsieve.federate.versions import Versions
from fedsieve.runs.atomic import written_atomically

KEPT = 2  # the newest, and the one before in case the newest is damaged
BLOCK = 1 << 16  # weights that are looked at together


@dataclass
class Progress:
    """How far a run has come."""

    phase: int = 0  # the phase under way
    round: int = 0  # its rounds that are done
    rounds: int = 0  # of all phases: as many lines of metrics are valid
    seconds: float = 0.0  # spent so far
    fingerprint: str = ""  # of the data and the weights that the run started from
    best: dict[str, Any] = field(default_factory=dict)  # of the phase under way: round, val_accuracy, val_loss
    phases: list[dict[str, Any]] = field(default_factory=list)  # results of the finished phases


@dataclass
class Checkpoint:
    progress: Progress
    vector: Tensor  # all weights
    best: Tensor | None  # the weights in scope at the best round so far, with `keep: best`
    versions: Versions  # of the weights, and which of them clients hold
    first: int = 0  # read from a file: where `vector` and `versions.changed` begin; what they leave out never changed

    def onto(self, start: "Checkpoint") -> "Checkpoint":
        """The whole state again, in the place of `start`, the one that the run began with."""
        part, versions = slice(self.first, self.first + len(self.vector)), start.versions
        start.vector[part] = self.vector.to(start.vector.device)
        versions.changed[part] = self.versions.changed
        versions.seen, versions.now = self.versions.seen, self.versions.now
        return Checkpoint(self.progress, start.vector, self.best, versions)


def save(folder: Path, checkpoint: Checkpoint) -> int:
    """Write a checkpoint and delete all but the newest ones; the rounds that were done at the oldest one left."""
    versions = checkpoint.versions
    first, end = _ever_changed(versions.changed.numpy())  # the others the run started from: a backbone, often
    tensors = {
        "vector": checkpoint.vector[first:end],
        "changed": _compressed(versions.changed[first:end]),
        "seen": _compressed(versions.seen),
    }
    if checkpoint.best is not None:
        tensors["best"] = checkpoint.best
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    progress = json.dumps({**asdict(checkpoint.progress), "version": versions.now, "first": first})
    folder.mkdir(exist_ok=True)
    _write(folder / f"{checkpoint.progress.rounds:08d}.safetensors", progress, tensors)
    files = sorted(folder.glob("*.safetensors"))
    for old in files[:-KEPT]:
        old.unlink()
    return int(files[-KEPT:][0].stem)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; ValueError if a single bit of it is not as it was written."""
    text, tensors = _read(path)
    progress = json.loads(text)
    changed, seen = _decompressed(tensors["changed"]), _decompressed(tensors["seen"])
    versions = Versions(changed, seen, progress.pop("version"))
    first = progress.pop("first")
    return Checkpoint(Progress(**progress), tensors["vector"], tensors.get("best"), versions, first)


def load_newest(folder: Path) -> tuple[Checkpoint | None, list[Path]]:
    """The newest checkpoint that is whole, and the damaged ones that were passed over."""
    damaged: list[Path] = []
    for path in sorted(folder.glob("*.safetensors"), reverse=True):
        try:
            return load(path), damaged
        except (ValueError, KeyError, TypeError):
            damaged.append(path)
    return None, damaged


def _ever_changed(changed: np.ndarray) -> tuple[int, int]:
    """The first weight that ever changed and the one behind the last; by blocks: large arrays take time to make."""
    blocks = [first for first in range(0, len(changed), BLOCK) if changed[first : first + BLOCK].max() > 0]
    if not blocks:
        return 0, 0
    in_first, in_last = (np.flatnonzero(changed[first : first + BLOCK] > 0) for first in (blocks[0], blocks[-1]))
    return blocks[0] + int(in_first[0]), blocks[-1] + int(in_last[-1]) + 1


def _compressed(numbers: Tensor) -> Tensor:
    """Long stretches of weights changed last in the same round, and many clients saw the same: this is small."""
    return torch.from_numpy(np.frombuffer(zstandard.compress(numbers.numpy().data, 1), dtype=np.uint8).copy())


def _decompressed(data: Tensor) -> Tensor:
    return torch.from_numpy(np.frombuffer(zstandard.decompress(data.numpy().data), dtype=np.int32).copy())


def save_vector(path: Path, vector: Tensor) -> None:
    _write(path, "", {"vector": vector.detach().cpu().contiguous()})


def load_vector(path: Path) -> Tensor:
    """Read what `save_vector` wrote; ValueError if it is not as it was written."""
    return _read(path)[1]["vector"]


def _write(path: Path, progress: str, tensors: dict[str, Tensor]) -> None:
    with written_atomically(path) as partial:
        save_file(tensors, partial, metadata={"progress": progress, "digest": _digest(progress, tensors)})


def _read(path: Path) -> tuple[str, dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if _digest(metadata["progress"], tensors) != metadata["digest"]:
        raise ValueError(f"{path} was altered")
    return metadata["progress"], tensors


def _digest(progress: str, tensors: dict[str, Tensor]) -> str:
    digest = xxh3_128(progress.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().numpy().data)
    return digest.hexdigest()
