"""What federated runs cost by the piece: a message, a job, a client, a checkpoint, an actor.

bench/.venv/bin/python bench/costs.py                  # all parts, or those that are named:
bench/.venv/bin/python bench/costs.py messages ray     # writes "costs" in bench/results.json

docs/scale.md computes from these what large runs take. Messages are those of ViT-S in real runs on Ray; what a message
costs is the difference between a round of 40 clients and one of 10, divided by 30.
"""

import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from cases import head
from common import RESULTS, machine, timed
from costs_of_clients import (
    CALIBRATED,
    FEW,
    SHARED,
    WEIGHTS,
    Figures,
    checkpoints,
    remembering,
    small_steps,
    splits,
    with_clients,
)
from observed import MEGABYTE, in_a_process, pages_of, with_children
from workload import as_experiment

from fedsieve.context import RunContext
from fedsieve.engine.start import engine_for
from fedsieve.engine.torch_setup import configure_torch
from fedsieve.experiment.prepare import publish_phase
from fedsieve.federate.types import Job
from fedsieve.observe.callbacks import Callback
from fedsieve.phase import plan

ROUNDS = 4
MANY = 40  # clients in a round, beside FEW
ON_RAY = "engine=ray workers=2 threads=1"
OWN = {"sparsity": 0.9, "rule": "random", "scope": "client"}


def main() -> None:
    parts: dict[str, Callable[[], Figures]] = {
        one.__name__: one for one in (messages, ray, splits, remembering, checkpoints)
    }
    for name in sys.argv[1:] or parts:
        figures = parts[name]()
        print(name, json.dumps(figures, indent=2), flush=True)
        kept = json.loads(RESULTS.read_text())
        about = {"machine": machine(), "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
        kept.setdefault("costs", {})[name] = {**figures, **about}
        RESULTS.write_text(json.dumps(kept, indent=2) + "\n")


def median_of(turns: list[float]) -> Figures:
    return {"median": statistics.median(turns), "low": min(turns), "high": max(turns)}


# ----------------------------------------------------------------------------------------- messages


def messages() -> Figures:
    """Bytes of a client's message in each direction, and the seconds of the driver that it takes."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        kinds = {
            "dense": small_steps(folder),
            "dense, disagreement measured": {**small_steps(folder), "analyze": {"level": "basic"}},
            "90% sparse, one mask": small_steps(folder, SHARED),
            "90% sparse, own random masks": small_steps(folder, OWN),
            "90% sparse, own calibrated masks": small_steps(folder, CALIBRATED),
            "head": head_only(folder),
        }
        in_a_process(with_clients(kinds["head"], FEW), folder, ON_RAY)  # fills the cache
        for name, settings in kinds.items():
            settings["phases"][0]["rounds"] = ROUNDS
            found[name] = message_of(settings, folder)
            print(name, json.dumps(found[name]), flush=True)
    return found


def head_only(folder: Path) -> Figures:
    settings = head(folder)
    settings["data"]["validation"] = 0.0
    return settings


def message_of(settings: Figures, folder: Path) -> dict[str, Figures]:
    """What each client beyond the first ten of a round adds, in all rounds but the first; all jobs travel.

    In the first round memory is used for the first time, and clients have the pretrained weights already.
    """
    few, many = (
        in_a_process(with_clients(settings, count), folder, ON_RAY, None, all_travel=1)["each round"]
        for count in (FEW, MANY)
    )
    added: dict[str, Figures] = {}
    for what in ("up", "down"):
        added[f"bytes {what}"] = median_of(
            [(more[what] - less[what]) / (MANY - FEW) for more, less in zip(many[1:], few[1:], strict=True)]
        )
    for what in ("thread", "cores", "decode", "aggregate", "encode"):
        spent_few, spent_many = (
            [after.get(what, 0.0) - before.get(what, 0.0) for before, after in pairwise(one)] for one in (few, many)
        )
        less, more = statistics.median(spent_few), statistics.median(spent_many)
        added[f"seconds: {what}"] = median_of([(one - less) / (MANY - FEW) for one in spent_many])
        added[f"seconds: {what}"]["of a round"] = less - FEW * (more - less) / (MANY - FEW)
    return added


# ---------------------------------------------------------------------------------------------- Ray


def ray() -> Figures:
    """The start of a private cluster with actors, the memory of one, and what Ray takes for calls and copies."""
    figures: Figures = {"start": {}, "open files of the driver": {}}
    for actors in (1, 2):
        with an_engine(actors) as (engine, seconds):
            figures["start"][f"{actors} actors, seconds"] = seconds
            figures["memory of an actor, MB"] = memory_of_actors()
            train_once(engine)
            figures["open files of the driver"][f"{actors} actors"] = len(list(Path("/proc/self/fd").iterdir()))
            figures["memory of an actor that has trained, MB"] = memory_of_actors()
            if actors == 1:
                figures |= calls_and_copies(engine.ray)
    return figures


@contextmanager
def an_engine(actors: int) -> Iterator[tuple[Any, float]]:
    """A Ray engine with this many actors for ViT-S, and the seconds until all were ready, the cluster included."""
    with tempfile.TemporaryDirectory() as place:
        overrides = ["engine=ray", f"workers={actors}", "threads=1"]
        experiment = as_experiment(small_steps(Path(place)), overrides).resolved()
        configure_torch(experiment)
        context = RunContext(experiment, Callback())
        start = time.perf_counter()
        with engine_for(context, plan(experiment, context), Path(place)) as engine:
            engine.wait()
            yield engine, time.perf_counter() - start


def train_once(engine: Any) -> None:
    """Each actor trains a client for the experiment's single step."""
    publish_phase(engine, engine.runtime.phases[0], engine.runtime.context.model.vector)
    about = {"phase": 0, "round": 1, "memory": None, "version": 1, "secret": None}
    list(engine.map([Job("train", {**about, "client": client}) for client in range(engine.size)]))


def memory_of_actors() -> dict[str, float]:
    """Of one actor, the median: its pages, with those it shares counted in shares, and those of its own."""
    own = [pages_of(one) for one in with_children(os.getpid()) if "ClientActor" in command_of(one)]
    kinds = {"resident": "Rss", "share": "Pss", "private": "Pss_Anon"}
    return {kind: statistics.median(one[key] / MEGABYTE for one in own) for kind, key in kinds.items()}


def command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


class Echo:
    """An actor that does nothing but take and give arrays."""

    def take(self, data: np.ndarray | None = None) -> int:
        return 0 if data is None else int(data[::1024].sum())  # touches each page

    def give(self, size: int) -> np.ndarray:
        return np.zeros(size, np.float32)


def calls_and_copies(ray: Any) -> Figures:
    """A call that says nothing, and arrays as long as the weights of ViT-S into and out of the object store."""
    actor, vector = ray.remote(Echo).options(num_cpus=0).remote(), np.ones(WEIGHTS, np.float32)
    for _ in range(100):
        ray.get(actor.take.remote())
    calls, start, computed = 1000, time.perf_counter(), time.process_time()
    for _ in range(calls):
        ray.get(actor.take.remote())
    seconds = {"call, seconds": (time.perf_counter() - start) / calls}
    seconds["call, core seconds of the driver"] = (time.process_time() - computed) / calls
    put, fetch, give = [], [], []
    for _ in range(6):
        start = time.perf_counter()
        reference = ray.put(vector)
        put.append(time.perf_counter() - start)
        ray.get(actor.take.remote(reference))
        fetch.append(time.perf_counter() - start - put[-1])
        give.append(timed(lambda: ray.get(actor.give.remote(WEIGHTS)))())
    size = vector.nbytes / MEGABYTE
    copies = {"put": put, "fetch": fetch, "answer": give}
    return seconds | {f"{name} of {size:.0f} MB, seconds": median_of(one[1:]) for name, one in copies.items()}


if __name__ == "__main__":
    main()
