"""Factors of the learning rate over a phase: functions of the share of the phase that is done, from 0 to 1."""

import math

from fedsieve.config.registry import Registry


def cosine(done: float) -> float:
    """From 1 to 0 along half a wave (Loshchilov and Hutter, ICLR 2017)."""
    return 0.5 * (1.0 + math.cos(math.pi * done))


def constant(done: float) -> float:
    """The same in all steps."""
    return 1.0


def linear(done: float) -> float:
    """From 1 to 0 in a straight line."""
    return 1.0 - done


SCHEDULES = Registry(
    cosine="fedsieve.federate.schedule:cosine",
    constant="fedsieve.federate.schedule:constant",
    linear="fedsieve.federate.schedule:linear",
)
