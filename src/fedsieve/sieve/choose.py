"""From scores to a mask: the weights, rows or tensors with the lowest scores may change."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedsieve.errors import RunError
from fedsieve.sieve.mask import Mask, Shapes

SAMPLE, MARGIN = 2**15, 2**9  # to find a k-th value: look at so many, and go five standard deviations aside


def choose(
    scores: Tensor,
    density: float,
    shapes: Shapes,
    *,
    within: Mask | None = None,
    unit: str = "weight",
    across: str = "model",
    keep_alive: int = 1,
    draw: str = "exact",
) -> Mask:
    """The mask of the units with the lowest scores, of equal ones the earlier: `round(density * weights)` weights.

    scores: one per weight, in the order of the mask; the score of a row or tensor is the mean of its weights'.
    within: choose only among these weights; all of them if they are too few. A row or tensor must be wholly in it.
    unit: `weight`, `row` (see `unit_sizes`) or `tensor`. Rows and tensors come as near to the number as they can.
    across: `model` compares all units; `tensor` takes the same share of each tensor.
    keep_alive: so many weights (or rows with so many) of each tensor are taken first, if it has them; for
        whole tensors it means nothing. Only these may exceed the density.
    draw: `exact` as above, or `bernoulli`: scores are uniform in [0, 1), the same for all weights of a unit,
        and each unit whose score is below the density is taken.

    At least one unit is active, if there is one.
    """
    _must_make_sense(scores, density, shapes, unit, across, keep_alive, draw)
    layout = [_units(shape, unit) for shape in shapes.values()]
    values, available = scores.detach().cpu().numpy(), np.ones(len(scores), dtype=np.bool_)
    if within is not None:
        within.must_fit(shapes)
        available = within.unpack().numpy()
    if unit != "weight":
        first = draw == "bernoulli"  # a mean of equal numbers could be another number
        means = [block[:, 0] if first else block.mean(1, dtype=np.float64) for block in _blocks(values, layout)]
        values = np.concatenate([values[:0], *means])
        available = np.concatenate([available[:0], *(block.all(1) for block in _blocks(available, layout))])

    least = [0 if unit == "tensor" else min(units, math.ceil(keep_alive / size)) for units, size in layout]
    chosen = _lowest_of_each(values, least, available, layout)
    if draw == "bernoulli":
        chosen |= available & (values < np.float64(density))  # not rounded to the scores' precision
    elif across == "tensor":
        if unit == "weight":
            left = [int(np.count_nonzero(block)) for block in _blocks(available, layout)]
            counts = _shares(density, [units for units, _ in layout], least, left)
        else:
            nearest = [_nearest_count(density * (units * size), size) for units, size in layout]
            counts = list(map(max, nearest, least))
        chosen = _lowest_of_each(values, counts, available, layout)
    else:
        target = round(density * len(scores))
        if unit == "weight":
            chosen |= _lowest(values, target - int(chosen.sum()), available & ~chosen)
        else:
            chosen |= _lowest_to(values, target, available, chosen, unit_sizes(shapes, unit).numpy())
    if not chosen.any():
        chosen = _lowest(values, 1, available)
    if unit != "weight":
        chosen = np.repeat(chosen, unit_sizes(shapes, unit).numpy())
    return Mask.pack(shapes, torch.from_numpy(chosen))


def active_range(
    density: float, shapes: Shapes, *, unit: str, across: str, keep_alive: int, draw: str
) -> tuple[int, int]:
    """The fewest and the most weights that `choose` takes in calibration, whatever the scores.

    Single weights are counted exactly. Rows and tensors come as near to the number as their sizes let them, and a
    Bernoulli draw may take any number.
    """
    layout = [_units(shape, unit) for shape in shapes.values()]
    weights = sum(units * size for units, size in layout)
    if density == 1 or not weights:
        return weights, weights
    kept_alive = 0 if unit == "tensor" else sum(min(n, math.ceil(keep_alive / size)) * size for n, size in layout)
    target = max(1, kept_alive, round(density * weights))
    if draw == "bernoulli":
        return max(1, kept_alive), weights
    if unit == "weight":
        return target, target
    sizes = [size for units, size in layout if units]
    slack = sum(sizes) if across == "tensor" else max(sizes)
    return max(1, target - slack - kept_alive), min(weights, target + slack + kept_alive)


def unit_sizes(shapes: Shapes, unit: str) -> Tensor:
    """How many weights each unit has, of all tensors one after another.

    The rows of a tensor are the indices of its first dimension, or of its second if it has three and the first is
    1 (class token, position embeddings); each entry of a bias or a norm is a row of its own.
    """
    layout = [_units(shape, unit) for shape in shapes.values()]
    units, sizes = ([one[i] for one in layout] for i in (0, 1))
    return torch.tensor(sizes, dtype=torch.int64).repeat_interleave(torch.tensor(units, dtype=torch.int64))


def _units(shape: tuple[int, ...], unit: str) -> tuple[int, int]:
    """How many units a tensor has, and how many weights each of them."""
    weights = math.prod(shape)
    if weights == 0:
        return 0, 1
    if unit == "tensor":
        return 1, weights
    if unit == "weight" or len(shape) < 2:
        return weights, 1
    rows = shape[1] if len(shape) == 3 and shape[0] == 1 else shape[0]
    return rows, weights // rows


def _blocks(values: np.ndarray, layout: list[tuple[int, int]]) -> Iterator[np.ndarray]:
    """Units x weights of each tensor."""
    start = 0
    for units, size in layout:
        yield values[start : (start := start + units * size)].reshape(units, size)


def _lowest_of_each(
    values: np.ndarray, counts: list[int], available: np.ndarray, layout: list[tuple[int, int]]
) -> np.ndarray:
    """True at the lowest values of each tensor, as many as `counts` says."""
    chosen, start = np.zeros(len(values), dtype=np.bool_), 0
    for count, (units, _) in zip(counts, layout, strict=True):
        own = slice(start, start := start + units)
        chosen[own] = _lowest(values[own], count, available[own])
    return chosen


def _lowest(values: np.ndarray, count: int, available: np.ndarray) -> np.ndarray:
    """True at the `count` lowest of the available values, of equal ones the earlier."""
    candidates = np.count_nonzero(available)
    if count <= 0:
        return np.zeros(len(values), dtype=np.bool_)
    if count >= candidates:
        return available.copy()
    last = _kth_lowest(values if candidates == len(values) else values[available], count - 1)
    chosen = (values < last) & available
    ties = np.flatnonzero((values == last) & available)
    chosen[ties[: count - np.count_nonzero(chosen)]] = True
    return chosen


def _kth_lowest(values: np.ndarray, k: int) -> np.floating:
    """`sorted(values)[k]`, in linear time whatever the order and the ties.

    numpy.partition is up to 30 times slower when one value is frequent (as 0 is among sensitivities), and
    torch.kthvalue takes quadratic time on descending values. So a sample shows where the value must be about, and
    only what is on that side of a pivot just beside it remains: a share k / len(values) at first, then very little.
    """
    generator = np.random.default_rng(0)  # only the time depends on it
    while len(values) > SAMPLE:
        sample = np.sort(values[generator.integers(len(values), size=SAMPLE)])
        beside = MARGIN if 2 * k < len(values) else -MARGIN  # so that the smaller side remains
        pivot = sample[min(max(k * SAMPLE // len(values) + beside, 0), SAMPLE - 1)]
        below, to_it = int(np.count_nonzero(values < pivot)), int(np.count_nonzero(values <= pivot))
        if below <= k < to_it:
            return pivot
        values, k = (values[values < pivot], k) if k < below else (values[values > pivot], k - to_it)
    return np.sort(values)[k]


def _lowest_to(
    values: np.ndarray, target: int, available: np.ndarray, chosen: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """True at the lowest available units that, with those already chosen, come nearest to `target` weights."""
    candidates = np.flatnonzero(available & ~chosen)
    order = candidates[np.argsort(values[candidates], kind="stable")]
    totals = sizes[chosen].sum() + np.cumsum([0, *sizes[order]])
    rows = np.zeros(len(values), dtype=np.bool_)
    rows[order[: np.abs(totals - target).argmin()]] = True  # the first minimum: of two equally near the smaller
    return rows


def _nearest_count(target: float, size: int) -> int:
    """How many units of this size come nearest to `target` weights; of two equally near the smaller."""
    count = int(target // size)
    return count + (target - count * size > (count + 1) * size - target)


def _shares(density: float, sizes: list[int], least: list[int], most: list[int]) -> list[int]:
    """`density` of each size, by largest remainder, between `least` and `most`: in all `round(density * all)`.

    Where a limit forbids a share, those furthest below or above theirs make up for it, so that the sum is still exact.
    """
    quotas, high = density * np.array(sizes, dtype=np.float64), np.array(most)
    low = np.minimum(least, high)
    counts = np.clip(quotas.astype(np.int64), low, high)
    missing = round(density * sum(sizes)) - int(counts.sum())
    for _ in range(min(missing, int((high - counts).sum()))):
        counts[np.argmax(np.where(counts < high, quotas - counts, -np.inf))] += 1
    for _ in range(min(-missing, int((counts - low).sum()))):
        above = np.where(counts > low, counts - quotas, -np.inf)
        counts[len(counts) - 1 - np.argmax(above[::-1])] -= 1  # of equal ones the later
    return [int(count) for count in counts]


def _must_make_sense(
    scores: Tensor, density: float, shapes: Shapes, unit: str, across: str, keep_alive: int, draw: str
) -> None:
    """ValueError for what no caller should ask; RunError that names the tensor whose scores are not finite."""
    for word, known in (
        (unit, ("weight", "row", "tensor")),
        (across, ("model", "tensor")),
        (draw, ("exact", "bernoulli")),
    ):
        if word not in known:
            raise ValueError(f"{word!r} is none of {', '.join(known)}")
    if unit == across == "tensor":
        raise ValueError("a share of each tensor cannot be made of whole tensors")
    if not 0 <= density <= 1 or keep_alive < 0:
        raise ValueError(f"a density of {density} with {keep_alive} weights kept alive makes no sense")
    weights = sum(map(math.prod, shapes.values()))
    if scores.shape != (weights,) or scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{weights} weights need as many scores in one dimension, of type float32 or float64")
    start = 0
    for name, shape in shapes.items():
        own = scores[start : (start := start + math.prod(shape))]
        if wrong := own.numel() - int(torch.isfinite(own).sum()):
            raise RunError(f"the scores of {name} are not finite: {wrong} of {own.numel()} are NaN or infinite")
