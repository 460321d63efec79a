"""The weighted mean over the clients for which a weight was active."""

import torch
from torch import Tensor

from fedsieve.config.settings import Settings
from fedsieve.federate.aggregators.mean import add_weighted
from fedsieve.federate.types import Update


class Active:
    """The weighted mean of each weight over the clients for which it was active; 0 where it was active for none.

    sum_k a_k m_k delta_k / sum_k a_k m_k, with m_k the client's mask.
    """

    needs_all = False
    takes_averages = True

    def __init__(self, settings: Settings, weights: Tensor) -> None:
        self.sum = torch.zeros_like(weights, dtype=torch.float64)
        self.total = torch.zeros_like(self.sum)

    def add(self, update: Update) -> None:
        where = update.positions(len(self.sum))
        self.total[slice(None) if where is None else where.to(self.total.device)] += update.weight
        add_weighted(self.sum, update)

    def finish(self) -> Tensor:
        return self.sum.div_(self.total.masked_fill_(self.total == 0, 1.0))
