"""What fedsieve alone is measured on: how soon it is done with little, and that it does not mind many clients."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import yaml
from cases import EVALUATE, LOCAL, Bar, dense, provenance

HERE = Path(__file__).parent
COUNTS, PER_ROUND = (100, 3_000, 100_000), (10, 30, 100)
IMAGES, SIDE = 200_000, 8
ROUNDS = 50
MEGABYTE = 1e6


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


def clients(runs: int, overrides: str) -> dict[str, Any]:
    """The median round of 10 clients, of more and more: 200,000 images of 8 x 8 pixels, head of pico."""
    values: dict[int, list[float]] = {count: [] for count in COUNTS}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        generator = np.random.default_rng(0)
        x = generator.integers(0, 256, (IMAGES, SIDE, SIDE), dtype=np.uint8)
        y = generator.integers(0, 10, IMAGES)
        np.savez(folder / "grey.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
        for turn in range(runs + 1):  # the first turn fills the cache
            for count in COUNTS if turn else COUNTS[:1]:
                said = in_a_process(_many_clients(folder, count), folder, overrides)
                if turn:
                    values[count].append(said["median round"])
    draw(values, "clients", "seconds of a round of 10 clients", HERE / "clients.png")
    name = "{:,} clients".format
    return {
        "title": "A round of 10 clients, of more and more: head of pico, 4 steps of 2 images each",
        "unit": "s",
        "data": provenance(_many_clients(folder, COUNTS[0])),
        "contenders": {name(count): {"values": one} for count, one in values.items()},
        "bars": (Bar(name(COUNTS[-1]), name(COUNTS[0]), at_most=1.10),),
    }


def _many_clients(folder: Path, count: int) -> dict[str, Any]:
    local = {"steps": 4, "batch_size": 2, "lr": 0.01, **LOCAL}
    return {
        "data": {"name": "npz", "path": str(folder / "grey.npz"), "image_size": SIDE, "validation": 0.0},
        "model": {"backbone": "pico"},
        "clients": {"count": count, "fraction": 10 / count},
        "phases": [{"name": "head", "train": "head", "rounds": ROUNDS, "local": local}],
        "evaluate": EVALUATE,
    }


def memory(runs: int, overrides: str) -> dict[str, Any]:
    """The highest memory of all its processes, with more and more clients in a round of all weights of ViT-S."""
    values: dict[int, list[float]] = {count: [] for count in PER_ROUND}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for _ in range(min(runs, 2)):  # it hardly varies
            for count in PER_ROUND:
                settings = dense(folder, batch=2, steps=1)
                settings["clients"] = {**settings["clients"], "fraction": count / settings["clients"]["count"]}
                values[count].append(in_a_process(settings, folder, overrides, 0.05)["memory"] / MEGABYTE)
    draw(values, "clients per round", "highest memory, MB", HERE / "memory.png")
    name = "{} clients per round".format
    return {
        "title": "Memory with more and more clients in a round: all weights of ViT-S, 1 step of 2 images each",
        "unit": "MB",
        "data": provenance(settings),
        "contenders": {name(count): {"values": one} for count, one in values.items()},
        "bars": (Bar(name(PER_ROUND[-1]), name(PER_ROUND[0]), at_most=1.10),),
    }


def in_a_process(
    settings: dict[str, Any], folder: Path, overrides: str, look_every: float | None = None
) -> dict[str, Any]:
    """What the contender `fedsieve` says of a run, and under "memory" the most bytes that its processes held.

    They are looked at every so many seconds, which takes time of its own; without, nobody looks.
    """
    work = folder / "work"
    work.with_suffix(".json").write_text(json.dumps(settings))
    arguments = ["fedsieve", work, folder / "weights", f"cache={folder / 'cache'}", f"overrides={overrides}"]
    process = subprocess.Popen([sys.executable, HERE / "contenders.py", *arguments], stdout=subprocess.PIPE, text=True)
    highest = 0
    while look_every is not None and process.poll() is None:
        highest = max(highest, sum(held_by(one) for one in with_children(process.pid)))
        time.sleep(look_every)
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"fedsieve failed with {settings}")
    return {**json.loads(said.splitlines()[-1]), "memory": highest}


def with_children(process: int) -> list[int]:
    found = [process]
    for one in found:  # grows while it is gone through
        try:
            found += [int(child) for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
        except OSError:
            continue
    return found


def held_by(process: int) -> int:
    """Bytes of a process, what it shares with others counted in shares (Linux)."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


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
