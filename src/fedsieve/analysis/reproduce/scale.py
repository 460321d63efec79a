"""Shrinking an experiment of a report to what there is time for.

| | `smoke` | `small` | `full` |
|---|---|---|---|
| data | digits | as reported | as reported |
| backbone | pico | as reported | as reported |
| training images | at most 800 | at most 2,000 | all |
| image size | at most 32 | at most 64 | as reported |
| rounds of each phase | a tenth, rounded up | a tenth, rounded up | as reported |
| clients, and candidates for selection | a fifth | a fifth | as reported |

With K classes instead of 100, a client holds max(1, round(classes x K / 100)) of them, at any scale. There are as many
clients as it takes to hold all classes, where classes are dealt evenly, and for rounds of three with
`secure: zero_sum`. All else stays as it is reported: learning rates, batch sizes, local epochs and steps, sparsity, the
share of clients in a round.
"""

import math
from dataclasses import dataclass

from fedsieve.config.client_settings import FEWEST_SECURE, ClientSettings
from fedsieve.config.data_settings import CenterCropSettings, DataSettings, ResizeCenterCrop
from fedsieve.config.model_settings import FLAGSHIP
from fedsieve.config.partition_settings import ClassesSplit
from fedsieve.config.phase_settings import PhaseSettings
from fedsieve.config.schema import Experiment
from fedsieve.config.settings import option
from fedsieve.data.sizes import data_sizes
from fedsieve.errors import InputError

REPORTED_DATA, REPORTED_BACKBONE, REPORTED_CLASSES = "cifar100", FLAGSHIP, 100


@dataclass(frozen=True)
class Scale:
    """By how much experiments shrink; None or 1 leaves them as they are."""

    name: str
    data: str | None = None
    backbone: str | None = None
    images: int | None = None  # at most, for training
    image_size: int | None = None  # at most
    rounds: int = 1  # what they are divided by
    clients: int = 1

    @property
    def defaults(self) -> list[str]:
        """The overrides that come before a person's own."""
        values = {"data.name": self.data, "model.backbone": self.backbone}
        return [f"{key}={value}" for key, value in values.items() if value is not None]

    @property
    def about(self) -> list[str]:
        """What is smaller than reported, in words."""
        parts = [
            self.rounds > 1 and f"1/{self.rounds} of the rounds",
            self.clients > 1 and f"1/{self.clients} of the clients",
            self.images and f"at most {self.images:,} training images",
            self.image_size and f"at most {self.image_size} px",
        ]
        return [part for part in parts if part]


SCALES = {
    scale.name: scale
    for scale in (
        Scale("smoke", data="digits", backbone="pico", images=800, image_size=32, rounds=10, clients=5),
        Scale("small", images=2_000, image_size=64, rounds=10, clients=5),
        Scale("full"),
    )
}


def scale_called(name: str) -> Scale:
    if name not in SCALES:
        raise InputError(f"--scale is '{name}'; use {', '.join(SCALES)}")
    return SCALES[name]


def shrunken(experiment: Experiment, scale: Scale) -> Experiment:
    """The experiment by the rule above, for the data that it names."""
    return experiment.model_copy(
        update={
            "data": _data(experiment.data, scale),
            "clients": _clients(experiment.clients, scale, data_sizes(experiment.data)[2]),
            "phases": tuple(_phase(phase, scale) for phase in experiment.phases),
        }
    )


def _data(data: DataSettings, scale: Scale) -> DataSettings:
    changes: dict[str, object] = {"limit": min(filter(None, (data.limit, scale.images)), default=None)}
    if scale.image_size is not None and data.image_size is not None and data.image_size > scale.image_size:
        changes["image_size"] = scale.image_size
        if isinstance(data.evaluate_crop, ResizeCenterCrop):  # the same part of the image is cut out
            resize = round(data.evaluate_crop.resize_center_crop.resize * scale.image_size / data.image_size)
            changes["evaluate_crop"] = ResizeCenterCrop(resize_center_crop=CenterCropSettings(resize=resize))
    return data.model_copy(update=changes)


def _clients(clients: ClientSettings, scale: Scale, classes: int) -> ClientSettings:
    count = _part(clients.count, scale.clients)
    changes: dict[str, object] = {}
    if option(clients.select) == "high_loss":
        own = clients.select.high_loss
        fewer = own.model_copy(update={"candidates": _part(own.candidates, scale.clients)})
        changes["select"] = clients.select.model_copy(update={"high_loss": fewer})
    if isinstance(clients.split, ClassesSplit):
        held = max(1, round(clients.split.per_client * classes / REPORTED_CLASSES))
        changes["split"] = clients.split.model_copy(update={"per_client": held})
        if clients.split.assign == "even":
            count = min(clients.count, max(count, math.ceil(classes / held)))  # else some class is nobody's
    if clients.zero_sum:  # which hides nobody among fewer
        count = min(clients.count, max(count, math.ceil(FEWEST_SECURE / clients.fraction)))
    return clients.model_copy(update={"count": count, **changes})


def _phase(phase: PhaseSettings, scale: Scale) -> PhaseSettings:
    return phase.model_copy(update={"rounds": math.ceil(phase.rounds / scale.rounds)})


def _part(count: int, divisor: int) -> int:
    return max(1, round(count / divisor))
