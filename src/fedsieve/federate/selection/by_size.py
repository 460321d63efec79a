"""Clients drawn at random, those with more samples more often."""

from collections.abc import Sequence

import numpy as np

from fedsieve.federate.selection.uniform import Uniform


class BySize(Uniform):
    """Distinct clients, drawn one after another with probabilities proportional to their samples."""

    def candidates(self, generator: np.random.Generator) -> list[int]:
        return drawn_by_size(self.sizes, self.per_round, generator)


def drawn_by_size(sizes: Sequence[int] | np.ndarray, per_round: int, generator: np.random.Generator) -> list[int]:
    """The same draws as `generator.choice(len(sizes), per_round, replace=False, p=sizes / sum)`, in ascending order.

    It skips the checks of p, which take longer than all else if there are many clients.
    """
    shares = np.asarray(sizes, dtype=np.float64)
    shares = shares / shares.sum()
    if np.count_nonzero(shares) < per_round:
        raise ValueError(f"{per_round} clients to choose, and only {np.count_nonzero(shares)} have samples")
    chosen: list[int] = []
    while len(chosen) < per_round:  # repeated draws are replaced by draws among the other clients
        draws = generator.random(per_round - len(chosen))
        shares[chosen] = 0
        ends = np.cumsum(shares)
        chosen += dict.fromkeys(np.searchsorted(ends / ends[-1], draws, side="right").tolist())
    return sorted(chosen)
