"""FedAdam: steps of a size that adapts to each weight."""

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedsieve.config.settings import Real
from fedsieve.config.settings import Settings as AnySettings
from fedsieve.federate.aggregators.mean import pieces
from fedsieve.federate.types import State

Decay = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[Real, Field(gt=0)]
Tau = Annotated[Real, Field(ge=1e-12)]  # its square is above 0 in float32, too


class Adam:
    """FedAdam: steps adapt to each weight by a running mean of its squared directions (Reddi et al., ICLR 2021).

        w <- w + lr m / (sqrt(v) + tau)
        m <- beta1 m + (1 - beta1) d
        v <- beta2 v + (1 - beta2) d^2

    with d the direction, m = 0 and v = tau^2 at first, and no bias correction. Moments are kept in float32, and
    computed in float64.
    """

    class Settings(AnySettings):
        lr: Positive = 0.01
        beta1: Decay = 0.9
        beta2: Decay = 0.99
        tau: Tau = 1e-3  # the larger, the less steps adapt

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def start(self, weights: Tensor) -> State:
        return {"m": torch.zeros_like(weights), "v": torch.full_like(weights, self.settings.tau**2)}

    def step(self, weights: Tensor, direction: Tensor, state: State) -> tuple[Tensor, State]:
        """The new weights overwrite the part of the direction that was read already, to save memory."""
        after, beta1 = direction.view(torch.float32)[: len(weights)], self.settings.beta1
        for part in pieces(weights):
            d = direction[part]
            m = beta1 * state["m"][part].double() + (1 - beta1) * d
            v = self.second_moment(state["v"][part].double(), d.square())
            state["m"][part], state["v"][part] = m, v
            after[part] = weights[part].double() + self.settings.lr * m / (v.sqrt() + self.settings.tau)
        return after, state

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.settings.beta2 * v + (1 - self.settings.beta2) * square
