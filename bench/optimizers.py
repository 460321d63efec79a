"""A step of SparseSGDM and SparseAdamW, and their memory, beside torch's optimizers with masks by hand.

python bench/optimizers.py       # or: make bench-parts; writes bench/results.json

The tensors of a ViT-S at 56 px with a head for 100 classes, random weights and gradients. Only the optimizer's step is
measured, in processor time on one thread, which other programs disturb less. By hand: masked-out gradients are zeroed,
torch steps, and frozen weights are put back.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from common import ratio, report, side_by_side, vit_s_classifier
from torch import Tensor, nn

from fedsieve.sieve.adamw import SparseAdamW
from fedsieve.sieve.calibrate import calibrate
from fedsieve.sieve.masked_optimizer import MaskedOptimizer
from fedsieve.sieve.sgdm import SparseSGDM

TURNS = 9
SGD = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 1e-4}
ADAMW = {"lr": 1e-4, "weight_decay": 1e-4}


def main() -> None:
    torch.set_num_threads(1)
    sgd = measured("SGD", torch.optim.SGD, SparseSGDM, SGD, (0.21, 0.11))
    adamw = measured("AdamW", torch.optim.AdamW, SparseAdamW, ADAMW, (0.16, 0.11))
    report("optimizers", sgd + adamw)


def measured(
    name: str, theirs: Any, ours: type[MaskedOptimizer], options: dict[str, float], bars: tuple[float, float]
) -> list[dict[str, Any]]:
    network = with_gradients()
    masks = {unit: calibrate(network, [], 0.9, rule="random", unit=unit) for unit in ("weight", "row")}
    named = dict(network.named_parameters())
    dense = theirs(named.values(), **options)
    sparse: dict[str, Any] = {"dense": ours(named.items(), None, **options)}  # type: ignore[arg-type, call-arg]
    sparse |= {unit: ours(named.items(), mask, **options) for unit, mask in masks.items()}  # type: ignore[arg-type, call-arg]
    calls = {unit: timed(optimizer.step) for unit, optimizer in sparse.items()}
    calls["torch"] = timed(dense.step)
    by_hand, active = theirs(named.values(), **options), {name: masks["weight"][name] for name in named}
    calls["by hand"] = timed(lambda: step_by_hand(by_hand, named, active))
    with torch.no_grad():
        seconds = side_by_side(calls, TURNS)
    plain, hand = (f"{what} ({ratio(seconds, call, call)['seconds'] * 1000:.0f} ms)" for what, call in (
        (f"torch's {name}", "torch"), ("masks by hand", "by hand")))  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"what": f"{name} step, dense", "to": plain, **ratio(seconds, "dense", "torch"), "at_most": 1.1}
    ]
    for unit in masks:
        what = f"{name} step, 90% of the {unit}s frozen"
        rows.append({"what": what, "to": hand, **ratio(seconds, unit, "by hand"), "at_most": 1.0})
    whole = state_bytes(dense)
    for unit, bar in zip(masks, bars, strict=True):
        what = f"{name} state, 90% of the {unit}s frozen"
        share = state_bytes(sparse[unit]) / whole
        rows.append({"what": what, "to": f"torch's {name} ({whole / 1e6:.0f} MB)", "ratio": share, "at_most": bar})
    return rows


def timed(step: Callable[[], object]) -> Callable[[], float]:
    """The same step, which returns the processor's seconds that it took."""

    def run() -> float:
        start = time.process_time()
        step()
        return time.process_time() - start

    return run


def with_gradients() -> nn.Module:
    network, generator = vit_s_classifier(), torch.Generator().manual_seed(1)
    for one in network.parameters():
        one.grad = torch.randn(one.shape, generator=generator)
    return network


def step_by_hand(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], active: dict[str, Tensor]) -> None:
    """A copy of the weights, of which the frozen ones are put back after the step."""
    before = {name: one.detach().clone() for name, one in named.items()}
    gradients = {name: one.grad for name, one in named.items()}
    for name, one in named.items():
        one.grad = one.grad * active[name]
    optimizer.step()
    for name, one in named.items():
        one.copy_(torch.where(active[name], one, before[name]))
        one.grad = gradients[name]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the state, and of the positions of active weights."""
    held = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
    for selection in getattr(optimizer, "_selections", {}).values():
        held += [one for one in vars(selection).values() if isinstance(one, Tensor)] if selection is not None else []
    return sum(one.numel() * one.element_size() for one in held)


if __name__ == "__main__":
    main()
