"""What a method may use at the server before the first round of a phase."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from fedsieve.federate.traffic import Traffic
from fedsieve.federate.types import Engine, Store

if TYPE_CHECKING:
    from fedsieve.federate.shared_mask import SharedMasks
    from fedsieve.federate.transport import Transport


@dataclass
class Preparation:
    phase: int
    engine: Engine
    transport: "Transport"
    shared_masks: "SharedMasks | None"
    memory: Store
    version: int  # rounds that were done before, in all phases
    sizes: np.ndarray  # samples of each client
    progress: Callable[[int, int], None]
    traffic: Traffic = field(default_factory=Traffic)  # counted in the first round

    def send_to_all(self, weights: Tensor) -> None:
        """Send every client the weights, and the shared mask unless all clients made it together."""
        masks, clients = self.shared_masks, len(self.sizes)
        if masks is not None and masks.source.shared is not None and not masks.needs_everybody:
            self.transport.send_shared_mask(range(clients), 1, self.traffic)
        self.transport.bring_up_to_date(range(clients), weights, self.traffic)

    def keep(self, client: int, digest: str) -> None:
        """Keep the state that a client has put under this version, before its first round."""
        self.memory.keep(client, self.version, digest)
