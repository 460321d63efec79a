"""Slots of an experiment: parts by name, their settings, and when they are imported."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from fedsieve.config.experiment_file import load_experiment
from fedsieve.config.registry import NoSettings, Registry, choice, settings_class, settings_of
from fedsieve.config.settings import Count, Settings, option


class Plain:
    """Has nothing to set."""


class Counted:
    """Has a number to set."""

    class Settings(Settings):
        number: Count = 3


PARTS = Registry(first="no.such.module:Part")
PARTS["plain"], PARTS["counted"] = Plain, Counted


class Group(Settings):
    part: choice(PARTS) = "first"  # type: ignore[valid-type]


@pytest.mark.parametrize(
    ("given", "name", "settings"),
    [
        ("first", "first", NoSettings()),
        ({"first": {}}, "first", NoSettings()),
        ("plain", "plain", NoSettings()),
        ({"plain": None}, "plain", NoSettings()),
        ("counted", "counted", Counted.Settings()),
        ({"counted": {}}, "counted", Counted.Settings()),
        ({"counted": {"number": 7}}, "counted", Counted.Settings(number=7)),
    ],
)
def test_a_part_is_named_with_or_without_its_settings(given: Any, name: str, settings: BaseModel) -> None:
    group = Group(part=given)
    assert option(group.part) == name and settings_of(group.part) == settings
    dumped = group.model_dump(mode="json")
    assert dumped == {"part": {name: settings.model_dump()} if settings.model_dump() else name}
    assert Group.model_validate(dumped) == group


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("other", ("part",)),
        (3, ("part",)),
        (None, ("part",)),
        ([], ("part",)),
        ({}, ("part",)),
        ({"counted": {"number": 0}}, ("part", "counted", "number")),
        ({"counted": 3}, ("part", "counted")),
        ({"plain": {"number": 3}}, ("part", "plain")),
        ({"plain": {}, "counted": {}}, ("part",)),
    ],
)
def test_whatever_is_wrong_has_its_place(given: Any, place: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as error:
        Group(part=given)
    assert error.value.errors()[0]["loc"] == place


def test_parts_can_be_added_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "mine", Plain)
    assert Group(part="mine").part == "mine" and list(PARTS) == ["first", "plain", "counted", "mine"]
    del PARTS["mine"]
    with pytest.raises(ValidationError):
        Group(part="mine")


def test_a_part_is_imported_when_it_is_used() -> None:
    with pytest.raises(ModuleNotFoundError, match="no"):
        PARTS["first"]
    code = "import sys; from fedsieve.config.experiment_file import load_experiment; load_experiment(sys.argv[1]{}); "
    code += "print('torch' in sys.modules)"
    for more, expected in (("", "False"), (", ['phases.0.aggregate=active']", "True")):
        command = [sys.executable, "-c", code.format(more), "digits-iid"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == expected


def test_default_parts_need_no_settings_and_all_have_a_docstring() -> None:
    """Else an experiment could not be read without importing them."""
    from fedsieve.federate.aggregators import AGGREGATORS
    from fedsieve.federate.local_optimizers import LOCAL_OPTIMIZERS
    from fedsieve.federate.methods import METHODS
    from fedsieve.federate.selection import SELECTIONS
    from fedsieve.federate.server_optimizers import SERVER_OPTIMIZERS

    for registry in (METHODS, AGGREGATORS, SELECTIONS, SERVER_OPTIMIZERS, LOCAL_OPTIMIZERS):
        assert settings_class(registry[registry.default])() is not None  # all of them have defaults
        assert all(part.__doc__ for part in registry.values())
    experiment = load_experiment("digits-iid")
    assert (experiment.phases[0].method, experiment.phases[0].aggregate) == (METHODS.default, AGGREGATORS.default)
    assert experiment.clients.select == SELECTIONS.default
    assert experiment.phases[0].local.optimizer == LOCAL_OPTIMIZERS.default
