"""What sparsity saves: training steps under masks, and sensitivity, each beside what it is compared to.

python bench/sieve.py            # or: make bench-parts; writes bench/results.json

ViT-S at 56 px with random weights and data, on all threads. A step is forward, backward and optimizer.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from common import ratio, report, side_by_side, timed, vit_s_classifier
from torch import Tensor, nn
from torch.nn import functional as F

from fedsieve.model.classifier import Classifier, Tail
from fedsieve.sieve.calibrate import calibrate
from fedsieve.sieve.mask import Mask
from fedsieve.sieve.rows import only_active
from fedsieve.sieve.sensitivity import sensitivity
from fedsieve.sieve.sgdm import SparseSGDM

TURNS = 7
SETTINGS = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 1e-4}
LAST_BLOCKS = ("0.blocks.8.", "0.blocks.9.", "0.blocks.10.", "0.blocks.11.")


def main() -> None:
    if sys.argv[1:2] == ["--memory"]:  # in a process of its own: only the highest use so far can be read
        print(highest_memory(sys.argv[2], int(sys.argv[3])))
        return
    rows = [*training_steps(), *sensitivities(), *sensitivity_memory(), *optimizer_memory()]
    report("sieve", rows)


def some_data(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 3, 56, 56, generator=generator)
    return images, torch.randint(0, 100, (samples,), generator=generator)


def training_steps() -> list[dict[str, Any]]:
    """Local training steps on batches of 64 relative to the dense step: torch.optim.SGD on all weights."""
    network, (images, labels) = vit_s_classifier(), some_data(64)
    everything = dict(network.named_parameters())
    last_blocks = {name: one for name, one in everything.items() if name.startswith(LAST_BLOCKS)}
    backbone, head = network
    tail = Tail(Classifier(backbone, head, []), 8)
    with torch.no_grad():
        tokens = backbone.first_blocks(images, 8).flatten(1)
    weights = calibrate(network, [], 0.9, rule="random")
    rows = calibrate(network, [], 0.9, rule="random", unit="row")
    rows_of_last_blocks = calibrate(network, [], 0.9, rule="random", unit="row", parameters=last_blocks)
    steps = {
        "dense": step(network, images, labels, everything),
        "single weights, 90%": step(network, images, labels, everything, weights),
        "rows, 90%": step(network, images, labels, everything, rows),
        "blocks 8-11": step(network, images, labels, last_blocks),
        "blocks 8-11, prefix cached": step(tail, tokens, labels, last_blocks),
        "blocks 8-11, prefix cached, rows 90%": step(tail, tokens, labels, last_blocks, rows_of_last_blocks),
    }
    bars = dict(zip(list(steps)[1:], (1.03, 0.80, 0.62, 0.40, 0.32), strict=True))
    seconds = side_by_side(steps, TURNS)
    to = f"dense step ({ratio(seconds, 'dense', 'dense')['seconds']:.2f} s)"
    return [{"what": name, "to": to, **ratio(seconds, name, "dense"), "at_most": bar} for name, bar in bars.items()]


def step(
    network: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    parameters: dict[str, nn.Parameter],
    mask: Mask | None = None,
) -> Callable[[], float]:
    """The seconds of a step in the midst of a local update that trains `parameters`, all of them or under a mask."""
    optimizer = (
        torch.optim.SGD(parameters.values(), **SETTINGS)  # type: ignore[arg-type]
        if mask is None
        else SparseSGDM(parameters.items(), mask, **SETTINGS)
    )

    def run() -> float:
        network.requires_grad_(False)
        for one in parameters.values():
            one.requires_grad_(True)
        with only_active(network, parameters, mask) if mask else nullcontext():
            start = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(network(inputs), labels).backward()
            optimizer.step()
            seconds = time.perf_counter() - start
        optimizer.zero_grad()
        return seconds

    return run


def one_backward_per_sample(network: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Squared per-sample gradients as in many a notebook: one forward pass, then each sample's loss backwards."""
    totals = {name: torch.zeros_like(one) for name, one in network.named_parameters()}
    for loss in F.cross_entropy(network(images), labels, reduction="none"):
        network.zero_grad()
        loss.backward(retain_graph=True)
        for name, one in network.named_parameters():
            totals[name] += one.grad**2


def one_sample_at_a_time(network: nn.Module, images: Tensor, labels: Tensor) -> None:
    """The same with a forward pass of its own for each sample, so that a backward pass is that of one image."""
    totals = {name: torch.zeros_like(one) for name, one in network.named_parameters()}
    for image, label in zip(images, labels, strict=True):
        network.zero_grad()
        F.cross_entropy(network(image[None]), label[None]).backward()
        for name, one in network.named_parameters():
            totals[name] += one.grad**2


def plain_pass(network: nn.Module, images: Tensor, labels: Tensor) -> None:
    network.zero_grad()
    F.cross_entropy(network(images), labels).backward()


def per_sample(network: nn.Module, images: Tensor, labels: Tensor) -> None:
    sensitivity(network, dict(network.named_parameters()), [(images, labels)], "empirical")


def sensitivities() -> list[dict[str, Any]]:
    """Squared per-sample gradients of 32 images, beside one backward per sample and beside a plain pass."""
    network, (images, labels) = vit_s_classifier(), some_data(32)
    calls = {
        "sensitivity": timed(lambda: per_sample(network, images, labels)),
        "plain": timed(lambda: plain_pass(network, images, labels)),
        "one sample at a time": timed(lambda: one_sample_at_a_time(network, images, labels)),
    }
    seconds = side_by_side(calls, 5)
    calls["one backward per sample"] = timed(lambda: one_backward_per_sample(network, images, labels))
    slow = side_by_side({name: calls[name] for name in ("sensitivity", "one backward per sample")}, 2)
    plain = ratio(seconds, "sensitivity", "plain")
    to = f"sensitivity, batch 32 ({plain['seconds']:.2f} s)"
    return [
        {"what": "sensitivity, batch 32", "to": "one forward and backward", **plain, "at_most": 2.5},
        {
            "what": "one backward per sample",
            "to": to,
            **ratio(slow, "one backward per sample", "sensitivity"),
            "at_least": 8.0,
        },
        {
            "what": "one sample at a time",
            "to": to,
            **ratio(seconds, "one sample at a time", "sensitivity"),
            "at_least": 8.0,
        },
    ]


def sensitivity_memory() -> list[dict[str, Any]]:
    """What sensitivity takes beyond a plain forward and backward pass, in sizes of the model."""
    size = 4 * sum(one.numel() for one in vit_s_classifier().parameters())
    results = []
    for batch in (32, 128):
        plain, more = (
            int(subprocess.check_output([sys.executable, __file__, "--memory", what, str(batch)]))
            for what in ("plain", "sensitivity")
        )
        what = f"sensitivity, batch {batch}: more memory"
        results.append({"what": what, "to": "all weights", "ratio": (more - plain) / size, "at_most": 2.0})
    return results


def highest_memory(what: str, batch: int) -> int:
    """Bytes that this process used at most."""
    network, (images, labels) = vit_s_classifier(), some_data(batch)
    for _ in range(2):
        (plain_pass if what == "plain" else per_sample)(network, images, labels)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def optimizer_memory() -> list[dict[str, Any]]:
    """Momentum and indices of SparseSGDM at 90%, beside the momentum of torch.optim.SGD."""
    network = vit_s_classifier()
    optimizer = SparseSGDM(network.named_parameters(), calibrate(network, [], 0.9, rule="random"), **SETTINGS)
    for one in network.parameters():
        one.grad = torch.zeros_like(one)
    optimizer.step()
    selections = [vars(selection).values() for selection in optimizer._selections.values() if selection is not None]
    held = [one for values in selections for one in values if isinstance(one, Tensor)]
    held += [one["momentum_buffer"] for one in optimizer.state.values()]
    dense = 4 * sum(one.numel() for one in network.parameters())
    share = sum(one.numel() * one.element_size() for one in held) / dense
    return [{"what": "SparseSGDM's state, 90%", "to": "momentum of torch.optim.SGD", "ratio": share, "at_most": 0.21}]


if __name__ == "__main__":
    main()
