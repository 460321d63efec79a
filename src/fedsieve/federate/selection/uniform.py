"""Clients drawn at random, each equally likely."""

import numpy as np

from fedsieve.config.registry import NoSettings
from fedsieve.config.settings import Settings as AnySettings


class Uniform:
    """Distinct clients, each equally likely (McMahan et al., AISTATS 2017)."""

    Settings: type[AnySettings] = NoSettings

    def __init__(self, settings: AnySettings, sizes: np.ndarray, per_round: int) -> None:
        self.settings, self.sizes, self.per_round = settings, sizes, per_round  # sizes: samples of each client

    def candidates(self, generator: np.random.Generator) -> list[int]:
        """The clients that get the round's weights, in ascending order."""
        return drawn(len(self.sizes), self.per_round, generator)

    @property
    def needs_losses(self) -> bool:
        """Whether the candidates must report their losses before the round's clients are chosen."""
        return False

    def among(self, losses: dict[int, float]) -> list[int]:
        """The round's clients, in ascending order, from the candidates' losses."""
        return sorted(losses)


def drawn(count: int, size: int, generator: np.random.Generator) -> list[int]:
    return sorted(int(client) for client in generator.choice(count, size=size, replace=False))
