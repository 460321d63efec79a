"""The mean of each weight's changes without the largest and the smallest ones."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedsieve.config.settings import Settings as AnySettings
from fedsieve.federate.aggregators.median import Median


class TrimmedMean(Median):
    """The mean of each weight over the clients that trained it, without a share at either end (Yin et al., ICML 2018).

    Of n values, floor(share n) are left out at either end. All clients count the same.
    """

    class Settings(AnySettings):
        share: Annotated[float, Field(ge=0, lt=0.5)] = 0.1

    settings: Settings

    def center(self, ascending: Tensor, counts: Tensor) -> Tensor:
        cut = (self.settings.share * counts.double()).long()
        place = torch.arange(ascending.shape[1])
        kept = (place >= cut) & (place < counts - cut)
        return torch.where(kept, ascending.double(), 0).sum(1) / (counts - 2 * cut)[:, 0]
