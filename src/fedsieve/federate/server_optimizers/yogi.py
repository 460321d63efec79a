"""FedYogi: FedAdam whose second moment grows and shrinks more slowly."""

import torch
from torch import Tensor

from fedsieve.federate.server_optimizers.adam import Adam


class Yogi(Adam):
    """FedYogi: adam whose second moment changes by small steps only (Reddi et al., ICLR 2021).

    v <- v - (1 - beta2) d^2 sign(v - d^2)
    """

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.settings.beta2) * square * torch.sign(v - square)
