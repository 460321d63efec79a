"""What it costs to measure how clients drift: one client's update, beside the local training that it comes from.

python bench/drift.py

ViT-S at 56 px with random weights and data, on all threads. A local training is four steps on batches of 32.
"""

from collections.abc import Callable
from typing import Any

import torch
from common import ratio, report, side_by_side, timed, vit_s_classifier
from torch import nn
from torch.nn import functional as F

from fedsieve.federate.diagnostics import Interference
from fedsieve.federate.local import touched_positions
from fedsieve.sieve.calibrate import calibrate

TURNS = 7
STEPS = 4
BATCH = 32
AT_MOST = 0.03


def main() -> None:
    report("drift", drift_costs())


def drift_costs() -> list[dict[str, Any]]:
    """`Interference.add` of a dense and of a 90% sparse update, under a mask of its own, relative to the training."""
    network = vit_s_classifier()
    size = sum(one.numel() for one in network.parameters())
    generator = torch.Generator().manual_seed(0)
    delta = 1e-3 * torch.randn(size, generator=generator)
    masks = [calibrate(network, [], 0.9, rule="random", seed=seed) for seed in range(2)]
    positions = touched_positions(masks[1], size)
    chosen = delta[positions]
    dense, sparse = Interference(size, size), Interference(size, size)
    sparse.add(0, chosen, positions, masks[0])  # with a mask of another client, else there would be none to count
    calls = {
        "training": timed(local_training(network, generator)),
        "drift, dense update": timed(lambda: dense.add(0, delta, None, None)),
        "drift, 90% sparse update": timed(lambda: sparse.add(1, chosen, positions, masks[1])),
    }
    seconds = side_by_side(calls, TURNS)
    to = f"{STEPS} steps of {BATCH} ({ratio(seconds, 'training', 'training')['seconds']:.2f} s)"
    return [
        {"what": name, "to": to, **ratio(seconds, name, "training"), "at_most": AT_MOST} for name in list(calls)[1:]
    ]


def local_training(network: nn.Module, generator: torch.Generator) -> Callable[[], None]:
    images = torch.randn(BATCH, 3, 56, 56, generator=generator)
    labels = torch.randint(0, 100, (BATCH,), generator=generator)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)

    def run() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(network(images), labels).backward()
            optimizer.step()

    return run


if __name__ == "__main__":
    main()
