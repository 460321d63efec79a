"""Which samples a client sees in which step, and at which learning rate."""

import math
from collections.abc import Iterator
from numbers import Real

import torch
from torch import Tensor

from fedsieve.config.local_settings import LocalSettings
from fedsieve.errors import PartError
from fedsieve.federate.schedule import SCHEDULES
from fedsieve.randomness import torch_generator


def number_of_steps(samples: int, local: LocalSettings) -> int:
    per_epoch = -(-samples // local.batch_size)
    return local.steps if local.steps is not None else (local.epochs or 1) * per_epoch


def number_of_epochs(samples: int, local: LocalSettings) -> int:
    """How many times a client goes through its samples; the last time may be partial."""
    return -(-number_of_steps(samples, local) // -(-samples // local.batch_size))


def batches(samples: int, local: LocalSettings, seed: int, *address: int | str) -> Iterator[list[Tensor]]:
    """The positions of each batch, epoch by epoch, each in a new random order; its last batch may be smaller."""
    left, epoch = number_of_steps(samples, local), 0
    while left:
        order = torch.randperm(samples, generator=torch_generator(seed, "batches", *address, epoch))
        yield (parts := list(order[: left * local.batch_size].split(local.batch_size)))
        left -= len(parts)
        epoch += 1


def learning_rates(samples: int, local: LocalSettings, round: int, rounds: int) -> list[float]:
    """Those of all steps of a client with so many samples."""
    steps = number_of_steps(samples, local)
    return [learning_rate(local, round, rounds, step / steps) for step in range(steps)]


def learning_rate(local: LocalSettings, round: int, rounds: int, done: float) -> float:
    """The learning rate in a round of a phase, when a share `done` of the local steps is done."""
    factor = SCHEDULES[local.schedule]((round - 1 + done) / rounds)
    is_number = isinstance(factor, Real)
    if not is_number or not 0 <= factor < math.inf:
        found = factor if is_number else type(factor).__name__
        raise PartError(f"schedule {local.schedule} gives {found}; expected a finite number of at least 0, as float")
    return local.lr * factor
