"""Slots of an experiment that take one of several parts, each with its own settings.

    METHODS = Registry(fedavg="fedsieve.federate.methods.fedavg:FedAvg", fedprox="…:FedProx")
    METHODS["mine"] = Mine                 # in a script: a class with a docstring and, if it has any, `Settings`

An experiment names a part (`fedavg`) or names it with settings (`{fedprox: {mu: 0.01}}`). Users' parts come from
plugins (`plugins.py`), and are in a registry only while a run uses them.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Annotated, Any

from pydantic import PlainValidator, create_model
from pydantic_core import PydanticCustomError

from fedsieve.config.settings import Settings, option


class NoSettings(Settings):
    """The settings of a part that has none."""


_accepts_unknown: ContextVar[bool] = ContextVar("accepts_unknown", default=False)


@contextmanager
def unknown_parts_accepted() -> Iterator[None]:
    """Within this context, settings may name parts that no registry has, and keep what stands there as plain data.

    So an experiment with plugins can be read without executing them. Checks take an unknown part for the default one.
    """
    token = _accepts_unknown.set(True)
    try:
        yield
    finally:
        _accepts_unknown.reset(token)


class Registry(MutableMapping[str, Any]):
    """Parts by name: classes or functions, or where to find them (`module:Class`); those are imported on first use.

    The first is the default, and its settings have defaults. So an experiment that names no other part is read without
    importing any part, nor torch, which takes a second.
    """

    def __init__(self, **parts: str) -> None:
        self._own, self._parts = parts, dict[str, Any](parts)
        self._plugged: set[str] = set()  # the names of plugins' parts

    @property
    def default(self) -> str:
        return next(iter(self._parts))

    @property
    def is_changed(self) -> bool:
        """Whether this process has added or replaced parts, of which others know nothing; they do know plugins."""
        return any(
            not isinstance(part, str) and _place_of(part) != self._own.get(name)
            for name, part in self._parts.items()
            if name not in self._plugged
        )

    def chosen(self, value: Any) -> tuple[Any, Settings]:
        """The part that a setting of type `choice` names, and its settings."""
        part = self[option(value)]
        return part, settings_of(value) if isinstance(value, Settings) else settings_class(part)()

    def is_own(self, name: str) -> bool:
        """Whether a part of this name comes with fedsieve."""
        return name in self._own

    def plug(self, name: str, part: Any) -> None:
        """Add a plugin's part."""
        self._parts[name] = part
        self._plugged.add(name)

    def unplug(self, name: str) -> None:
        self._plugged.discard(name)
        self._parts.pop(name, None)

    def accepts(self, name: str) -> bool:
        """Whether a setting may name this part."""
        return name in self._parts or (_accepts_unknown.get() and name != "")

    @property
    def names(self) -> str:
        """All names, in quotes, for error messages."""
        return " or ".join(f"'{name}'" for name in self._parts)

    def __getitem__(self, name: str) -> Any:
        if name not in self._parts and _accepts_unknown.get():
            name = self.default
        part = self._parts[name]
        if isinstance(part, str):
            module, _, cls = part.partition(":")
            part = self._parts[name] = getattr(import_module(module), cls)
        return part

    def __setitem__(self, name: str, part: Any) -> None:
        self._parts[name] = part

    def __delitem__(self, name: str) -> None:
        del self._parts[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _place_of(part: Any) -> str:
    """`module:Class`, as registries name it; objects such as `functools.partial` have no such name."""
    return f"{part.__module__}:{getattr(part, '__qualname__', '')}"


def choice(registry: Registry) -> Any:
    """The type of a setting that takes one of a registry's parts: its name, or a group with its name and settings."""

    def checked(value: Any) -> Any:
        name = option(value)
        if not isinstance(value, str | dict | Settings) or not registry.accepts(name):
            raise _unknown(registry)
        if name not in registry:
            return value
        if isinstance(value, Settings):
            return value
        if value in (registry.default, {registry.default: None}, {registry.default: {}}):
            return registry.default
        settings = settings_class(registry[name])
        given = {name: {}} if isinstance(value, str) else {**value, name: {} if value[name] is None else value[name]}
        group = _group(name, settings).model_validate(given)
        is_usual = name == registry.default and getattr(group, name) == settings()
        return name if is_usual or not settings.model_fields else group

    return Annotated[Any, PlainValidator(checked), registry]  # the registry, for readers of the schema


def named(registry: Registry) -> Any:
    """The type of a setting that takes the name of one of a registry's parts, which has no settings of its own."""

    def checked(value: Any) -> Any:
        if not isinstance(value, str) or not registry.accepts(value):
            raise _unknown(registry)
        return value

    return Annotated[str, PlainValidator(checked)]


def _unknown(registry: Registry) -> PydanticCustomError:
    context = {"expected": registry.names, "is_part": True}
    return PydanticCustomError("literal_error", "Input should be {expected}", context)


@cache
def _group(name: str, settings: type[Settings]) -> type[Settings]:
    fields: Any = {name: (settings, ...)}
    return create_model(name, __base__=Settings, **fields)


def settings_class(part: Any) -> type[Settings]:
    return getattr(part, "Settings", NoSettings)


def settings_of(chosen: Any) -> Settings:
    """The settings of the part that a setting of type `choice` names."""
    return getattr(chosen, option(chosen)) if isinstance(chosen, Settings) else NoSettings()
