"""Reading experiment files: YAML, presets, overrides, and one clear line for whatever is wrong."""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from fedsieve.config import Experiment, Settings
from fedsieve.errors import InputError

Parsed = TypeVar("Parsed", bound=Settings)
Location = tuple[str | int, ...]  # of a value in the file, such as ("phases", 0, "rounds")
LONGEST = 1_000_000  # characters of a file
LONGEST_NUMBER = 100  # characters
MOST = 100_000  # values in it, each counted as often as aliases repeat it


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers: `1e-4` is one, which PyYAML takes for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)$"),
    list("-+.0123456789"),
)


def preset_names() -> list[str]:
    """In the order of a person: nc5 before nc10."""
    folder = resources.files("fedsieve") / "presets"
    names = (entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def preset_text(name: str) -> str:
    return (resources.files("fedsieve") / "presets" / f"{name}.yaml").read_text()


def preset_about(name: str) -> str:
    """What a preset is, in one line."""
    return preset_text(name).splitlines()[0].lstrip("# ")


def report_of(preset: str) -> str | None:
    """The number of the report that a preset repeats an experiment of, such as 003."""
    number = preset.partition("-")[0]
    return number if number.isdecimal() else None


def experiment_name(name_or_file: str) -> str:
    """What to call the runs of it: a preset's name may hold dots, a file's ending is left out."""
    return name_or_file if name_or_file in preset_names() else Path(name_or_file).stem


def load_experiment(name_or_file: str, overrides: Sequence[str] = ()) -> Experiment:
    """A preset's name or a YAML file, with `key=value` overrides, as a checked experiment."""
    if (text := file_text(name_or_file)) is not None:
        return parse_experiment(text, str(Path(name_or_file).expanduser()), overrides)
    if name_or_file not in preset_names():
        own = [name for name in preset_names() if report_of(name) is None]  # those of reports would fill a page
        hint = _nearest(name_or_file, preset_names())
        hint = hint or f"; the presets are {', '.join(own)}, and those of reports that `fedsieve presets` lists"
        raise InputError(f"'{name_or_file}' is neither a file nor a preset{hint}")
    return parse_experiment(preset_text(name_or_file), f"preset {name_or_file}", overrides)


def file_text(name: str | Path) -> str | None:
    """What stands in the file with this name; None if there is no such file."""
    try:
        path = Path(name).expanduser()
        if not path.is_file():
            return None
        if path.stat().st_size > LONGEST:
            raise ValueError(f"it has more than {LONGEST:,} bytes")
        return path.read_text()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"'{_cut(str(name))}' cannot be read as text ({error}); give a YAML file") from None


def parse_experiment(text: str, source: str = "experiment", overrides: Sequence[str] = ()) -> Experiment:
    return parse(Experiment, text, source, overrides)


def parse_kept(text: str, source: str) -> Experiment:
    """An experiment as a run or sweep wrote it down, every default filled in; perhaps by an older version."""
    return parse(Experiment, text, source, translate=_from_older_version)


def _from_older_version(data: dict[str, Any]) -> None:
    """There was no `concentration`, and `alpha` was the total concentration if a Dirichlet split was balanced."""
    match data:
        case {"clients": {"split": {"kind": "dirichlet", "balanced": True, "alpha": alpha} as split}}:
            if "concentration" not in split:
                split["alpha"], split["concentration"] = None, alpha


def parse(
    kind: type[Parsed],
    text: str,
    source: str,
    overrides: Sequence[str] = (),
    translate: Callable[[dict[str, Any]], None] = lambda data: None,
) -> Parsed:
    """YAML text as checked settings of some kind; what is wrong with it is told with its line."""
    places: dict[Location, str] = {}
    data = _read_yaml(text, source, places)
    translate(data)
    for override in overrides:
        _apply(data, override, places)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise InputError(_explain(error, data, places)) from None


def _read_yaml(text: str, source: str, places: dict[Location, str]) -> dict[str, Any]:
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
    except ValueError as error:  # of a number or a date that there is not, such as 2026-13-32
        raise InputError(f"{source}: this is not YAML ({error})") from None
    except RecursionError:
        raise InputError(f"{source} refers to itself or is nested too deeply; write it out plainly") from None


def _value(loader: yaml.SafeLoader, node: yaml.Node, path: Location, source: str, places: dict[Location, str]) -> Any:
    """A YAML node's value; notes on the way the line at which each key stands."""
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
        raise InputError(f"{place}: {_cut(ascii(node.value))} is no valid {kind}; {hint}") from None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _note(places: dict[Location, str], path: Location, place: str) -> None:
    """Write down where a value stands; so many that only aliases of aliases can make them are refused."""
    if len(places) >= MOST:
        raise InputError(f"{place}: there are more than {MOST:,} values, counting those that aliases repeat")
    places[path] = place


def _apply(data: dict[str, Any], override: str, places: dict[Location, str]) -> None:
    """Set one dotted key, such as `phases.0.rounds=5`; the value is YAML."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise InputError(f"'{_cut(override)}' is no override; write key=value, such as clients.count=20")
    place = f"override '{_cut(override)}'"
    value = parse_value(text, place)
    *parents, last = key.strip().split(".")
    holder: Any = data
    path: Location = ()
    for part in parents:
        index = _index(holder, part, override)
        path = (*path, index)
        if isinstance(holder, dict) and not isinstance(holder.get(part), dict | list):
            holder[part] = {}
        holder = holder[index]
    index = _index(holder, last, override)
    path = (*path, index)
    for old in [old for old in places if old[: len(path)] == path]:
        del places[old]
    holder[index] = value
    places[path] = place


def parse_value(text: str, source: str) -> Any:
    """What stands behind `key=`, as YAML."""
    return _read_yaml(f"value: {text}", source, {})["value"]


def _index(holder: Any, part: str, override: str) -> str | int:
    if isinstance(holder, dict):
        return part
    if not isinstance(holder, list):
        raise InputError(
            f"'{_cut(override)}': there is nothing to set '{_cut(part)}' in; give the group it belongs to first"
        )
    if not part.isdecimal() or int(part) >= len(holder):
        raise InputError(f"'{_cut(override)}': there is no entry {_cut(part)} in the list; use 0 to {len(holder) - 1}")
    return int(part)


def _nearest(word: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


KINDS = {"int": "whole number", "float": "number", "bool": "true or false", "timestamp": "date"}  # by YAML's tags
EXPECTED = {
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "string_type": "expected text",
    "bool_type": "expected true or false",
    "tuple_type": "expected a list",
    "too_short": "expected at least one entry",
    "too_long": "there are too many entries",
    "model_type": "expected a group of settings (key: value)",
    "model_attributes_type": "expected a group of settings (key: value)",
    "dict_type": "expected a group of settings (key: value)",
}


def _explain(error: ValidationError, data: Any, places: dict[Location, str]) -> str:
    """The first problem as one line: place, key, what is wrong, what would be right."""
    problem = min(error.errors(), key=lambda one: one["type"] != "unknown_key")
    path: Location = ()
    value = data
    for part in problem["loc"]:  # it also names variants of a choice, which are no keys of the file: skip those
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            continue
        path = (*path, part)
    context = problem.get("ctx", {})
    kind = problem["type"]
    key = ".".join(map(str, path))
    if kind == "unknown_key":
        name, valid = context["key"], context["valid"]
        path = (*path, name)
        hint = _nearest(name, valid) or f"; the keys there are {', '.join(valid)}"
        text = f"unknown key '{_cut(name)}' {f'in {key}' if key else 'at the top level'}{hint}"
    elif kind == "missing":
        text = f"{key or 'the experiment'} needs a value for '{problem['loc'][-1]}'"
    elif kind in ("literal_error", "union_tag_invalid", "union_tag_not_found"):
        expected = context.get("expected") or context.get("expected_tags") or "kind: iid, classes, dirichlet or flwr"
        shown = context.get("tag", value)
        valid = re.findall(r"'([^']+)'", expected) or [expected]
        text = f"{key} is {_cut(repr(shown))}; use {' or '.join(valid)}{_nearest(str(shown), valid)}"
    elif kind == "value_error":
        text = f"{key}: {context['error']}" if key else str(context["error"])
    else:
        message = EXPECTED.get(kind) or problem["msg"].replace("Input should", "it should")
        text = f"{key} is {_short(value)}; {message}"
    while path and path not in places:
        path = path[:-1]
    return f"{places[path]}: {text}" if path else text


def _short(value: Any) -> str:
    return _cut(json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
