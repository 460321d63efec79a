"""The server adds the direction to the weights."""

import torch
from torch import Tensor

from fedsieve.config.settings import Settings
from fedsieve.federate.aggregators.mean import pieces
from fedsieve.federate.types import State


class Sgd:
    """w <- w + direction, in float64; where the direction is 0, the weights stay as they are, to the bit."""

    def __init__(self, settings: Settings) -> None: ...

    def start(self, weights: Tensor) -> State:
        return {}

    def step(self, weights: Tensor, direction: Tensor, state: State) -> tuple[Tensor, State]:
        """The new weights overwrite the part of the direction that was read already, to save memory."""
        after = direction.view(torch.float32)[: len(weights)]
        for part in pieces(weights):
            step = direction[part]
            moved = (weights[part].double() + step).float()
            after[part] = torch.where(step == 0, weights[part], moved)  # -0.0 + 0.0 would be +0.0
        return after, {}
