"""One phase of an experiment: which weights are trained, how, and for how long."""

from typing import Literal

from pydantic import field_validator

from fedsieve.config.local_settings import LocalSettings
from fedsieve.config.mask_settings import MaskSettings
from fedsieve.config.registry import choice
from fedsieve.config.resolve import absolute
from fedsieve.config.scope_settings import Train
from fedsieve.config.settings import Repeats, Settings
from fedsieve.federate.aggregators import AGGREGATORS
from fedsieve.federate.methods import METHODS
from fedsieve.federate.server_optimizers import SERVER_OPTIMIZERS


class PhaseSettings(Settings):
    name: str
    train: Train
    rounds: Repeats
    local: LocalSettings
    mask: MaskSettings | None = None
    method: choice(METHODS) = "fedavg"  # type: ignore[valid-type]
    aggregate: choice(AGGREGATORS) = "mean"  # type: ignore[valid-type]
    server_optimizer: choice(SERVER_OPTIMIZERS) = "sgd"  # type: ignore[valid-type]
    optimizer_state: Literal["reset", "carry"] | None = None  # None: carry with one client, else reset

    @field_validator("name")
    @classmethod
    def _is_a_word(cls, name: str) -> str:
        if not name.replace("-", "").replace("_", "").isalnum() or len(name) > 100:  # it is also a folder's name
            raise ValueError("use letters, digits, - and _, at most 100 of them")
        return name

    def resolved(self, optimizer_state: str) -> "PhaseSettings":
        mask = self.mask and self.mask.model_copy(update={"file": absolute(self.mask.file)})
        return self.model_copy(update={"optimizer_state": self.optimizer_state or optimizer_state, "mask": mask})
