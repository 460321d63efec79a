"""How a client trains in a round."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from fedsieve.config.registry import choice, named, settings_of
from fedsieve.config.settings import Count, Real, Repeats, Settings, option
from fedsieve.federate.local_optimizers import LOCAL_OPTIMIZERS
from fedsieve.federate.schedule import SCHEDULES


class LocalSettings(Settings):
    """One client's training in one round: SGD as in torch.optim.SGD, or another optimizer."""

    epochs: Repeats | None = None
    steps: Count | None = None
    batch_size: Count = 64
    optimizer: choice(LOCAL_OPTIMIZERS) = "sgd"  # type: ignore[valid-type]
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
        fields, name = type(self).model_fields, option(self.optimizer)
        for key in ("momentum", "nesterov"):  # a run's own file has all keys, so the default is no sign of a mistake
            if name != "sgd" and getattr(self, key) != fields[key].default:
                hint = "adamw has beta1" if name == "adamw" else "leave it out"
                raise ValueError(f"{key} belongs to optimizer: sgd; {hint}")
        return self

    @property
    def optimizer_arguments(self) -> dict[str, Any]:
        """What the optimizer's class in LOCAL_OPTIMIZERS is called with, besides weights and mask."""
        own: Any = settings_of(self.optimizer)
        sgd = {"momentum": self.momentum, "dampening": 0.0, "nesterov": self.nesterov}
        is_sgd = option(self.optimizer) == "sgd"
        return {"lr": self.lr, "weight_decay": self.weight_decay, **(sgd if is_sgd else own.arguments())}
