"""FedAdagrad: steps shrink with all that a weight has moved."""

from torch import Tensor

from fedsieve.config.settings import Settings as AnySettings
from fedsieve.federate.server_optimizers.adam import Adam, Decay, Positive, Tau


class Adagrad(Adam):
    """FedAdagrad: adam whose second moment only grows, so that steps shrink (Reddi et al., ICLR 2021).

    v <- v + d^2. There is no momentum unless beta1 is set.
    """

    class Settings(AnySettings):
        lr: Positive = 0.01
        beta1: Decay = 0.0
        tau: Tau = 1e-3

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square
