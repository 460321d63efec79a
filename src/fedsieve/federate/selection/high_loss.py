"""Clients whose data the model fits worst."""

import numpy as np

from fedsieve.config.settings import Count
from fedsieve.config.settings import Settings as AnySettings
from fedsieve.federate.selection.uniform import Uniform, drawn


class HighLoss(Uniform):
    """Of candidates drawn uniformly, those with the highest losses on their own samples (report 004, section 5.6)."""

    class Settings(AnySettings):
        candidates: Count = 20

    settings: Settings

    def candidates(self, generator: np.random.Generator) -> list[int]:
        return drawn(len(self.sizes), self.settings.candidates if self.needs_losses else self.per_round, generator)

    @property
    def needs_losses(self) -> bool:
        return self.per_round < len(self.sizes)  # else all take part anyway

    def among(self, losses: dict[int, float]) -> list[int]:
        """The clients with the highest losses; of equal ones, the client with the lower number comes first."""
        return sorted(sorted(losses, key=lambda client: (-losses[client], client))[: self.per_round])
