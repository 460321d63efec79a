"""Factors of the learning rate over a phase: functions of the share of the phase that is done, from 0 to 1."""

import math
from collections.abc import Callable

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),  # Loshchilov and Hutter, ICLR 2017
}
