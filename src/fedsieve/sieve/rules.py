"""Which weights a mask leaves active: a rule gives every weight a score, and the lowest scores are active.

To add a rule, write a function of what it may look at, say with `looks_at` whether it looks at data, and name it in
RULES.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from fedsieve.config.registry import Registry

if TYPE_CHECKING:  # the settings check names against RULES, and need no torch for it
    from torch import Tensor

LooksAt = Literal["sensitivity", "gradients"]
Rule = TypeVar("Rule", bound=Callable[["Evidence"], "Tensor"])


@dataclass(frozen=True)
class Evidence:
    """What a rule may look at. What costs time is computed when it is asked for.

    Vectors hold the weights in scope, one after another. The first tensor in `shapes` has the first of them. With
    `scope: federated`, sensitivity and gradients are means over the samples of all clients.
    """

    weights: "Tensor"  # all weights in scope
    sensitivity: Callable[[], "Tensor"]  # diagonal Fisher information, on a fresh draw of samples
    random: Callable[[], "Tensor"]  # uniform in [0, 1), the same for all weights of a unit
    gradients: Callable[[], "Tensor"]  # the mean gradient of the loss, on a fresh draw of samples
    shapes: Mapping[str, tuple[int, ...]]  # of the tensors in scope, by name
    client: int | None = None  # whose mask it is; None: all clients share it


def looks_at(what: LooksAt | None) -> Callable[[Rule], Rule]:
    """Declare that a rule looks at clients' data, which takes time and samples."""

    def marked(rule: Rule) -> Rule:
        rule.looks_at = what  # type: ignore[attr-defined]
        return rule

    return marked


@looks_at("sensitivity")
def least_sensitive(evidence: Evidence) -> "Tensor":
    """Those that predictions hardly depend on: changing them interferes least (TaLoS, Iurada et al., ICLR 2025)."""
    return evidence.sensitivity()


@looks_at("sensitivity")
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


RULES = Registry(
    least_sensitive="fedsieve.sieve.rules:least_sensitive",
    most_sensitive="fedsieve.sieve.rules:most_sensitive",
    smallest_magnitude="fedsieve.sieve.rules:smallest_magnitude",
    largest_magnitude="fedsieve.sieve.rules:largest_magnitude",
    random="fedsieve.sieve.rules:random",
)


def looked_at(rule: str) -> LooksAt | None:
    """What the rule of this name looks at besides the weights; None: nothing, or the rule is not loaded."""
    return getattr(RULES[rule], "looks_at", None) if rule in RULES else None
