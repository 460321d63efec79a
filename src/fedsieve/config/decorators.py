"""Decorators that make a function or class of a user's one of the parts that experiments can name.

    @fedsieve.rule                                  # its name is that of the function or class, in snake_case
    @fedsieve.rule("mine", looks_at="gradients")    # or this one

In a plugin (`plugins.py`) parts are there only while a run uses the plugin. In a script or notebook they are simply
there, but other processes do not know them, so runs go on in one process. docs/extend.md has an example of each kind.
"""

import inspect
import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fedsieve.config.registry import Registry
from fedsieve.config.settings import Settings
from fedsieve.data import DATASETS, SPLITS
from fedsieve.errors import InputError
from fedsieve.federate.aggregators import AGGREGATORS
from fedsieve.federate.methods import METHODS
from fedsieve.federate.schedule import SCHEDULES
from fedsieve.federate.selection import SELECTIONS
from fedsieve.federate.server_optimizers import SERVER_OPTIMIZERS
from fedsieve.observe.callbacks import Callback
from fedsieve.sieve.rules import RULES, LooksAt
from fedsieve.sieve.rules import looks_at as looking_at

CALLBACKS = Registry()  # every one of them hears every run
KINDS = {
    "rule": RULES,
    "method": METHODS,
    "aggregator": AGGREGATORS,
    "server optimizer": SERVER_OPTIMIZERS,
    "selection": SELECTIONS,
    "split": SPLITS,
    "schedule": SCHEDULES,
    "data set": DATASETS,
    "callback": CALLBACKS,
}
CLASSES = ("method", "aggregator", "server optimizer", "selection", "callback")  # the others are functions
DERIVED = {"method": "FedAvg", "selection": "Uniform"}  # from these, the defaults of their registries
NEEDED = {"aggregator": ("add", "finish"), "server optimizer": ("start", "step")}  # functions
ARGUMENTS = {  # that a function is called with, or a class to make one
    "rule": "evidence",
    "method": "settings, scope, aggregator, optimizer",
    "aggregator": "settings, weights",
    "server optimizer": "settings",
    "selection": "settings, sizes, per_round",
    "split": "labels, classes, count, settings, generator",
    "schedule": "done",
    "data set": "settings",
    "callback": "",
}

Decorator = Callable[[Any], Any]


@dataclass(frozen=True)
class Part:
    """A user's part, before it is in its registry."""

    kind: str
    name: str
    value: Any


collected: ContextVar[list[Part] | None] = ContextVar("collected", default=None)  # of the plugin that is being loaded


def rule(name: Any = None, *, looks_at: LooksAt | None = None) -> Any:
    """A mask rule: a function `(evidence) -> scores` (`sieve/rules.py`); the weights with the lowest stay active.

    `looks_at` declares what it asks the evidence for, if that is measured on samples.
    """
    if looks_at not in (None, "sensitivity", "gradients"):
        raise InputError(f"looks_at is {looks_at!r}; use 'sensitivity', 'gradients' or None")
    return _decorated("rule", name, looking_at(looks_at))


def method(name: Any = None) -> Any:
    """A federated method: a class derived from `FedAvg` (`federate/methods/fedavg.py`)."""
    return _decorated("method", name)


def aggregator(name: Any = None) -> Any:
    """An aggregator: a class like `Mean` (`federate/aggregators/mean.py`)."""
    return _decorated("aggregator", name)


def server_optimizer(name: Any = None) -> Any:
    """A server optimizer: a class like `Sgd` (`federate/server_optimizers/sgd.py`)."""
    return _decorated("server optimizer", name)


def selection(name: Any = None) -> Any:
    """A selection of clients: a class derived from `Uniform` (`federate/selection/uniform.py`)."""
    return _decorated("selection", name)


def split(name: Any = None, *, settings: type[Settings] | None = None) -> Any:
    """A split: a function `(labels, classes, count, settings, generator) -> positions of each client's samples`."""

    def with_settings(part: Any) -> Any:
        if settings is not None:
            part.Settings = settings
        return part

    _refuse_other_settings("a split", settings)

    return _decorated("split", name, with_settings)


def schedule(name: Any = None) -> Any:
    """A schedule: a function from the share of a phase that is done, from 0 to 1, to a factor of the learning rate."""
    return _decorated("schedule", name)


def dataset(name: Any = None) -> Any:
    """A data set: a function `(settings) -> x_train, y_train, x_test, y_test` or these and the classes' names."""
    return _decorated("data set", name)


def callback(name: Any = None) -> Any:
    """A callback: a class derived from `fedsieve.Callback`, made for each run."""
    return _decorated("callback", name)


def _decorated(kind: str, given: Any, mark: Decorator = lambda part: part) -> Any:
    """The part itself, if the decorator stands without brackets, or a decorator."""
    if given is None or isinstance(given, str):
        return lambda part: mark(_registered(kind, given, part))
    return mark(_registered(kind, None, given))


def _registered(kind: str, name: str | None, part: Any) -> Any:
    if not callable(part):
        raise InputError(f"a {kind} is {type(part).__name__}; put the decorator before a function or class")
    name = name or snake_case(getattr(part, "__name__", ""))
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise InputError(f"'{name}' is no name for a {kind}; use letters, digits, - and _, a letter first")
    _refuse_unless_usable(kind, name, part)
    if KINDS[kind].is_own(name):
        raise InputError(f"there is a {kind} '{name}' in fedsieve already; give yours another name")
    parts = collected.get()
    if parts is None:
        KINDS[kind][name] = part
    elif any((one.kind, one.name) == (kind, name) for one in parts):
        raise InputError(f"{kind} '{name}' is registered twice; give one of them another name")
    else:
        parts.append(Part(kind, name, part))
    return part


def _refuse_unless_usable(kind: str, name: str, part: Any) -> None:
    """InputError if a part is not what runs expect of its kind."""
    if kind in CLASSES and not isinstance(part, type):
        raise InputError(f"{kind} '{name}' is a function; write it as a class")
    if kind == "callback" and not issubclass(part, Callback):
        raise InputError(f"callback '{name}' is not derived from fedsieve.Callback; write class …(fedsieve.Callback)")
    if kind in DERIVED and not issubclass(part, KINDS[kind][KINDS[kind].default]):
        base = DERIVED[kind]
        raise InputError(f"{kind} '{name}' is not derived from {base}; write class …({base}), as in docs/extend.md")
    for function in NEEDED.get(kind, ()):
        if not callable(getattr(part, function, None)):
            raise InputError(f"{kind} '{name}' has no function {function}; docs/extend.md has an example")
    _refuse_other_settings(f"{kind} '{name}'", getattr(part, "Settings", None))
    try:
        signature = inspect.signature(part)
    except (TypeError, ValueError):  # of something that is not written in Python
        return
    try:
        signature.bind(*filter(None, ARGUMENTS[kind].split(", ")))
    except TypeError:
        raise InputError(f"{kind} '{name}' must take the arguments ({ARGUMENTS[kind]})") from None


def _refuse_other_settings(whose: str, settings: Any) -> None:
    if settings is not None and not (isinstance(settings, type) and issubclass(settings, Settings)):
        raise InputError(f"the settings of {whose} are no class derived from fedsieve.Settings; make them one")


def snake_case(name: str) -> str:
    """`FedProx` to `fed_prox`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
