"""The server adds the direction to the weights, or with momentum a running sum of directions (FedAvgM)."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedsieve.config.settings import Real
from fedsieve.config.settings import Settings as AnySettings
from fedsieve.federate.aggregators.mean import pieces
from fedsieve.federate.types import State


class Sgd:
    """A step of size lr along the direction, or with momentum along a running sum: FedAvgM (Hsu et al., 2019).

    m <- momentum m + direction;  w <- w + lr m. Where m is 0 the weights stay as they are, to the bit.
    """

    class Settings(AnySettings):
        lr: Annotated[Real, Field(gt=0)] = 1.0
        momentum: float = Field(0.0, ge=0, lt=1)

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # Then it moves no weight whose direction is 0, and remembers nothing.
        self.is_plain = type(self) is Sgd and settings == Sgd.Settings()

    def start(self, weights: Tensor) -> State:
        return {"momentum": torch.zeros_like(weights)} if self.settings.momentum else {}

    def step(self, weights: Tensor, direction: Tensor, state: State) -> tuple[Tensor, State]:
        """The new weights overwrite the part of the direction that was read already, to save memory."""
        after = direction.view(torch.float32)[: len(weights)]
        for part in pieces(weights):
            step = direction[part]
            if self.settings.momentum:
                step = step.add(state["momentum"][part], alpha=self.settings.momentum)
                state["momentum"][part] = step
            moved = (weights[part].double() + self.settings.lr * step).float()
            after[part] = torch.where(step == 0, weights[part], moved)  # -0.0 + 0.0 would be +0.0
        return after, state
