"""What `precision: bfloat16` and `compile: true` save: training steps and evaluation of ViT-S beside plain float32.

python bench/precision.py        # or: make bench-parts; writes bench/results.json

ViT-S at 56 px with random weights and data, batches of 32. A step is forward, backward and optimizer. All of it on one
thread and in processor time, so that other programs on the machine hardly count.
"""

import os
import resource
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from common import ratio, report, side_by_side, vit_s_classifier
from torch import Tensor, nn
from torch.nn import functional as F

from fedsieve.model.compiled import compile_blocks
from fedsieve.model.precision import Precision, forward
from fedsieve.sieve.calibrate import calibrate
from fedsieve.sieve.mask import Mask
from fedsieve.sieve.rows import only_active
from fedsieve.sieve.sgdm import SparseSGDM
from sieve import SETTINGS, some_data

TURNS = 7


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # so that nothing is found compiled
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        report("precision", measure())


def processor_seconds(call: Callable[[], object]) -> float:
    """Of this process and of those that it started and that have ended, such as the C++ compiler."""
    start = _used()
    call()
    return _used() - start


def _used() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure() -> list[dict[str, Any]]:
    images, labels = some_data(32)
    plain, compiled = vit_s_classifier(), vit_s_classifier()
    rows = calibrate(plain, [], 0.9, rule="random", unit="row")
    calls = {
        "step": step(plain, images, labels, "float32"),
        "step, bfloat16": step(plain, images, labels, "bfloat16"),
        "step, compiled": step(compiled, images, labels, "float32"),
        "step, bfloat16, compiled": step(compiled, images, labels, "bfloat16"),
        "step, rows 90%": step(plain, images, labels, "float32", rows),
        "step, rows 90%, bfloat16": step(plain, images, labels, "bfloat16", rows),
        "evaluation": evaluation(plain, images, "float32"),
        "evaluation, bfloat16": evaluation(plain, images, "bfloat16"),
        "evaluation, compiled": evaluation(compiled, images, "float32"),
        "evaluation, bfloat16, compiled": evaluation(compiled, images, "bfloat16"),
    }
    took = processor_seconds(lambda: compile_for(compiled, calls["step, compiled"], calls["evaluation, compiled"]))
    seconds = side_by_side(calls, TURNS)
    bars = dict(zip([name for name in calls if "," in name], (0.8, 1.05, 0.8, 0.85, 0.7, 0.7, 1.1, 0.7), strict=True))
    results = []
    for name, bar in bars.items():
        baseline = name.split(",")[0]
        to = f"{baseline}, float32 ({ratio(seconds, baseline, baseline)['seconds']:.2f} s)"
        results.append({"what": name, "to": to, **ratio(seconds, name, baseline), "at_most": bar})
    one_step = ratio(seconds, "step", "step")["seconds"]
    what = f"compiling, nothing cached ({took:.0f} s)"
    return [*results, {"what": what, "to": "step, float32", "ratio": took / one_step, "at_most": 100.0}]


def step(
    network: nn.Module, images: Tensor, labels: Tensor, precision: Precision, mask: Mask | None = None
) -> Callable[[], float]:
    """The seconds of a training step in the midst of a local update."""
    named = dict(network.named_parameters())
    optimizer = SparseSGDM(named.items(), mask, **SETTINGS)

    def one_step() -> None:
        F.cross_entropy(forward(network, images, precision), labels).backward()
        optimizer.step()

    def run() -> float:
        with only_active(network, named, mask) if mask else nullcontext():
            seconds = processor_seconds(one_step)
        optimizer.zero_grad()
        return seconds

    return run


def evaluation(network: nn.Module, images: Tensor, precision: Precision) -> Callable[[], float]:
    forward_pass = torch.no_grad()(lambda: forward(network, images, precision))
    return lambda: processor_seconds(forward_pass)


def compile_for(network: nn.Module, *calls: Callable[[], float]) -> None:
    """All that comes before the first training step and the first evaluation, and these."""
    compile_blocks(network, "cpu")
    for call in calls:
        call()


if __name__ == "__main__":
    main()
