"""What clients cost that stay away, and those that remember something: for costs.py."""

import resource
import tempfile
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import dense
from workload import as_experiment

from fedsieve.config.partition_settings import ClassesSplit, IidSplit
from fedsieve.data.partition import split_clients
from fedsieve.experiment import run
from fedsieve.federate.versions import Versions
from fedsieve.observe.callbacks import Callback
from fedsieve.runs import checkpoint
from fedsieve.runs.checkpoint import Checkpoint, Companions, Progress
from fedsieve.runs.client_memory import DIGEST, ClientStore, States

Figures = dict[str, Any]
CLIENTS = (1_000, 10_000, 100_000, 1_000_000)
FEW = 10  # clients in a round
WEIGHTS = 21_600_000  # those of ViT-S, about
SHARED = {"sparsity": 0.9, "rule": "random", "scope": "server"}
CALIBRATED = {"sparsity": 0.9, "rule": "largest_magnitude", "scope": "client"}  # positions have to be sent


def small_steps(folder: Path, mask: Figures | None = None) -> Figures:
    return dense(folder, batch=2, steps=1, mask=mask)


def with_clients(settings: Figures, per_round: int) -> Figures:
    return {**settings, "clients": {"count": 100, "fraction": per_round / 100, "split": "iid"}}


# ---------------------------------------------------------------------------- clients that stay away


def splits() -> Figures:
    """Seconds and bytes to deal samples of 100 classes to clients, ten for each of them."""
    kinds = {
        "iid": IidSplit(),
        "5 classes, even": ClassesSplit(kind="classes", per_client=5),
        "5 classes, random": ClassesSplit(kind="classes", per_client=5, assign="random"),
    }
    found: Figures = {}
    for kind, settings in kinds.items():
        for count in CLIENTS:
            with ProcessPoolExecutor(1, get_context("spawn")) as alone:  # whose highest memory is its own
                found.setdefault(kind, {})[f"{count:,}"] = alone.submit(split_cost, count, settings).result()
    return found


def split_cost(count: int, settings: Any) -> dict[str, float]:
    labels = np.random.default_rng(0).permutation(np.arange(10 * count) % 100)
    before, start = highest_memory(), time.perf_counter()
    clients = split_clients(labels, 100, count, settings, 0).clients
    seconds = time.perf_counter() - start
    seen = torch.empty(count, dtype=torch.int32)  # as in Versions
    return {
        "seconds": seconds,
        "highest bytes a client, while it is made": (highest_memory() - before) / count,
        "bytes a client": (clients.edges.nbytes + seen.nbytes) / count,
        "bytes a sample": clients.positions.nbytes / len(clients.positions),
    }


def highest_memory() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ---------------------------------------------------------------------- clients that remember things


class Disk(Callback):
    """Looks into a run's folder after each round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def round(self, line: dict[str, Any]) -> None:
        sizes = lambda what: [path.stat().st_size for path in self.folder.glob(what)]  # noqa: E731
        self.states, self.checkpoints = sizes("clients/*/*.safetensors"), sizes("checkpoints/*.safetensors")
        self.masks, self.lines = sizes("masks/*/client-*.safetensors"), sizes("metrics.jsonl")


def remembering() -> Figures:
    """Bytes on disk of a client that carries its momentum, and of the run's other files, by kind of mask."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for name, mask in {"dense": None, "90% sparse, one mask": SHARED, "90% sparse, own": CALIBRATED}.items():
            settings, folder = with_clients(small_steps(Path(place), mask), FEW), Path(place) / name
            settings["phases"][0]["optimizer_state"] = "carry"
            disk = Disk(folder)
            run(as_experiment(settings), folder, callback=disk)
            found[name] = {
                "state of a client": max(disk.states),
                "mask of a client": max(disk.masks, default=0),
                "checkpoint": max(disk.checkpoints),
                "line of metrics, a client": max(disk.lines) / FEW,
                "split.json": (folder / "split.json").stat().st_size,
            }
    return found


def checkpoints() -> Figures:
    """Seconds and bytes of a checkpoint of ViT-S with so many clients, of which none or all remember something."""
    found: Figures = {}
    for count in CLIENTS:
        for share in (0, 1):
            found[f"{count:,} clients, {'all' if share else 'none'} remember"] = checkpoint_cost(count, share * count)
    return found


def checkpoint_cost(clients: int, remembering: int) -> dict[str, float]:
    generator = np.random.default_rng(0)
    numbers = np.stack((np.arange(remembering), generator.integers(1, 1000, remembering)), axis=1).astype(np.int32)
    states = States(numbers, generator.integers(0, 256, (remembering, DIGEST), dtype=np.uint8))
    seen = torch.from_numpy(generator.integers(-1, 1000, clients).astype(np.int32))
    vector, changed = torch.randn(WEIGHTS), torch.ones(WEIGHTS, dtype=torch.int32)
    with tempfile.TemporaryDirectory() as place:
        tracemalloc.start()
        store = ClientStore(Path(place) / "clients", [states])
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        start = time.perf_counter()
        companions = Companions(states=store.states())
        listed = time.perf_counter() - start
        state = Checkpoint(Progress(rounds=1), vector, None, Versions(changed, seen), companions=companions)
        checkpoint.save(Path(place) / "checkpoints", state)
        saved = time.perf_counter() - start - listed
        size = (Path(place) / "checkpoints" / "00000001.safetensors").stat().st_size
    return {"seconds": saved, "seconds to list states": listed, "bytes": size, "bytes of the store in memory": held}
