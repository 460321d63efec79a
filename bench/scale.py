"""What fedsieve alone is measured on: how soon it is done with little, and that it does not mind many clients."""

import atexit
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import yaml
from cases import EVALUATE, LOCAL, Bar, dense, provenance
from observed import HERE, MEGABYTE, in_a_process

COUNTS, PER_ROUND = (100, 1_000, 3_000, 100_000, 1_000_000), (10, 30, 100)
FEW_WITH_LITTLE = "1,000 clients of 2 images"  # as the million has them
IMAGES, SIDE = 2_000_000, 8
ROUNDS = 100


def start(runs: int, overrides: str) -> dict[str, Any]:
    """The command from beginning to end, with what Python needs to start and torch to be imported."""
    settings = {
        "data": {"name": "digits"},
        "model": {"backbone": "pico"},
        "clients": {"count": 10},
        "phases": [{"name": "head", "train": "head", "rounds": 1, "local": {"epochs": 1, "lr": 0.1}}],
    }
    values = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "start.yaml").write_text(yaml.safe_dump(settings))
        for run in range(runs + 1):  # the first reads files that the others find in memory, and fills the cache
            command = [Path(sys.executable).with_name("fedsieve"), "run", "start.yaml", "--out", f"run-{run}"]
            began = time.perf_counter()
            subprocess.run(
                [*command, *overrides.split()],
                cwd=folder,
                env={**os.environ, "FEDSIEVE_CACHE": str(folder / "cache")},
                check=True,
                capture_output=True,
            )
            values.append(time.perf_counter() - began)
    return {
        "title": "The command `fedsieve run` on digits with pico, 1 round, features cached",
        "unit": "s",
        "data": provenance(settings),
        "contenders": {"fedsieve": {"values": values[1:], "first": values[0]}},
        "bars": (Bar("fedsieve", None, at_most=6.0),),
    }


# --------------------------------------------------------------------------------------- many clients


@cache
def grey_images() -> Path:
    """A folder with 2,000,000 random images of 8 x 8 pixels, and a cache for their features; it ends with the process.

    They stay the same for any number of clients, so that the number of clients is all that differs.
    """
    place = tempfile.TemporaryDirectory()
    atexit.register(place.cleanup)
    folder, generator = Path(place.name), np.random.default_rng(0)
    x = generator.integers(0, 256, (IMAGES, SIDE, SIDE), dtype=np.uint8)
    y = generator.integers(0, 10, IMAGES)
    np.savez(folder / "grey.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    in_a_process(_many_clients(folder, COUNTS[0]), folder, "")  # fills the cache
    return folder


def _many_clients(folder: Path, count: int, images: int | None = None) -> dict[str, Any]:
    local = {"steps": 4, "batch_size": 2, "lr": 0.01, **LOCAL}
    data = {"name": "npz", "path": str(folder / "grey.npz"), "image_size": SIDE, "validation": 0.0}
    return {
        "data": {**data, "limit": images},
        "model": {"backbone": "pico"},
        "clients": {"count": count, "fraction": 10 / count},
        "phases": [{"name": "head", "train": "head", "rounds": ROUNDS, "local": local}],
        "evaluate": EVALUATE,
    }


def clients(runs: int, overrides: str) -> dict[str, Any]:
    """The median round of 10 clients, of more and more; once also of few clients with as little data as many have."""
    folder = grey_images()
    settings = {_so_many(count): _many_clients(folder, count) for count in COUNTS}
    settings[FEW_WITH_LITTLE] = _many_clients(folder, 1_000, 2_000)
    in_a_process(settings[FEW_WITH_LITTLE], folder, overrides)  # fills the cache
    found: dict[str, dict[str, Any]] = {name: {"values": [], "more": []} for name in settings}
    for _ in range(runs):
        for name, one in settings.items():
            said = in_a_process(one, folder, overrides)
            found[name]["values"].append(said["median round"])
            found[name]["more"].append(said)
    drawn = {count: found[_so_many(count)]["values"] for count in COUNTS}
    draw(drawn, "clients", "seconds of a round of 10 clients", HERE / "clients.png")
    million = _so_many(1_000_000)
    pairs = ((_so_many(100_000), _so_many(100)), (million, _so_many(1_000)), (million, FEW_WITH_LITTLE))
    return {
        "title": "A round of 10 clients, of more and more: head of pico on 2,000,000 images, 4 steps of 2 images each",
        "unit": "s",
        "data": provenance(settings[million]),
        "contenders": found,
        "bars": tuple(Bar(one, other, at_most=1.10) for one, other in pairs),
    }


def clients_memory(runs: int, overrides: str) -> dict[str, Any]:
    """The highest memory of the runs of `clients` with few and with a million clients, and what each of them adds."""
    folder, few, many = grey_images(), 1_000, 1_000_000
    values: dict[str, list[float]] = {}
    for _ in range(runs):
        memory = {count: in_a_process(_many_clients(folder, count), folder, overrides, 0.02) for count in (few, many)}
        for count, said in memory.items():
            values.setdefault(_so_many(count), []).append(said["memory"]["all"])
            values.setdefault(f"{_so_many(count)}, without files", []).append(
                said["memory"]["private"] + said["memory"]["shared"]
            )
    without = (values[f"{_so_many(count)}, without files"] for count in (many, few))
    added = [(one - other) * MEGABYTE / (many - few) for one, other in zip(*without, strict=True)]
    found: dict[str, Any] = {name: {"values": one} for name, one in values.items()}
    found["each client of the million"] = {"values": added, "unit": "bytes"}
    return {
        "title": "Memory of all processes with a million clients, 10 in a round, as in `clients`",
        "unit": "MB",
        "data": provenance(_many_clients(folder, many)),
        "contenders": found,
        "bars": tuple(
            Bar(_so_many(many) + what, _so_many(few) + what, at_most=1.10) for what in ("", ", without files")
        ),
    }


def _so_many(clients: int) -> str:
    return f"{clients:,} clients"


# --------------------------------------------------------------------------------------- large rounds


def memory(runs: int, overrides: str) -> dict[str, Any]:
    """The highest memory of all its processes, with more and more clients in a round of all weights of ViT-S."""
    data, held = memory_of_rounds(PER_ROUND, min(runs, 2), overrides)  # it hardly varies
    values = {count: [one["all"] for one in several] for count, several in held.items()}
    draw(values, "clients per round", "highest memory, MB", HERE / "memory.png")
    name = "{} clients per round".format
    return {
        "title": "Memory with more and more clients in a round: all weights of ViT-S, 1 step of 2 images each",
        "unit": "MB",
        "data": data,
        "contenders": {name(count): {"values": one} for count, one in values.items()},
        "bars": (Bar(name(PER_ROUND[-1]), name(PER_ROUND[0]), at_most=1.10),),
    }


def ray_memory(runs: int, overrides: str) -> dict[str, Any]:
    """The same on Ray with two actors: the driver, all processes with Ray's own, and their shared memory."""
    few, many = PER_ROUND[0], PER_ROUND[-1]
    data, held = memory_of_rounds((few, many), runs, f"{overrides} engine=ray workers=2 threads=1")
    whats = {"driver": "driver", "all": "all processes", "shared": "object store"}
    name = "{}, {} clients per round".format
    values = {
        name(what, count): [one[kind] for one in several]
        for kind, what in whats.items()
        for count, several in held.items()
    }
    return {
        "title": "Memory on Ray with more clients in a round, as in `memory`, with two actors",
        "unit": "MB",
        "data": data,
        "contenders": {key: {"values": one} for key, one in values.items()},
        "bars": (Bar(name("driver", many), name("driver", few), at_most=1.10),),
    }


def memory_of_rounds(
    counts: tuple[int, ...], runs: int, overrides: str
) -> tuple[str, dict[int, list[dict[str, float]]]]:
    """What the data are, and the most memory of each kind with so many clients in a round of all weights of ViT-S."""
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for _ in range(runs):
            for count in counts:
                settings = dense(folder, batch=2, steps=1)
                settings["clients"] = {**settings["clients"], "fraction": count / settings["clients"]["count"]}
                found[count].append(in_a_process(settings, folder, overrides, 0.05)["memory"])
    return provenance(settings), found


def draw(values: dict[int, list[float]], x: str, y: str, path: Path) -> None:
    """Medians and spread against a number on a logarithmic axis, from zero."""
    middle = np.array([statistics.median(one) for one in values.values()])
    low, high = (np.array([pick(one) for one in values.values()]) for pick in (min, max))
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    axes.errorbar(list(values), middle, yerr=[middle - low, high - middle], marker="o", capsize=3)
    axes.set(xscale="log", xlabel=x, ylabel=y, ylim=(0, 1.3 * high.max()), xticks=list(values))
    axes.set_xticklabels([f"{count:,}" for count in values])
    axes.minorticks_off()
    figure.savefig(path, dpi=120)
    plt.close(figure)
