"""How a server combines the updates of a round: `add` each as it arrives, then `finish`.

No rule here holds more than one update at a time.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fedsieve.federate.client import Update


class FedAvg:
    """Federated averaging (McMahan et al., AISTATS 2017): w + sum_k a_k delta_k / sum_k a_k.

    The weight a_k is the client's number of samples, or 1 with equal weighting. The sum is kept in
    float64, so that it does not matter in practice how many clients there are.
    """

    def __init__(self, weights: Tensor, weight_of: Callable[[Update], float]) -> None:
        self.weights = weights
        self.weight_of = weight_of
        self.sum = torch.zeros_like(weights, dtype=torch.float64)
        self.total = 0.0

    def add(self, update: Update) -> None:
        weight = self.weight_of(update)
        self.sum.add_(update.vectors["delta"], alpha=weight)
        self.total += weight

    def finish(self) -> Tensor:
        return (self.weights.double() + self.sum / self.total).float()


WEIGHTINGS: dict[str, Callable[[Update], float]] = {
    "samples": lambda update: float(update.samples),
    "equal": lambda update: 1.0,
}
