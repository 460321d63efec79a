"""Reading experiment files: YAML, presets, overrides, and a clear message of one line for each error."""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from importlib import resources
from pathlib import Path, PurePath
from typing import Any, TypeVar

from pydantic import ValidationError

from fedsieve.config.model_settings import GIVEN
from fedsieve.config.plugins import are_active
from fedsieve.config.registry import unknown_parts_accepted
from fedsieve.config.resolve import absolute
from fedsieve.config.schema import Experiment
from fedsieve.config.settings import Settings
from fedsieve.config.yaml_text import LONGEST, Location, cut, read_yaml
from fedsieve.errors import InputError

Parsed = TypeVar("Parsed", bound=Settings)
SWEEP_KEYS = {"experiment", "arms", "search"}  # that only sweep files have
RENAMED = {
    "clients.combine": "; it is now a phase's: phases.*.aggregate (mean or active) or phases.*.method (fisher_mixing)"
}
PLACES = ("data.path", "model.backbone", "device")  # what may differ when a finished run is used again


def preset_names() -> list[str]:
    """In natural order: nc5 before nc10."""
    folder = resources.files("fedsieve") / "presets"
    names = (entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def preset_text(name: str) -> str:
    return (resources.files("fedsieve") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")


def preset_about(name: str) -> str:
    """What a preset is, in one line."""
    return preset_text(name).splitlines()[0].lstrip("# ")


def report_of(preset: str) -> str | None:
    """The number of the report whose experiment a preset repeats, such as 003."""
    number = preset.partition("-")[0]
    return number if number.isdecimal() else None


def experiment_name(name_or_file: str) -> str:
    """The name for its runs: the preset's name, which may contain dots, or the file's name without its ending."""
    return name_or_file if name_or_file in preset_names() else Path(name_or_file).stem


def load_experiment(name_or_file: str, overrides: Sequence[str] = (), plugins: Sequence[str | Path] = ()) -> Experiment:
    """A preset's name or a YAML file, with `key=value` overrides and more `plugins`, as a checked experiment.

    No plugin is executed: names of parts that are unknown because plugins are not loaded are checked by `run`.
    """
    if (text := file_text(name_or_file)) is not None:
        path = Path(name_or_file).expanduser()
        is_of_a_run = path.name == "experiment.yaml" and (path.parent / "metrics.jsonl").exists()
        translate = _from_older_version if is_of_a_run else _as_it_is
        return parse(Experiment, text, str(path), overrides, translate, partial(_find_plugins, path.parent, plugins))
    if name_or_file not in preset_names():
        if (resources.files("fedsieve") / "presets" / "sweeps" / f"{name_or_file}.yaml").is_file():
            raise InputError(f"'{name_or_file}' is a sweep, not an experiment; use `fedsieve sweep {name_or_file}`")
        own = [name for name in preset_names() if report_of(name) is None]  # those of reports would fill a page
        hint = nearest(name_or_file, [*files_beside(name_or_file), *preset_names()])
        hint = hint or f"; the presets are {', '.join(own)}, and those of reports that `fedsieve presets` lists"
        raise InputError(f"'{name_or_file}' is neither a file nor a preset{hint}")
    find = partial(_find_plugins, Path(), plugins)
    return parse(Experiment, preset_text(name_or_file), f"preset {name_or_file}", overrides, finish=find)


def file_text(name: str | Path) -> str | None:
    """The text of the file with this name; None if there is no such file."""
    try:
        path = Path(name).expanduser()
        if not path.is_file():
            return None
        if path.stat().st_size > LONGEST:
            raise ValueError(f"it has more than {LONGEST:,} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"'{cut(str(name))}' cannot be read as text ({error}); give a YAML file") from None


def parse_experiment(text: str, source: str = "experiment", overrides: Sequence[str] = ()) -> Experiment:
    return parse(Experiment, text, source, overrides)


def parse_kept(text: str, source: str, overrides: Sequence[str] = ()) -> Experiment:
    """An experiment as a run or sweep saved it, with every default filled in, perhaps by an older version."""
    return parse(Experiment, text, source, overrides, _from_older_version)


def elsewhere(experiment: Experiment, overrides: Sequence[str]) -> Experiment:
    """The experiment of a run whose data or backbone has moved, or on another device; nothing else may change."""
    for override in overrides:
        if (key := override.partition("=")[0].strip()) not in PLACES:
            raise InputError(f"'{cut(key)}' cannot be changed for a finished run; use {', '.join(PLACES)}")
    return parse_experiment(experiment.to_yaml(), "the run's experiment", overrides) if overrides else experiment


def _find_plugins(folder: Path, more: Sequence[str | Path], data: dict[str, Any]) -> None:
    """Make the paths of plugins absolute: they are relative to the experiment's folder, and `more` to this one."""
    listed = data.get("plugins")
    listed = [listed] if isinstance(listed, str) else [] if listed is None else listed
    if (listed or more) and isinstance(listed, list) and all(isinstance(path, str) for path in listed):
        data["plugins"] = all_paths([path if path.startswith("~") else folder / path for path in listed], more)


def _find_plugins_from_here(data: dict[str, Any]) -> None:
    _find_plugins(Path(), (), data)


def all_paths(*several: Iterable[str | Path]) -> list[str]:
    """Absolute paths, each once."""
    return list(dict.fromkeys(absolute(str(path)) or "" for paths in several for path in paths))


def _as_it_is(data: dict[str, Any]) -> None:
    """Translate nothing."""


def _from_older_version(data: dict[str, Any]) -> None:
    """Translate keys of older versions. In other files they are errors that name the new keys (`RENAMED`)."""
    match data:  # `alpha` was the total concentration if a Dirichlet split was balanced
        case {"clients": {"split": {"kind": "dirichlet", "balanced": True, "alpha": alpha} as split}}:
            if "concentration" not in split:
                split["alpha"], split["concentration"] = None, alpha
    match data:  # `combine` was for all phases, and took a method or an aggregator
        case {"clients": {"combine": combine} as clients}:
            del clients["combine"]
            aggregators = {"all": "mean", "active": "active"}
            is_aggregator = isinstance(combine, str) and combine in aggregators
            key, value = ("aggregate", aggregators[combine]) if is_aggregator else ("method", combine)
            phases = data.get("phases")
            for phase in phases if isinstance(phases, list) else ():
                if isinstance(phase, dict):
                    phase[key] = deepcopy(value)


def parse(
    kind: type[Parsed],
    text: str,
    source: str,
    overrides: Sequence[str] = (),
    translate: Callable[[dict[str, Any]], None] = _as_it_is,
    finish: Callable[[dict[str, Any]], None] = _find_plugins_from_here,
) -> Parsed:
    """YAML text as checked settings of some kind; errors name their line.

    `translate` may change the settings before the overrides, `finish` after them.
    """
    places: dict[Location, str] = {}
    data = read_yaml(text, source, places)
    if kind is Experiment and data.keys() & SWEEP_KEYS:
        raise InputError(f"{source} is a sweep file, not an experiment; use `fedsieve sweep {source}`")
    translate(data)
    for override in overrides:
        _apply(data, override, places)
    finish(data)
    return validated(kind, data, places)


def validated(kind: type[Parsed], data: dict[str, Any], places: Mapping[Location, str] | None = None) -> Parsed:
    """Settings as a checked model; `places` says where their keys were read.

    Parts of plugins that are listed but not loaded are kept as they are.
    """
    plugins = data.get("plugins") if kind is Experiment else None
    listed = [path for path in plugins if isinstance(path, str)] if isinstance(plugins, list) else []
    try:
        with nullcontext() if are_active(listed) else unknown_parts_accepted():
            return kind.model_validate(data)
    except ValidationError as error:
        raise InputError(_explain(error, data, places or {})) from None


def experiment_of(given: Any, plugins: Sequence[str | Path] = ()) -> Experiment:
    """The experiment that a caller from Python names or describes: a preset's name, a file, a dict, an Experiment."""
    if isinstance(given, str | PurePath):
        return load_experiment(str(given), plugins=plugins)
    if isinstance(given, Experiment):
        given = given.model_dump(mode="json", warnings=False)  # checked again: `model_copy` accepts anything
    if not isinstance(given, Mapping):
        kinds = "a preset's name, a YAML file, a dict or an Experiment"
        raise InputError(f"the experiment is of type {type(given).__name__}; give {kinds}")
    try:
        data = _plain(given)
    except RecursionError:
        raise InputError("the experiment is nested too deeply, or contains itself; give a plain dict") from None
    if data.keys() & SWEEP_KEYS:
        raise InputError("this dict describes a sweep, not an experiment; use `fedsieve sweep` with a file")
    _find_plugins(Path(), plugins, data)
    return validated(Experiment, data)


def _plain(value: Any) -> Any:
    """As YAML would give it: dicts, lists, text and Python's own numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    is_of_numpy = type(value).__module__ == "numpy" and not getattr(value, "ndim", 1)
    return value.item() if is_of_numpy else value


def _apply(data: dict[str, Any], override: str, places: dict[Location, str]) -> None:
    """Set one dotted key: `phases.0.rounds=5`, `phases.head.rounds=5` or `phases.*.rounds=5`. The value is YAML."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise InputError(f"'{cut(override)}' is no override; write key=value, such as clients.count=20")
    value = parse_value(text, f"override '{cut(override)}'")
    _set(data, (), key.strip().split("."), value, override, places)


def _set(holder: Any, at: Location, parts: list[str], value: Any, override: str, places: dict[Location, str]) -> None:
    """Set the key with these parts in `holder`, which stands at `at`; `*` is every entry of a list."""
    part, *rest = parts
    if part == "*" and isinstance(holder, list):
        for place in range(len(holder)):
            _set(holder, at, [str(place), *rest], deepcopy(value), override, places)
        return
    index = _index(holder, part, override)
    path = (*at, index)
    if rest:
        if isinstance(holder, dict) and not isinstance(holder.get(part), dict | list):
            holder[part] = {}
            places[path] = f"override '{cut(override)}'"
        _set(holder[index], path, rest, value, override, places)
        return
    for old in [old for old in places if old[: len(path)] == path]:
        del places[old]
    holder[index] = value
    places[path] = f"override '{cut(override)}'"


def parse_value(text: str, source: str) -> Any:
    """The value after `key=`, as YAML."""
    return read_yaml(f"value: {text}", source, {})["value"]


def _index(holder: Any, part: str, override: str) -> str | int:
    if isinstance(holder, dict):
        return part
    if not isinstance(holder, list):
        raise InputError(
            f"'{cut(override)}': there is nothing to set '{cut(part)}' in; give the group it belongs to first"
        )
    if part.isdecimal() and int(part) < len(holder):
        return int(part)
    names = [entry.get("name") for entry in holder if isinstance(entry, dict)]
    if part in names:
        return names.index(part)
    known = ", or a name: " + ", ".join(map(str, names)) if any(names) else ""
    wrong = f"'{cut(override)}': there is no entry {cut(part)} in the list"
    raise InputError(f"{wrong}; use 0 to {len(holder) - 1}{known}")


def files_beside(name: str) -> list[str]:
    """The YAML files in the folder where a file of this name would be."""
    folder = Path(name).expanduser().parent
    return sorted(str(folder / file.name) for file in folder.glob("*.y*ml")) if folder.is_dir() else []


def nearest(word: str, valid: Iterable[str]) -> str:
    """A hint with the closest valid word, if one is close."""
    close = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


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


def _explain(error: ValidationError, data: Any, places: Mapping[Location, str]) -> str:
    """The first problem as one line: place, key, what is wrong, what would be right."""
    problem = min(error.errors(), key=lambda one: one["type"] != "unknown_key")
    path: Location = ()
    value = data
    for part in problem["loc"]:  # it also names variants of a choice, which are no keys of the file: skip those
        if isinstance(value, str):  # one word that stands for a list or a group
            break
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
        hint = RENAMED.get(f"{key}.{name}") or nearest(name, valid) or f"; the keys there are {', '.join(valid)}"
        hint = hint if valid else "; there is nothing to set"
        text = f"unknown key '{cut(name)}' {f'in {key}' if key else 'at the top level'}{hint}"
    elif kind == "missing":
        text = f"{key or 'the experiment'} needs a value for '{problem['loc'][-1]}'"
    elif kind in ("literal_error", "union_tag_invalid", "union_tag_not_found"):
        expected = context.get("expected") or context.get("expected_tags") or "kind: iid, classes, dirichlet or flwr"
        shown = context.get("tag", value)
        valid = [one for one in re.findall(r"'([^']+)'", expected) or [expected] if one != GIVEN]  # that is no choice
        hint = nearest(str(shown), valid)
        if not hint and context.get("is_part") and isinstance(data, dict) and not data.get("plugins"):
            hint = ", or name the plugin that has it (plugins: or --plugin)"
        text = f"{key} is {cut(repr(shown))}; use {' or '.join(valid)}{hint}"
    elif kind == "value_error":
        text = f"{key}: {context['error']}" if key else str(context["error"])
    else:
        message = EXPECTED.get(kind) or problem["msg"].replace("Input should", "it should")
        text = f"{key} is {_short(value)}; {message}"
    while path and path not in places:
        path = path[:-1]
    return f"{places[path]}: {text}" if path else text


def _short(value: Any) -> str:
    return cut(json.dumps(value, default=repr))
