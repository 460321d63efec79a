"""Checks of what users' parts return, so that a mistake is one line that names the part.

Parts that come with fedsieve are used as they are.
"""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from fedsieve.config.registry import Registry, settings_of
from fedsieve.config.settings import option
from fedsieve.errors import RunError
from fedsieve.federate.aggregators import AGGREGATORS
from fedsieve.federate.selection import SELECTIONS
from fedsieve.federate.selection.uniform import Uniform
from fedsieve.federate.server_optimizers import SERVER_OPTIMIZERS
from fedsieve.federate.types import Aggregator, ServerOptimizer, State


def aggregator_of(setting: Any) -> Callable[[Tensor], Aggregator]:
    """What makes a phase's aggregator for each round's weights."""
    part, own = AGGREGATORS.chosen(setting)
    kind = _checked(AGGREGATORS, setting, part, _aggregator)
    return lambda weights: kind(own, weights)


def server_optimizer_of(setting: Any) -> ServerOptimizer:
    part, own = SERVER_OPTIMIZERS.chosen(setting)
    return _checked(SERVER_OPTIMIZERS, setting, part, _server_optimizer)(own)


def selection_of(setting: Any, sizes: np.ndarray, per_round: int) -> Uniform:
    part = _checked(SELECTIONS, setting, SELECTIONS[option(setting)], _selection)
    return part(settings_of(setting), sizes, per_round)


def _checked(registry: Registry, setting: Any, part: Any, checks: Callable[[str, Any], Any]) -> Any:
    name = option(setting)
    return part if registry.is_own(name) else checks(name, part)


def _aggregator(name: str, part: Any) -> Any:
    class Checked(part):
        def __init__(self, settings: Any, weights: Tensor) -> None:
            super().__init__(settings, weights)
            self._expected = weights.shape

        def finish(self) -> Tensor:
            found = super().finish()
            if not isinstance(found, Tensor) or found.shape != self._expected:
                expected = f"expected a direction, {self._expected.numel():,} numbers"
                raise RunError(f"aggregator {name} gives {_described(found)}; {expected}")
            return found.double()

    return Checked


def _server_optimizer(name: str, part: Any) -> Any:
    class Checked(part):
        def start(self, weights: Tensor) -> State:
            found = super().start(weights)
            if not isinstance(found, dict) or any(_shape(one) != weights.shape for one in found.values()):
                raise RunError(
                    f"server optimizer {name}: start gives {_described(found)}; expected a dict of tensors as long as "
                    "the weights"
                )
            return found

        def step(self, weights: Tensor, direction: Tensor, state: State) -> tuple[Tensor, State]:
            names = state.keys()
            found = super().step(weights, direction, state)
            if not isinstance(found, tuple) or len(found) != 2:
                raise RunError(
                    f"server optimizer {name}: step gives {_described(found)}; expected the new weights and a dict of "
                    "what it remembers"
                )
            after, remembered = found
            if _shape(after) != weights.shape:
                raise RunError(
                    f"server optimizer {name}: step gives {_described(after)}; expected {len(weights):,} new weights"
                )
            if not isinstance(remembered, dict) or remembered.keys() != names:
                raise RunError(
                    f"server optimizer {name}: step remembers {_described(remembered)}; expected a dict with the names "
                    f"that start gives ({', '.join(names) or 'none'})"
                )
            return after, remembered

    return Checked


def _selection(name: str, part: Any) -> Any:
    class Checked(part):
        def candidates(self, generator: np.random.Generator) -> list[int]:
            found = super().candidates(generator)
            return _clients(name, "candidates", found, range(len(self.sizes)))

        def among(self, losses: dict[int, float]) -> list[int]:
            return _clients(name, "among", super().among(losses), losses) if losses else []

    return Checked


def _clients(name: str, function: str, found: Any, possible: Any) -> list[int]:
    """The clients that a selection names, as Python's own numbers."""
    what = f"selection {name}: {function} gives"
    given = list(found) if isinstance(found, Sequence | np.ndarray | set | frozenset) else None
    if given is None or not all(isinstance(one, Integral) for one in given):
        raise RunError(f"{what} {_described(found)}; expected a list of clients' numbers")
    clients = [int(one) for one in given]
    if not clients:
        raise RunError(f"{what} no client; expected at least one")
    if others := [one for one in clients if one not in possible]:
        who = f"0 to {len(possible) - 1:,}" if isinstance(possible, range) else "the candidates"
        raise RunError(f"{what} client {others[0]}; expected one of {who}")
    if len(set(clients)) < len(clients):
        raise RunError(f"{what} a client twice; expected each at most once")
    return clients


def _shape(found: Any) -> Any:
    return found.shape if isinstance(found, Tensor) else None


def _described(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of shape {list(found.shape)}"
    if isinstance(found, dict):
        return f"a dict with {', '.join(map(str, found)) or 'nothing'}"
    return f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
