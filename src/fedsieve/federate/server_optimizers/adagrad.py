"""FedAdagrad: steps shrink with all that a weight has moved."""

from torch import Tensor

from fedsieve.federate.server_optimizers.adam import Adam, AdaptiveSettings, Decay


class Adagrad(Adam):
    """As adam, with v <- v + d^2, and without momentum unless beta1 is set (FedAdagrad: Reddi et al., ICLR 2021)."""

    class Settings(AdaptiveSettings):
        beta1: Decay = 0.0

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square
