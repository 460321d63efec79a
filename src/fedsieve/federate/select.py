"""Which clients take part in a round."""

import numpy as np


def uniform(count: int, per_round: int, generator: np.random.Generator) -> list[int]:
    """`per_round` different clients, each equally likely (McMahan et al., AISTATS 2017), in ascending order."""
    return sorted(int(client) for client in generator.choice(count, size=per_round, replace=False))
