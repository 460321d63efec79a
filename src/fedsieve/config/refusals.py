"""Combinations that are refused, each with the reason and what would work."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsieve.config.client_settings import ClientSettings
    from fedsieve.config.phase_settings import PhaseSettings

Applies = Callable[["PhaseSettings", "ClientSettings"], bool]


@dataclass(frozen=True)
class Refusal:
    """Settings that a part does not go with."""

    what: str  # the settings
    why: str  # and what would work
    applies: Applies


def leaking(why: str) -> Refusal:
    """Of masks whose momentum goes on moving weights that a newer mask freezes."""
    return Refusal(
        "mask.momentum: leak",
        why,
        lambda phase, clients: phase.mask is not None and phase.mask.momentum_policy == "leak",
    )


NEEDS_SINGLE_UPDATES = Refusal(
    "clients.secure: zero_sum",
    "it needs single updates, which secure sums hide; use aggregate: mean or active, or secure: none",
    lambda phase, clients: clients.zero_sum is not None,
)
SENDS_MORE = Refusal(
    "clients.secure: zero_sum",
    "it sends more than the updates that secure sums hide; use another method or secure: none",
    lambda phase, clients: clients.zero_sum is not None,
)
ZERO_SUM_REFUSES = (
    Refusal(
        "mask of each client's own",
        "it adds up numbers that stand at the same places; use mask.scope: server or federated",
        lambda phase, clients: phase.mask is not None and not phase.mask.is_shared,
    ),
    Refusal(
        "mask.refresh: epoch",
        "it needs to know which weights all clients change in a round; use refresh: once or round",
        lambda phase, clients: phase.mask is not None and phase.mask.refresh == "epoch",
    ),
    leaking("it needs all clients to change the same weights; use reset or carry"),
)
CARRIES = Refusal(
    "optimizer_state: carry",
    "the momentum of earlier rounds would count as gradients of this one; use optimizer_state: reset",
    lambda phase, clients: phase.optimizer_state == "carry",
)


def refusals_of(part: object) -> tuple[Refusal, ...]:
    """All combinations that a part is refused in: its own, and those that follow from its attributes."""
    is_aggregator = hasattr(part, "add") and hasattr(part, "finish")
    general = [
        # Said by the class itself: what derives from the mean may look at single updates all the same.
        (NEEDS_SINGLE_UPDATES, is_aggregator and not vars(part).get("takes_averages", False)),
        (SENDS_MORE, not getattr(part, "is_hidden_by_sums", True)),
        (CARRIES, not getattr(part, "carries", True)),
    ]
    return (*getattr(part, "refuses", ()), *(refusal for refusal, applies in general if applies))
