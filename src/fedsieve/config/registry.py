"""Slots of an experiment that take one of several parts, each with its own settings.

    METHODS = Registry(fedavg="fedsieve.federate.methods.fedavg:FedAvg", fedprox="…:FedProx")
    METHODS["mine"] = Mine                 # in a script: a class with a docstring and, if it has any, `Settings`

An experiment names a part (`fedavg`) or names it with settings (`{fedprox: {mu: 0.01}}`).
"""

from collections.abc import Iterator, MutableMapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any

from pydantic import PlainValidator, create_model
from pydantic_core import PydanticCustomError

from fedsieve.config.settings import Settings, option


class NoSettings(Settings):
    """The settings of a part that has none."""


class Registry(MutableMapping[str, Any]):
    """Parts by name: classes, or where to find them (`module:Class`); those are imported on first use.

    The first is the default, and its settings have defaults. So an experiment that names no other part is read without
    importing any part, nor torch, which takes a second.
    """

    def __init__(self, **parts: str) -> None:
        self._own, self._parts = parts, dict[str, Any](parts)

    @property
    def default(self) -> str:
        return next(iter(self._parts))

    @property
    def is_changed(self) -> bool:
        """Whether this process has added or replaced parts, of which others know nothing."""
        return any(
            not isinstance(part, str) and f"{part.__module__}:{part.__qualname__}" != self._own.get(name)
            for name, part in self._parts.items()
        )

    def chosen(self, value: Any) -> tuple[Any, Settings]:
        """The part that a setting of type `choice` names, and its settings."""
        part = self[option(value)]
        return part, settings_of(value) if isinstance(value, Settings) else settings_class(part)()

    def __getitem__(self, name: str) -> Any:
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


def choice(registry: Registry) -> Any:
    """The type of a setting that takes one of a registry's parts: its name, or a group with its name and settings."""

    def checked(value: Any) -> Any:
        name = option(value)
        if not isinstance(value, str | dict | Settings) or name not in registry:
            expected = " or ".join(f"'{one}'" for one in registry)
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
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


@cache
def _group(name: str, settings: type[Settings]) -> type[Settings]:
    fields: Any = {name: (settings, ...)}
    return create_model(name, __base__=Settings, **fields)


def settings_class(part: Any) -> type[Settings]:
    return getattr(part, "Settings", NoSettings)


def settings_of(chosen: Any) -> Settings:
    """The settings of the part that a setting of type `choice` names."""
    return getattr(chosen, option(chosen)) if isinstance(chosen, Settings) else NoSettings()
