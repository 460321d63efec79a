"""What repeated runs allow to say: a mean with its interval, and whether two ways of doing something differ.

Few seeds and nearly normal accuracies: Student's t distribution gives both (Student, Biometrika 1908).
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

LEVEL = 0.95  # of all intervals
NEGLIGIBLE = 1e-12  # beside 1, or beside larger values: what subtracting floats leaves of equal differences
Pair = TypeVar("Pair", bound=Hashable)


@dataclass(frozen=True)
class Interval:
    """A mean, and the interval that holds the true one with probability LEVEL; without limits for a single value."""

    mean: float
    count: int
    margin: float | None  # half the interval's width

    @property
    def low(self) -> float | None:
        return None if self.margin is None else self.mean - self.margin

    @property
    def high(self) -> float | None:
        return None if self.margin is None else self.mean + self.margin


@dataclass(frozen=True)
class Paired:
    """How much two ways differ when both start from the same seeds, and how likely that is by chance alone."""

    difference: Interval  # one minus other
    p: float | None  # two-sided paired t test; None for fewer than two pairs, or if all differ by the same


def interval(values: Sequence[float]) -> Interval:
    """mean ± t · s / √n, with s² = Σ(x - mean)² / (n - 1) and t the 97.5% point of Student's t with n - 1 degrees."""
    if not values:
        raise ValueError("there is no mean of nothing")
    count, mean = len(values), math.fsum(values) / len(values)
    if count == 1:
        return Interval(mean, 1, None)
    return Interval(mean, count, _t_point((1 + LEVEL) / 2, count - 1) * _error_of_mean(values, mean))


def paired(one: Mapping[Pair, float], other: Mapping[Pair, float]) -> Paired | None:
    """The paired t test over the seeds (or whatever tells pairs apart) that both have; None if none in common."""
    seeds = [seed for seed in one if seed in other]
    if not seeds:
        return None
    differences = [one[seed] - other[seed] for seed in seeds]
    difference = interval(differences)
    if len(seeds) == 1:
        return Paired(difference, None)
    small = NEGLIGIBLE * max(1.0, *map(abs, differences))
    if max(differences) - min(differences) <= small:  # as accuracies, in steps of one sample, may do by chance
        return Paired(difference, 1.0 if abs(difference.mean) <= small else None)
    error = _error_of_mean(differences, difference.mean)
    return Paired(difference, _two_sided(difference.mean / error, len(seeds) - 1))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p values corrected for their number (Holm, 1979).

    Of differences that are none, any is among those with a corrected p of at most x with probability x at most.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * p))
        corrected[index] = highest
    return corrected


def _error_of_mean(values: Sequence[float], mean: float) -> float:
    count = len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)


def _t_point(share: float, degrees: int) -> float:
    from scipy.special import stdtrit  # late: a second of loading that most commands need not wait for

    return float(stdtrit(degrees, share))


def _two_sided(t: float, degrees: int) -> float:
    from scipy.special import stdtr

    return float(2 * stdtr(degrees, -abs(t)))
