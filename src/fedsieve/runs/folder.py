"""A run's folder: experiment.yaml, split.json, metrics.jsonl, checkpoints/; then model.safetensors, result.json.

Besides these: masks/, clients/ (what clients remember) and plugins/ (copies of those that the run uses).
"""

import fcntl
import hashlib
import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from safetensors.torch import save
from torch import Tensor
from xxhash import xxh3_128

from fedsieve.config.plugins import active
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError, RunError
from fedsieve.files.atomic import flush_to_disk, write_text, written_atomically
from fedsieve.files.sealed import digest_of_file, load_sealed, save_sealed
from fedsieve.model.flat import FlatModel
from fedsieve.runs import checkpoint
from fedsieve.runs.checkpoint import Checkpoint, Companions, Progress
from fedsieve.runs.client_memory import ClientStore, StoreElsewhere
from fedsieve.runs.model_file import description
from fedsieve.runs.read import PLUGINS, read_experiment, read_metrics, with_digests

FILES = ("experiment.yaml", "split.json", "metrics.jsonl", "model.safetensors", "result.json")
START = "start.safetensors"
PARTS = ("checkpoints/.*.partial", "masks/*/.*.partial", "plugins/.*.partial")
PARTIAL = re.compile(r"\.((\d{8,}|start|shared|client-\d{6,})\.safetensors|bytes\.json|.+\.py)\.partial")
CHECKPOINT_SHARE = 0.05  # of the time may be spent on checkpoints; the first round always gets one


class RunFolder:
    """Opened for one run at a time. Nothing is written before `start`."""

    def __init__(self, path: Path, experiment: Experiment, resume: bool) -> None:
        self.path = path
        self.experiment = experiment
        self.resume = resume
        self.damaged: dict[Path, Path] = {}  # checkpoints that cannot be used, and the damaged file
        self._lock: IO[str] | None = None
        self._saved_at, self._save_took = float("-inf"), 0.0
        self._found: list[Companions] = []  # of the checkpoints that were there at the start
        self._metrics, self._metrics_digest = 0, xxh3_128()  # bytes of metrics.jsonl, and their digest
        self._files: dict[str, str] = {}  # that the current phase needs, and their digests
        self._stores: list[tuple[int, ClientStore]] = []  # of this phase and earlier ones, with the rounds before each
        self._refuse_unless_ours()

    def _refuse_unless_ours(self) -> None:
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise InputError(f"--out {self.path} is a file; give the name of a new folder")
        file = self.path / "experiment.yaml"
        if not file.exists():
            if any(not entry.name.startswith(".") for entry in self.path.iterdir()):
                raise InputError(
                    f"--out {self.path} holds something else than a run, or one without its experiment.yaml; "
                    "give the name of a new folder"
                )
            return
        self._refuse_changed_plugins()  # first: its experiment.yaml may name what they no longer have
        earlier = read_experiment(self.path)
        if not earlier.same_outcome(self.experiment):
            there, here = (one.outcome().model_dump(mode="json") for one in (earlier, self.experiment))
            key, old, new = _first_difference(there, here)
            raise InputError(
                f"--out {self.path} holds a different run ({key} is {old} in its experiment.yaml, {new} here); "
                "give another folder"
            )
        if not self.resume:
            way = "give another folder" if self.is_finished else "add --resume to go on with it, or give another folder"
            state = "a finished run" if self.is_finished else "an unfinished run"
            raise InputError(f"--out {self.path} holds {state} of this experiment; {way}")
        if (earlier.federation is None) != (self.experiment.federation is None) and not self.is_finished:
            where, engine = (
                ("here", "local or ray") if earlier.federation is None else ("at nodes", "that of its federation")
            )
            raise InputError(f"the run in {self.path} began with clients {where}; go on with engine: {engine}")

    def _refuse_changed_plugins(self) -> None:
        for plugin in active(self.experiment.plugins):
            copy = self.path / PLUGINS / plugin.name
            if copy.exists() and copy.read_bytes() != plugin.text.encode():
                raise InputError(
                    f"plugin {plugin.path} was changed since the run in {self.path} began ({copy} is what it was); "
                    "bring that back or give another folder"
                )

    def _keep_plugins(self) -> None:
        for plugin in active(self.experiment.plugins):
            (self.path / PLUGINS).mkdir(exist_ok=True)
            write_text(self.path / PLUGINS / plugin.name, plugin.text)

    @property
    def plugin_digests(self) -> dict[str, str]:
        return {plugin.name: plugin.digest for plugin in active(self.experiment.plugins)}

    @property
    def is_finished(self) -> bool:
        return (self.path / "result.json").exists()

    def start(self, fingerprint: str = "") -> Checkpoint | None:
        """Make the folder, or resume from the newest intact checkpoint in it, which is returned.

        `fingerprint` is that of the data and the weights. Errors are found before any file is changed.
        """
        self._take()
        self._refuse_unless_ours()  # again: another process may have used it since
        found, self.damaged = checkpoint.find_newest(self.path)
        newest = found[0] if found else None
        if newest is not None:
            self._refuse_unless_same(newest.progress, fingerprint)
        if (self.path / "experiment.yaml").exists():
            self._drop_unfinished()
        for path in self.damaged:
            path.replace(path.with_suffix(".damaged"))
        self._found = [one.companions for one in found]
        write_text(self.path / "experiment.yaml", self.experiment.to_yaml())  # first: it says that the folder is ours
        self._keep_plugins()
        self._restore_metrics(self._found[0] if self._found else Companions())
        return newest

    def _refuse_unless_same(self, progress: Progress, fingerprint: str) -> None:
        if progress.fingerprint != fingerprint:
            raise InputError(f"--out {self.path} was started with other data or another backbone; give another folder")
        for name, digest in self.plugin_digests.items():
            if progress.plugins.get(name, digest) != digest:
                raise InputError(f"plugin {name} was changed since the run in {self.path} began; give another folder")
        if progress.threads != self.experiment.threads:
            file, now = self.path / "experiment.yaml", self.experiment.threads
            raise RunError(f"{file} is damaged: it says threads: {now}, and the run began with {progress.threads}")

    def _drop_unfinished(self) -> None:
        """Delete what a killed process left half written, by the names that `written_atomically` gives."""
        for name in FILES:
            (self.path / f".{name}.partial").unlink(missing_ok=True)
        for pattern in PARTS:
            for path in self.path.glob(pattern):
                if PARTIAL.fullmatch(path.name):
                    path.unlink()

    def _restore_metrics(self, known: Companions) -> None:
        """Cut metrics.jsonl back to the checkpoint's rounds; the rounds after it will be done again."""
        path = self.path / "metrics.jsonl"
        written = path.read_bytes()[: known.metrics] if known.metrics else b""
        with written_atomically(path) as partial:
            partial.write_bytes(written)
        self._metrics, self._metrics_digest = len(written), xxh3_128(written)

    def _take(self) -> None:
        """Make the folder and lock it. The lock's file stays: deleting it would let two processes in."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w", encoding="utf-8")
        except OSError as error:
            raise InputError(f"--out {self.path} cannot be made ({error.strerror}); give another folder") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise InputError(f"--out {self.path} is in use by another process; wait for it or give another") from None
        self._lock = lock

    def save_split(self, holdings: dict[str, Any]) -> None:
        """Write split.json: which client holds what, for readers of the run."""
        write_text(self.path / "split.json", json.dumps(holdings, separators=(",", ":")) + "\n")

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)

    def add_metrics(self, line: dict[str, Any]) -> None:
        text = (json.dumps(line, allow_nan=False) + "\n").encode()
        with (self.path / "metrics.jsonl").open("ab") as file:
            file.write(text)
        self._metrics += len(text)
        self._metrics_digest.update(text)

    def save_checkpoint(self, state: Checkpoint, force: bool = False) -> None:
        """Save the state if it is time to: often enough to lose little, seldom enough to cost little."""
        if not force and time.monotonic() - self._saved_at < self._save_took / CHECKPOINT_SHARE:
            return
        start = time.monotonic()
        if (self.path / "metrics.jsonl").exists():
            flush_to_disk(self.path / "metrics.jsonl")  # a checkpoint must not count more rounds than it
        for _, store in self._stores:
            store.flush()
        state.companions = self._companions(state.progress)
        oldest = checkpoint.save(self.path / "checkpoints", state)
        self._tidy_stores(oldest)
        self._saved_at = time.monotonic()
        self._save_took = self._saved_at - start

    def _companions(self, progress: Progress) -> Companions:
        """The files that a checkpoint needs; before a phase's first round, all files of the phase can be made again."""
        metrics, digest = self._metrics, self._metrics_digest.hexdigest()
        if not progress.round:
            return Companions(metrics, digest)
        _, store = self._stores[-1]
        name, are_elsewhere = str(store.folder.relative_to(self.path)), isinstance(store, StoreElsewhere)
        return Companions(metrics, digest, self._files, name, store.states(), are_elsewhere)

    def client_store(self, phase: str, progress: Progress, needs: Sequence[Path] = ()) -> ClientStore:
        """The clients' states in a phase, as they were when `progress` was made.

        `needs` are files that were made at the phase's start and that its rounds need.
        """
        self._files = {str(path.relative_to(self.path)): digest_of_file(path) for path in needs}
        folder = self.path / "clients" / phase
        name = str(folder.relative_to(self.path))
        kind = StoreElsewhere if self.experiment.federation is not None else ClientStore
        store = kind(folder, [found.states for found in self._found if found.folder == name])
        store.rewind(progress.rounds)
        self._stores.append((progress.rounds - progress.round, store))
        return store

    def _tidy_stores(self, oldest: int) -> None:
        """Delete what no checkpoint needs; the oldest one was made after `oldest` rounds."""
        for _, store in self._stores:
            store.prune(oldest)
        while len(self._stores) > 1 and self._stores[1][0] <= oldest:  # then no checkpoint is in the phase before
            self._stores.pop(0)[1].clear()

    def save_model(self, model: FlatModel, vector: Tensor) -> str:
        """Write model.safetensors with these weights; returns its SHA-256."""
        model.vector.copy_(vector)
        path = self.path / "model.safetensors"
        with written_atomically(path) as partial:
            tensors = {name: tensor.detach().cpu().clone() for name, tensor in model.tensors().items()}
            content = save(tensors, metadata=description(model.module))  # type: ignore[arg-type]
            partial.write_bytes(content)
        return hashlib.sha256(content).hexdigest()

    def save_result(self, result: dict[str, Any]) -> dict[str, Any]:
        """Write result.json, with digests of the run's files; returns its content."""
        result = with_digests(result, self.path)
        write_text(self.path / "result.json", json.dumps(result, indent=2, allow_nan=False) + "\n")
        for phase in self.experiment.phases:  # no training follows
            ClientStore(self.path / "clients" / phase.name).clear()
        with suppress(OSError):  # it was never made, or holds other files
            (self.path / "clients").rmdir()
        return result


def keep_start(run: Path, phase: str, weights: Tensor) -> None:
    """Keep the weights in scope at a phase's start, since clients calibrate masks from them in any later round."""
    path = run / "masks" / phase / START
    path.parent.mkdir(parents=True, exist_ok=True)
    save_sealed(path, phase, {"vector": weights})


def load_start(run: Path, phase: str) -> Tensor:
    """What `keep_start` kept."""
    path = run / "masks" / phase / START
    try:
        return load_sealed(path)[1]["vector"]
    except (ValueError, KeyError):
        raise RunError(f"{path} is damaged, so this run cannot go on; start it anew in another folder") from None


def settled(experiment: Experiment, run: Path, resume: bool) -> Experiment:
    """The resolved experiment; a resumed run keeps its number of threads, since its bits depend on it."""
    if resume and experiment.threads == "auto" and (run / "experiment.yaml").exists():
        experiment = experiment.model_copy(update={"threads": read_experiment(run).threads})
    return experiment.resolved()


def _first_difference(old: Any, new: Any, key: str = "") -> tuple[str, Any, Any]:
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        for name in old:
            if old[name] != new[name]:
                return _first_difference(old[name], new[name], f"{key}.{name}".lstrip("."))
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            if one != other:
                return _first_difference(one, other, f"{key}.{index}")
    return key, json.dumps(old), json.dumps(new)
