"""How a client trains in a round."""

from typing import Annotated

from pydantic import Field, model_validator

from fedsieve.config.registry import named
from fedsieve.config.settings import Count, Real, Repeats, Settings
from fedsieve.federate.schedule import SCHEDULES


class LocalSettings(Settings):
    """One client's training in one round: SGD as in torch.optim.SGD."""

    epochs: Repeats | None = None
    steps: Count | None = None
    batch_size: Count = 64
    lr: Real
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: Real = 1e-4
    nesterov: bool = False
    schedule: named(SCHEDULES) = "cosine"  # type: ignore[valid-type]
    clip_norm: Annotated[Real, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> "LocalSettings":
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give epochs or steps, exactly one of them")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self
