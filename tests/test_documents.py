"""What documents say about experiments: every key that they name exists."""

import re
from collections.abc import Iterator
from importlib import import_module
from inspect import getsourcelines
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import create_model
from pydantic.fields import FieldInfo

from fedsieve.analysis.sweep.sweep_file import Sweep
from fedsieve.config.registry import Registry, settings_class
from fedsieve.config.schema import Experiment
from fedsieve.config.settings import Settings
from fedsieve.federate.round import Server

ROOT = Path(__file__).parents[1]
PATHS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = {path.name: path.read_text(encoding="utf-8") for path in PATHS}
PLACEHOLDERS = {"key", "KEY"}  # as in key=value
MISSPELT = {"clients.cuont"}  # on purpose: the README shows what becomes of it
FENCED = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
SETTING = re.compile(r"([a-z_]+(?:\.[a-z_0-9*]+)*)(?:: \S.*|=\S.*)")  # `key: value` or `dotted.key=value`
DOTTED = re.compile(r"[a-z_]+(?:\.[a-z_0-9*]+)+")


def parts_of(annotation: Any) -> Iterator[type[Settings] | Registry]:
    """The groups of settings and the registries that a type mentions."""
    if isinstance(annotation, Registry) or (isinstance(annotation, type) and issubclass(annotation, Settings)):
        yield annotation
    for inner in (*get_args(annotation), *getattr(annotation, "__metadata__", ())):
        yield from parts_of(inner)


def behind(field: FieldInfo) -> list[type[Settings]]:
    """The groups of settings that may stand behind a key: of a slot, one with a key for each of its parts."""
    groups: list[type[Settings]] = []
    for part in [*parts_of(field.annotation), *(one for data in field.metadata for one in parts_of(data))]:
        if isinstance(part, Registry):
            fields: Any = {name: (settings_class(part[name]), ...) for name in part}
            part = create_model("Parts", __base__=Settings, **fields)
        groups.append(part)
    return groups


def exists(path: list[str], groups: list[type[Settings]]) -> bool:
    """Whether a dotted key is one of these groups; entries of a list have a number, a name or a `*`."""
    fields = [group.model_fields[path[0]] for group in groups if path[0] in group.model_fields]
    if not fields or len(path) == 1:
        return bool(fields)
    inner = [group for field in fields for group in behind(field)]
    rest = path[2:] if path[0] == "phases" else path[1:]
    return exists(rest, inner) if rest else True


def all_groups(group: type[Settings], known: set[Any] | None = None) -> set[type[Settings]]:
    known = set() if known is None else known
    if group not in known:
        known.add(group)
        for field in group.model_fields.values():
            for inner in behind(field):
                all_groups(inner, known)
    return known


GROUPS = sorted(all_groups(Experiment) | {Sweep}, key=lambda group: group.__name__)


def keys_in(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """All keys of nested settings."""
    if isinstance(value, list):
        for number, inner in enumerate(value):
            yield from keys_in(inner, (*path, str(number)))
    elif isinstance(value, dict):
        for key, inner in value.items():
            here = (*path, *str(key).split("."))
            yield here
            yield from keys_in(inner, here)


def named_keys(text: str) -> Iterator[tuple[list[str], list[type[Settings]]]]:
    """Each key that a document names, and the groups that it may be a key of."""
    for language, block in FENCED.findall(text):
        if language == "yaml":
            data = yaml.safe_load(block)
            if data.keys() & {"experiment", "arms", "search"}:
                yield from (([key], [Sweep]) for key in data)
                yield from ((list(key), [Experiment]) for key in keys_in(data.get("set")))
                varied = {**data.get("arms", {}), **data.get("search", {})}
                yield from ((key.split("."), [Experiment]) for several in varied for key in several.split(", "))
            else:
                top = [Experiment] if data.keys() & Experiment.model_fields.keys() else GROUPS
                yield from ((list(key), top) for key in keys_in(data))
        else:
            for line in re.findall(r"fedsieve (?:run|show|mask|split|evaluate) .*", block):
                for word in line.partition(" #")[0].split():
                    if re.match(r"[a-z_0-9.*]+=", word):
                        yield word.partition("=")[0].split("."), [Experiment]
    for code in re.findall(r"`([^`\n]+)`", FENCED.sub("", text)):
        match = SETTING.fullmatch(code)
        if match is not None and match[1] not in PLACEHOLDERS:
            key = match[1].split(".")
            yield key, [Experiment] if key[0] in Experiment.model_fields and len(key) > 1 else GROUPS
        elif DOTTED.fullmatch(code) and code.partition(".")[0] in Experiment.model_fields and not is_file(code):
            yield code.split("."), [Experiment]


def is_file(name: str) -> bool:
    return name.rpartition(".")[2] in {"py", "md", "yaml", "json", "jsonl", "safetensors", "png"}


def unknown_in(text: str) -> list[str]:
    unknown = [".".join(key) for key, groups in named_keys(text) if not exists(key, groups)]
    return [key for key in unknown if key not in MISSPELT]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_key_that_a_document_names_exists(name: str) -> None:
    assert unknown_in(DOCUMENTS[name]) == []


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("`clients.combine: all`", ["clients.combine"]),
        ("`combine: all`", ["combine"]),
        ("`phases.*.local.lr=0.1` and `phases.0.local.rate=0.1`", ["phases.0.local.rate"]),
        ("```yaml\nclients: {count: 3, combine: all}\n```", ["clients.combine"]),
        ("```yaml\nphases: [{method: {fisher_mixing: {dtp: 1}}}]\n```", ["phases.0.method.fisher_mixing.dtp"]),
        ("```yaml\nmask: {sparsity: 0.9, unt: row}\n```", ["mask.unt"]),
        ("```yaml\nexperiment: a\nset: {phases.0.round: 3}\n```", ["phases.0.round"]),
        ("```\n$ fedsieve run a.yaml clients.number=3 --out b\n```", ["clients.number"]),
        ("`clients.counts`, `model.safetensors`, `torch.autocast`", ["clients.counts"]),
    ],
)
def test_a_key_that_does_not_exist_is_found(text: str, unknown: list[str]) -> None:
    assert unknown_in(text) == unknown


def test_the_reference_names_every_key_of_an_experiment() -> None:
    blocks = [
        yaml.safe_load(block) for language, block in FENCED.findall(DOCUMENTS["experiments.md"]) if language == "yaml"
    ]
    named = {key for block in blocks for key in keys_in(block)}
    words = {word for key in named for word in key}
    for group in (Experiment, *(inner for field in Experiment.model_fields.values() for inner in behind(field))):
        if not group.__name__.endswith("Split"):  # they have a table
            assert set(group.model_fields) <= words


WALK = re.compile(r"^\| \d+ \| `([\w.]+)` \| `([\w/]+)\.py` \|", re.MULTILINE)


def test_the_walk_through_a_round_names_functions_that_exist() -> None:
    walk = WALK.findall(DOCUMENTS["architecture.md"])
    assert len(walk) == 24
    for function, file in walk:
        found: Any = import_module(f"fedsieve.{file.replace('/', '.')}")
        for part in function.split("."):
            found = getattr(found, part)
        assert callable(found)


def test_the_round_is_on_one_page() -> None:
    lines, _ = getsourcelines(Server.round)
    assert len(lines) <= 80


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_and_modules_that_a_document_names_exist(name: str) -> None:
    for path in re.findall(r"(?<![\w/.-])((?:\w+/)+\w+\.(?:py|sh))\b", DOCUMENTS[name]):
        assert (ROOT / path).exists() or (ROOT / "src" / "fedsieve" / path).exists(), path
    for dotted in re.findall(r"`fedsieve\.([\w.]+)", DOCUMENTS[name]):
        module, _, attribute = f"fedsieve.{dotted}".rpartition(".")
        if dotted != "id":  # a tag of MLflow's
            found = import_module(module)
            assert hasattr(found, attribute) or import_module(f"{module}.{attribute}"), dotted
