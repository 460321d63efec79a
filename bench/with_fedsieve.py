"""fedsieve itself: the experiment that lies beside the workload, by `fedsieve.experiment.run`."""

import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from contenders import Options, Outcome, Stopwatch, load
from safetensors.torch import load_file
from workload import as_experiment

from fedsieve.engine import pace
from fedsieve.engine.ray_engine import RayEngine
from fedsieve.engine.worker_pool import WorkerPool
from fedsieve.experiment import run
from fedsieve.experiment.prepare import publish_phase
from fedsieve.federate.types import Job
from fedsieve.observe.callbacks import Callback
from fedsieve.observe.profile import stopwatch


class Timing(Callback):
    """From when the first round is about to begin (features are still to be made) until the last is over."""

    def __init__(self) -> None:
        self.watch, self.rounds = Stopwatch(), []
        self.ends: list[float] = []  # of rounds, with what is written after them
        self.each: list[dict[str, Any]] = []  # what each round took of this process, and its bytes

    def started(self, rounds: int, done: int) -> None:
        self.watch.go()

    def round(self, line: dict[str, Any]) -> None:
        self.watch.stop()
        self.watch.go()
        self.rounds.append(line["seconds"])
        self.ends.append(time.perf_counter())
        so_far = {"thread": self.watch.thread, "cores": self.watch.cores, **stopwatch.seconds}
        self.each.append({"up": line["bytes_up"], "down": line["bytes_down"], **so_far})

    @property
    def mean_with_files(self) -> float:
        """Seconds from the end of one round to the end of the next: with metrics and checkpoints."""
        return (self.ends[-1] - self.ends[0]) / max(1, len(self.ends) - 1)


def fedsieve(file: Path, options: Options) -> Outcome:
    os.environ["FEDSIEVE_CACHE"] = options.cache
    if file.exists():
        _warm_up(file)
    settings = json.loads(file.with_suffix(".json").read_text())
    timing = Timing()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for kind in (WorkerPool, RayEngine):
            stack.enter_context(patch.object(kind, "__init__", _ready_when_made(kind)))
        if options.all_travel:
            stack.enter_context(patch.object(pace, "TINY", 0.0))
        start = time.perf_counter()
        result = run(as_experiment(settings, options.overrides.split()), Path(folder) / "run", callback=timing)
        whole = time.perf_counter() - start
        weights = load_file(Path(folder) / "run" / "model.safetensors")
    more = {
        "whole run": whole,
        "median round": statistics.median(timing.rounds),
        "mean round with files": timing.mean_with_files,
        "bytes up": result["bytes_up"],
        "bytes down": result["bytes_down"],
        "each round": timing.each,
    }
    return timing.watch.outcome(weights, **more)


@cache
def _warm_up(file: Path) -> None:
    """To be as warm as the others."""
    load(file, Options())


def _ready_when_made(kind: type) -> Any:
    """An engine's `__init__` that waits for its processes, and gives each a small job.

    Nobody's start is measured, and everybody's processes have seen the network before, as after `load`.
    """
    make = kind.__init__

    def make_ready(engine: Any, *arguments: Any) -> None:
        make(engine, *arguments)
        engine.wait()
        context = engine.runtime.context
        publish_phase(engine, engine.runtime.phases[0], context.model.vector)
        about = {"phase": 0, "part": "train", "depth": context.feature_depth, "first": 0}
        list(engine.map([Job("outputs", about, np.arange(16))] * engine.size))

    return make_ready
