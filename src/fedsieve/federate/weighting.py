"""How much a client's update counts in averages, by its number of samples."""

from collections.abc import Callable

WEIGHTINGS: dict[str, Callable[[int], float]] = {"samples": float, "equal": lambda samples: 1.0}
