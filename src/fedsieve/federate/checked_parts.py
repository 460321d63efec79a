"""Checks of what users' parts return, so that a mistake is one line that names the part.

Parts that come with fedsieve are used as they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.config.registry import Registry, settings_of
from fedsieve.config.settings import option
from fedsieve.errors import PartError
from fedsieve.federate.aggregators import AGGREGATORS
from fedsieve.federate.methods import METHODS
from fedsieve.federate.methods.fedavg import FedAvg
from fedsieve.federate.preparation import Preparation
from fedsieve.federate.selection import SELECTIONS
from fedsieve.federate.selection.uniform import Uniform
from fedsieve.federate.server_optimizers import SERVER_OPTIMIZERS
from fedsieve.federate.types import Aggregator, ServerOptimizer, State, Task, Update
from fedsieve.model.flat import Scope


def method_of(
    setting: Any, scope: Scope, aggregator: Callable[[Tensor], Aggregator], optimizer: ServerOptimizer
) -> FedAvg:
    part, own = METHODS.chosen(setting)
    return _checked(METHODS, setting, part, _method)(own, scope, aggregator, optimizer)


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


def _method(name: str, part: Any) -> Any:
    class Checked(part):
        def start(self, weights: Tensor, preparation: Preparation) -> State:
            found = super().start(weights, preparation)
            if not _is_state(found):
                raise PartError(f"method {name}: start gives {_described(found)}; expected a dict of tensors")
            return found

        def send(self, server: State) -> dict[str, Tensor]:
            found = super().send(server)
            if not _is_state(found) or {key: list(one.shape) for key, one in found.items()} != _vectors(self.extras):
                expected = _listed(self.extras) or "nothing"
                raise PartError(f"method {name}: send gives {_described(found)}; its extras are {expected}")
            return found

        def train(self, task: Task, mine: State) -> tuple[Update, State]:
            found = super().train(task, mine)
            if not _is_pair(found) or not isinstance(found[0], Update) or not _is_state(found[1]):
                expected = "an update, and a dict of tensors that the client remembers"
                raise PartError(f"method {name}: train gives {_described(found)}; expected {expected}")
            if wrong := _wrong_in(found[0], self, task):
                raise PartError(f"method {name}: train gives an update {wrong}")
            return found

        def fold(self, weights: Tensor, updates: Iterator[Update], server: State) -> tuple[Tensor, State]:
            is_read = False

            def read() -> Iterator[Update]:
                nonlocal is_read
                yield from updates
                is_read = True

            found = super().fold(weights, read(), server)
            if not _is_pair(found) or _shape(found[0]) != weights.shape or not _is_state(found[1]):
                expected = f"{len(weights):,} new weights and a dict of tensors that the server remembers"
                raise PartError(f"method {name}: fold gives {_described(found)}; expected {expected}")
            if not is_read:
                raise PartError(
                    f"method {name}: fold returns before it has read all updates; expected a loop over them"
                )
            return found[0].to(weights), found[1]

    return Checked


def _wrong_in(update: Update, method: FedAvg, task: Task) -> str | None:
    """How an update differs from what the method's `replies`, `reports` and `masked` say."""
    lengths, mask = dict(method.replies), update.mask
    if mask is not None:  # of what is under it, only active weights are sent
        lengths |= {key: lengths[key] - mask.size + mask.active for key in method.masked & lengths.keys()}
    if not _is_state(update.vectors) or {one: list(v.shape) for one, v in update.vectors.items()} != _vectors(lengths):
        return f"with {_described(update.vectors)}; its replies are {_listed(lengths)}"
    kind = torch.float32 if "delta" in lengths else torch.float64
    if others := [key for key, one in update.vectors.items() if one.dtype != kind]:
        return f"whose {others[0]} is {update.vectors[others[0]].dtype}; expected {kind}"
    if "delta" not in lengths:
        return None
    metrics = {"train_loss", "drift", *(["density"] if task.setup.masks is not None else []), *method.reports}
    if update.metrics.keys() != metrics or not all(isinstance(one, Real) for one in update.metrics.values()):
        return (
            f"with the metrics {', '.join(update.metrics) or 'none'}; expected numbers for {', '.join(sorted(metrics))}"
        )
    return None


def _aggregator(name: str, part: Any) -> Any:
    class Checked(part):
        def __init__(self, settings: Any, weights: Tensor) -> None:
            super().__init__(settings, weights)
            self._expected = weights.shape

        def finish(self) -> Tensor:
            found = super().finish()
            if not isinstance(found, Tensor) or found.shape != self._expected:
                expected = f"expected a direction, {self._expected.numel():,} numbers"
                raise PartError(f"aggregator {name} gives {_described(found)}; {expected}")
            return found.double()

    return Checked


def _server_optimizer(name: str, part: Any) -> Any:
    class Checked(part):
        def start(self, weights: Tensor) -> State:
            found = super().start(weights)
            if not isinstance(found, dict) or any(_shape(one) != weights.shape for one in found.values()):
                raise PartError(
                    f"server optimizer {name}: start gives {_described(found)}; expected a dict of tensors as long as "
                    "the weights"
                )
            return found

        def step(self, weights: Tensor, direction: Tensor, state: State) -> tuple[Tensor, State]:
            names = state.keys()
            found = super().step(weights, direction, state)
            if not isinstance(found, tuple) or len(found) != 2:
                raise PartError(
                    f"server optimizer {name}: step gives {_described(found)}; expected the new weights and a dict of "
                    "what it remembers"
                )
            after, remembered = found
            if _shape(after) != weights.shape:
                raise PartError(
                    f"server optimizer {name}: step gives {_described(after)}; expected {len(weights):,} new weights"
                )
            if not isinstance(remembered, dict) or remembered.keys() != names:
                raise PartError(
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
        raise PartError(f"{what} {_described(found)}; expected a list of clients' numbers")
    clients = [int(one) for one in given]
    if not clients:
        raise PartError(f"{what} no client; expected at least one")
    if others := [one for one in clients if one not in possible]:
        who = f"0 to {len(possible) - 1:,}" if isinstance(possible, range) else "the candidates"
        raise PartError(f"{what} client {others[0]}; expected one of {who}")
    if len(set(clients)) < len(clients):
        raise PartError(f"{what} a client twice; expected each at most once")
    return clients


def _is_pair(found: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 2


def _is_state(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(one, Tensor) for one in found.values())


def _vectors(lengths: Mapping[str, int]) -> dict[str, list[int]]:
    return {name: [length] for name, length in lengths.items()}


def _listed(lengths: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({length:,} numbers)" for name, length in lengths.items())


def _shape(found: Any) -> Any:
    return found.shape if isinstance(found, Tensor) else None


def _described(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of shape {list(found.shape)}"
    if isinstance(found, dict):
        each = (f"{name} {list(one.shape)}" if isinstance(one, Tensor) else str(name) for name, one in found.items())
        return f"a dict with {', '.join(each) or 'nothing'}"
    if isinstance(found, tuple):
        return f"a tuple ({', '.join(map(_described, found))})"
    return type(found).__name__
