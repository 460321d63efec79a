"""YAML text to plain values, each with its line; errors are reported in one line."""

import re
from typing import Any

import yaml

from fedsieve.errors import InputError

Location = tuple[str | int, ...]  # of a value in the file, such as ("phases", 0, "rounds")
LONGEST = 1_000_000  # characters of a file
LONGEST_NUMBER = 100  # characters
MOST = 100_000  # values in it, each counted as often as aliases repeat it
KINDS = {"int": "whole number", "float": "number", "bool": "true or false", "timestamp": "date"}  # by YAML's tags


class _Loader(yaml.SafeLoader):
    """Reads numbers as in YAML 1.2: `1e-4` is one, which PyYAML takes for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)$"),
    list("-+.0123456789"),
)


def read_yaml(text: str, source: str, places: dict[Location, str]) -> dict[str, Any]:
    """The settings in a YAML text; the line of each is recorded in `places`."""
    if len(text) > LONGEST:
        raise InputError(f"{source} has {len(text):,} characters; use at most {LONGEST:,}")
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise InputError(f"{source} holds no settings; expected lines such as 'seed: 42'")
        return _value(loader, root, (), source, places)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputError(f"{source}{line}: this is not YAML ({reason})") from None
    except RecursionError:
        raise InputError(f"{source} refers to itself or is nested too deeply; write it out plainly") from None


def _value(loader: yaml.SafeLoader, node: yaml.Node, path: Location, source: str, places: dict[Location, str]) -> Any:
    """A YAML node's value; records the line of each key in `places`."""
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = f"{source}, line {key_node.start_mark.line + 1}"
            key = str(_scalar(loader, key_node, place))
            if key in result:
                raise InputError(f"{place}: '{key}' is given twice; keep one of them")
            _note(places, (*path, key), place)
            result[key] = _value(loader, value_node, (*path, key), source, places)
        return result
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            _note(places, (*path, index), f"{source}, line {item.start_mark.line + 1}")
            items.append(_value(loader, item, (*path, index), source, places))
        return items
    return _scalar(loader, node, places.get(path, source))


def _scalar(loader: yaml.SafeLoader, node: yaml.Node, place: str) -> str | int | float | bool | None:
    if not isinstance(node, yaml.ScalarNode):
        raise InputError(f"{place}: a key is a list or a group; expected one word")
    kind = KINDS.get(node.tag.rpartition(":")[2], "text")
    try:
        if kind != "text" and len(node.value) > LONGEST_NUMBER:
            raise ValueError
        value = loader.construct_object(node)
        str(value).encode()  # half of a surrogate pair, "\\ud800", is no text
    except (ValueError, LookupError, AttributeError):  # PyYAML on `!!int ''`, `!!bool abc` and `!!timestamp abc`
        hint = "use characters that UTF-8 has" if kind == "text" else "put it in quotes if it is text"
        raise InputError(f"{place}: {cut(ascii(node.value))} is no valid {kind}; {hint}") from None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _note(places: dict[Location, str], path: Location, place: str) -> None:
    """Record the line of a value; InputError if there are so many that only aliases of aliases can make them."""
    if len(places) >= MOST:
        raise InputError(f"{place}: there are more than {MOST:,} values, counting those that aliases repeat")
    places[path] = place


def cut(text: str) -> str:
    """The text, shortened to fit into a message."""
    return text if len(text) <= 60 else text[:57] + "..."
