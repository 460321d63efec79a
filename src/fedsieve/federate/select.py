"""Which clients take part in a round."""

from collections.abc import Sequence

import numpy as np


def uniform(count: int, per_round: int, generator: np.random.Generator) -> list[int]:
    """`per_round` different clients, each equally likely (McMahan et al., AISTATS 2017), in ascending order."""
    return sorted(int(client) for client in generator.choice(count, size=per_round, replace=False))


def by_size(sizes: Sequence[int], per_round: int, generator: np.random.Generator) -> list[int]:
    """Different clients, drawn one after another with chances in proportion to their samples, in ascending order."""
    shares = np.asarray(sizes, dtype=np.float64)
    chosen = generator.choice(len(shares), size=per_round, replace=False, p=shares / shares.sum())
    return sorted(int(client) for client in chosen)


def highest(losses: dict[int, float], per_round: int) -> list[int]:
    """Of the candidates those with the highest losses (report 004, section 5.6), in ascending order.

    Between equal losses the client with the lower number goes first.
    """
    return sorted(sorted(losses, key=lambda client: (-losses[client], client))[:per_round])
