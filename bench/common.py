"""What the benchmarks share: the network, the clock, and how figures are printed and kept."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedsieve.model.vit import ViT, ViTShape, initialize

RESULTS = Path(__file__).with_name("results.json")
VIT_S = ViTShape(image_size=56, patch_size=14, width=384, depth=12, heads=6, hidden=1536, layer_scale=True)


def vit_s_classifier() -> torch.nn.Sequential:
    """ViT-S with a linear head for 100 classes and random weights: speed does not depend on them."""
    network = torch.nn.Sequential(ViT(VIT_S), torch.nn.Linear(384, 100))
    initialize(network, torch.Generator().manual_seed(0))
    return network


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """The same call, which returns the seconds it took."""

    def run() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return run


def side_by_side(calls: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """The seconds that each call returns, in turns, so that a slow moment of the machine hits all of them.

    A first turn is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            took = call()
            if turn:
                seconds[name].append(took)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, baseline: str) -> dict[str, float]:
    """The median of the turns' ratios, and the range that half of them lie in."""
    ratios = [one / other for one, other in zip(seconds[name], seconds[baseline], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"ratio": middle, "low": low, "high": high, "seconds": statistics.median(seconds[name])}


def machine() -> dict[str, Any]:
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def report(name: str, rows: list[dict[str, Any]]) -> None:
    """Print a table with a mark at each bar that was missed, and keep the rows under `name` in results.json.

    A row has what was measured, what it is compared to, their ratio, and `at_most` or `at_least`.
    """
    print(f"{'what':40} {'compared to':39} {'ratio':>6} {'half of the turns':>17} {'bar':>7}")
    for row in rows:
        spread = f"{row['low']:.3f} to {row['high']:.3f}" if "low" in row else ""
        sign, bar = ("≥", row["at_least"]) if "at_least" in row else ("≤", row["at_most"])
        row["met"] = row["ratio"] >= bar if sign == "≥" else row["ratio"] <= bar
        missed = "" if row["met"] else "  MISSED"
        print(f"{row['what']:40} {row['to']:39} {row['ratio']:6.3f} {spread:>17} {sign + f' {bar:.2f}':>7}{missed}")
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**kept, name: {"machine": machine(), "rows": rows}}, indent=2) + "\n")
    print(f"written to bench/{RESULTS.name}")
