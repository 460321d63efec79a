"""Which weights a mask leaves active: a rule gives every weight a score, and the lowest scores are active.

To add a rule, write a function of what it may look at, and give it a name in RULES.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the settings check names against RULES, and need no torch for it
    from torch import Tensor


@dataclass(frozen=True)
class Evidence:
    """What a rule may look at. What costs time is computed when it is asked for."""

    weights: "Tensor"  # all weights in scope, one after another
    sensitivity: Callable[[], "Tensor"]  # diagonal Fisher information, on a fresh draw of samples
    random: Callable[[], "Tensor"]  # uniform in [0, 1), the same for all weights of a unit


def least_sensitive(evidence: Evidence) -> "Tensor":
    """Those that predictions hardly depend on: changing them interferes least (TaLoS, Iurada et al., ICLR 2025)."""
    return evidence.sensitivity()


def most_sensitive(evidence: Evidence) -> "Tensor":
    """Those that the prediction depends on most (as in Fisher masks, Sung et al., NeurIPS 2021)."""
    return -evidence.sensitivity()


def smallest_magnitude(evidence: Evidence) -> "Tensor":
    """Those nearest to zero, which count least where pruning goes by magnitude (Han et al., NeurIPS 2015)."""
    return evidence.weights.abs()


def largest_magnitude(evidence: Evidence) -> "Tensor":
    """Those farthest from zero, the same for all clients."""
    return -evidence.weights.abs()


def random(evidence: Evidence) -> "Tensor":
    """Drawn from a seed, so that a mask costs no bytes."""
    return evidence.random()


RULES: dict[str, Callable[[Evidence], "Tensor"]] = {
    "least_sensitive": least_sensitive,
    "most_sensitive": most_sensitive,
    "smallest_magnitude": smallest_magnitude,
    "largest_magnitude": largest_magnitude,
    "random": random,
}

BY_SENSITIVITY = ("least_sensitive", "most_sensitive")  # the rules that look at data, which take time and samples
