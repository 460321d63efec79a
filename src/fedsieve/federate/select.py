"""Which clients take part in a round."""

from collections.abc import Sequence

import numpy as np


def uniform(count: int, per_round: int, generator: np.random.Generator) -> list[int]:
    """`per_round` different clients, each equally likely (McMahan et al., AISTATS 2017), in ascending order."""
    return sorted(int(client) for client in generator.choice(count, size=per_round, replace=False))


def by_size(sizes: Sequence[int] | np.ndarray, per_round: int, generator: np.random.Generator) -> list[int]:
    """Different clients, drawn one after another with chances in proportion to their samples, in ascending order.

    The same draws as `generator.choice(len(sizes), per_round, replace=False, p=sizes / sum)`, without its checks of p,
    which take longer than all else where there are many clients.
    """
    shares = np.asarray(sizes, dtype=np.float64)
    shares = shares / shares.sum()
    if np.count_nonzero(shares) < per_round:
        raise ValueError(f"{per_round} clients to choose, and only {np.count_nonzero(shares)} have samples")
    chosen: list[int] = []
    while len(chosen) < per_round:  # who was drawn twice is replaced by draws among the others
        drawn = generator.random(per_round - len(chosen))
        shares[chosen] = 0
        ends = np.cumsum(shares)
        chosen += dict.fromkeys(np.searchsorted(ends / ends[-1], drawn, side="right").tolist())
    return sorted(chosen)


def highest(losses: dict[int, float], per_round: int) -> list[int]:
    """Of the candidates those with the highest losses (report 004, section 5.6), in ascending order.

    Between equal losses the client with the lower number goes first.
    """
    return sorted(sorted(losses, key=lambda client: (-losses[client], client))[:per_round])
