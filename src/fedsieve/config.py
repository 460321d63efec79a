"""What an experiment file may say, and its errors.

An experiment is YAML read into frozen models. Whatever is wrong in it is told in one line, with the
key, its place in the file and what would be right.
"""

import difflib
import json
import os
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedsieve.errors import InputError


class Settings(BaseModel):
    """A part of an experiment: unchangeable, strict about types, and helpful about misspelt keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, value: Any) -> Any:
        if isinstance(value, dict) and cls.model_config.get("extra") == "forbid":
            for key in value:
                if key not in cls.model_fields:
                    raise PydanticCustomError("unknown_key", "", {"key": str(key), "valid": list(cls.model_fields)})
        return value


FromList = Field(strict=False)  # YAML knows lists, frozen models hold tuples


def _option(value: Any) -> str:
    """Which variant is meant by `linear`, `{mlp: {hidden: 512}}` or a model made from it."""
    if isinstance(value, dict):
        return str(next(iter(value), ""))
    return next(iter(type(value).model_fields)) if isinstance(value, BaseModel) else str(value)


# ---------------------------------------------------------------------------------------------- data


class CropSettings(Settings):
    scale: Annotated[tuple[float, float], FromList] = (0.5, 1.0)

    @field_validator("scale")
    @classmethod
    def _is_a_range(cls, scale: tuple[float, float]) -> tuple[float, float]:
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError("use two shares of the image's area, such as [0.5, 1.0]")
        return scale


class RandomResizedCrop(Settings):
    random_resized_crop: CropSettings


class CenterCropSettings(Settings):
    resize: int = Field(256, ge=1)


class ResizeCenterCrop(Settings):
    resize_center_crop: CenterCropSettings


Augmentation = Annotated[
    Annotated[Literal["horizontal_flip"], Tag("horizontal_flip")]
    | Annotated[RandomResizedCrop, Tag("random_resized_crop")],
    Discriminator(_option),
]
EvaluateCrop = Annotated[
    Annotated[Literal["resize"], Tag("resize")] | Annotated[ResizeCenterCrop, Tag("resize_center_crop")],
    Discriminator(_option),
]


class DataSettings(Settings):
    name: Literal["cifar100", "digits", "folder", "npz"] = "digits"
    path: str | None = None
    image_size: int | None = Field(None, ge=1)  # None: 32 for pico, 64 for any other backbone
    validation: float = Field(0.2, ge=0, lt=1)
    augment: Annotated[tuple[Augmentation, ...], FromList] = ()
    evaluate_crop: EvaluateCrop = "resize"
    normalize: Literal["dataset", "imagenet", "cifar100"] = "dataset"


# --------------------------------------------------------------------------------------------- model


class MlpSettings(Settings):
    hidden: int = Field(512, ge=1)


class MlpHead(Settings):
    mlp: MlpSettings


class RidgeSettings(Settings):
    penalty: float = Field(1000.0, gt=0)


class RidgeHead(Settings):
    ridge: RidgeSettings


Head = Annotated[
    Annotated[Literal["linear"], Tag("linear")] | Annotated[MlpHead, Tag("mlp")] | Annotated[RidgeHead, Tag("ridge")],
    Discriminator(_option),
]


class ModelSettings(Settings):
    backbone: str = "pico"
    head: Head = "linear"
    init: str | None = None


# ------------------------------------------------------------------------------------------- clients


class IidSplit(Settings):
    kind: Literal["iid"] = "iid"


class ClassesSplit(Settings):
    kind: Literal["classes"]
    per_client: int = Field(ge=1)
    assign: Literal["even", "random"] = "even"
    per_class_limit: int | None = Field(None, ge=1)


class DirichletSplit(Settings):
    kind: Literal["dirichlet"]
    alpha: float = Field(gt=0)
    balanced: bool = True
    per_client: int | None = Field(None, ge=1)


class FlwrSplit(Settings):
    """Any partitioner of flwr-datasets; the keys that are not listed here are its own arguments."""

    model_config = ConfigDict(extra="allow")
    kind: Literal["flwr"]
    partitioner: str


def _split_by_name(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


SplitSettings = Annotated[
    Annotated[IidSplit | ClassesSplit | DirichletSplit | FlwrSplit, Field(discriminator="kind")],
    BeforeValidator(_split_by_name),
]


class ClientSettings(Settings):
    count: int = Field(1, ge=1)
    fraction: float = Field(1.0, gt=0, le=1)
    split: SplitSettings = IidSplit()
    weighting: Literal["samples", "equal"] = "samples"

    @property
    def per_round(self) -> int:
        return max(1, round(self.fraction * self.count))


# -------------------------------------------------------------------------------------------- phases


class LocalSettings(Settings):
    """One client's training in one round: SGD as in torch.optim.SGD."""

    epochs: int | None = Field(None, ge=1)
    steps: int | None = Field(None, ge=1)
    batch_size: int = Field(64, ge=1)
    lr: float = Field(ge=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(1e-4, ge=0)
    nesterov: bool = False
    schedule: Literal["cosine", "constant", "linear"] = "cosine"
    clip_norm: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _is_consistent(self) -> "LocalSettings":
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give epochs or steps, exactly one of them")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class BlocksScope(Settings):
    blocks: Annotated[tuple[int, ...], FromList] = Field(min_length=1)
    head: bool = False


Train = Annotated[
    Annotated[Literal["head", "backbone", "all"], Tag("part")] | Annotated[BlocksScope, Tag("scope")],
    Discriminator(lambda value: "scope" if isinstance(value, dict | BlocksScope) else "part"),
]


class PhaseSettings(Settings):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    train: Train
    rounds: int = Field(ge=1)
    local: LocalSettings
    optimizer_state: Literal["reset", "carry"] | None = None  # None: carry with one client, else reset


# ---------------------------------------------------------------------------------------- experiment


class EvaluateSettings(Settings):
    every: int = Field(1, ge=1)
    sample: int | None = Field(None, ge=1)
    test: Literal["end", "each", "never"] = "end"
    keep: Literal["last", "best"] = "last"


class Experiment(Settings):
    """The whole file."""

    seed: int = Field(42, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | Literal["auto"] = "auto"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    clients: ClientSettings = ClientSettings()
    phases: Annotated[tuple[PhaseSettings, ...], FromList] = ()
    evaluate: EvaluateSettings = EvaluateSettings()

    @field_validator("threads", mode="before")
    @classmethod
    def _is_a_number_of_threads(cls, threads: Any) -> Any:
        if threads != "auto" and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ValueError("use auto or a whole number of at least 1")
        return threads

    @model_validator(mode="after")
    def _is_consistent(self) -> "Experiment":
        names = [phase.name for phase in self.phases]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two phases are called '{repeated[0]}'; give each its own name")
        if not self.phases and not isinstance(self.model.head, RidgeHead):
            raise ValueError("there is nothing to do: give at least one phase, or a ridge head")
        if "ridge" in names and isinstance(self.model.head, RidgeHead):
            raise ValueError("a ridge head is solved in a phase called 'ridge'; give yours another name")
        if self.evaluate.keep == "best" and self.data.validation == 0:
            raise ValueError("evaluate.keep: best needs validation data; set data.validation above 0")
        if self.data.name in ("folder", "npz") and self.data.path is None:
            raise ValueError(f"data.name: {self.data.name} needs data.path, the place where the images lie")
        return self

    def resolved(self) -> "Experiment":
        """The same experiment with every `auto` and every open default settled."""
        device = self.device
        if device != "cpu":
            import torch

            found = torch.cuda.is_available()
            if device == "cuda" and not found:
                raise InputError("device: cuda is asked for, but torch finds no CUDA device; use cpu or auto")
            device = "cuda" if found else "cpu"
        size = self.data.image_size or (32 if self.model.backbone == "pico" else 64)
        data = self.data.model_copy(update={"image_size": size, "path": _absolute(self.data.path)})
        backbone = self.model.backbone
        if Path(backbone).expanduser().exists() and backbone != "pico":
            backbone = _absolute(backbone) or backbone
        model = self.model.model_copy(update={"backbone": backbone, "init": _absolute(self.model.init)})
        state = "carry" if self.clients.count == 1 else "reset"
        phases = tuple(
            phase.model_copy(update={"optimizer_state": phase.optimizer_state or state}) for phase in self.phases
        )
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.model_copy(
            update={
                "device": device,
                "threads": threads if self.threads == "auto" else self.threads,
                "data": data,
                "model": model,
                "phases": phases,
            }
        )

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=110)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().resolve())


# ------------------------------------------------------------------------------------- reading files

Location = tuple[str | int, ...]  # of a value in the file, such as ("phases", 0, "rounds")


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers: `1e-4` is one, which PyYAML takes for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)$"),
    list("-+.0123456789"),
)


def preset_names() -> list[str]:
    folder = resources.files("fedsieve") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def preset_text(name: str) -> str:
    return (resources.files("fedsieve") / "presets" / f"{name}.yaml").read_text()


def load_experiment(name_or_file: str, overrides: Sequence[str] = ()) -> Experiment:
    """A preset's name or a YAML file, with `key=value` overrides, as a checked experiment."""
    path = Path(name_or_file).expanduser()
    if path.is_file():
        try:
            text, source = path.read_text(), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read as text ({error}); give a YAML file") from None
    elif name_or_file in preset_names():
        text, source = preset_text(name_or_file), f"preset {name_or_file}"
    else:
        hint = _nearest(name_or_file, preset_names()) or f"; the presets are {', '.join(preset_names())}"
        raise InputError(f"'{name_or_file}' is neither a file nor a preset{hint}")
    return parse_experiment(text, source, overrides)


def parse_experiment(text: str, source: str = "experiment", overrides: Sequence[str] = ()) -> Experiment:
    places: dict[Location, str] = {}
    data = _read_yaml(text, source, places)
    for override in overrides:
        _apply(data, override, places)
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        raise InputError(_explain(error, data, places)) from None


def _read_yaml(text: str, source: str, places: dict[Location, str]) -> dict[str, Any]:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise InputError(f"{source} holds no settings; expected lines such as 'seed: 42'")
        return _value(loader, root, (), source, places)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{source}{line}: this is not YAML ({getattr(error, 'problem', None) or error})") from None
    finally:
        loader.dispose()


def _value(loader: yaml.SafeLoader, node: yaml.Node, path: Location, source: str, places: dict[Location, str]) -> Any:
    """A YAML node's value; notes on the way the line at which each key stands."""
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node))
            place = f"{source}, line {key_node.start_mark.line + 1}"
            if key in result:
                raise InputError(f"{place}: '{key}' is given twice; keep one of them")
            places[(*path, key)] = place
            result[key] = _value(loader, value_node, (*path, key), source, places)
        return result
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            places[(*path, index)] = f"{source}, line {item.start_mark.line + 1}"
            items.append(_value(loader, item, (*path, index), source, places))
        return items
    value = loader.construct_object(node)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _apply(data: dict[str, Any], override: str, places: dict[Location, str]) -> None:
    """Set one dotted key, such as `phases.0.rounds=5`; the value is YAML."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise InputError(f"'{override}' is no override; write key=value, such as clients.count=20")
    place = f"override '{override}'"
    inner: dict[Location, str] = {}
    value = _read_yaml(f"value: {text}", place, inner)["value"]
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


def _index(holder: Any, part: str, override: str) -> str | int:
    if not isinstance(holder, list):
        return part
    if not part.isdigit() or int(part) >= len(holder):
        raise InputError(f"'{override}': there is no entry {part} in the list; use 0 to {len(holder) - 1}")
    return int(part)


def _nearest(word: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


EXPECTED = {
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "string_type": "expected text",
    "bool_type": "expected true or false",
    "tuple_type": "expected a list",
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
        text = f"unknown key '{name}' {f'in {key}' if key else 'at the top level'}{hint}"
    elif kind == "missing":
        text = f"{key or 'the experiment'} needs a value for '{problem['loc'][-1]}'"
    elif kind in ("literal_error", "union_tag_invalid", "union_tag_not_found"):
        expected = context.get("expected") or context.get("expected_tags") or "kind: iid, classes, dirichlet or flwr"
        shown = context.get("tag", value)
        valid = re.findall(r"'([^']+)'", expected) or [expected]
        text = f"{key} is {shown!r}; use {' or '.join(valid)}{_nearest(str(shown), valid)}"
    elif kind == "value_error":
        text = f"{key}: {context['error']}" if key else str(context["error"])
    else:
        message = EXPECTED.get(kind) or problem["msg"].replace("Input should", "it should")
        text = f"{key} is {_short(value)}; {message}"
    while path and path not in places:
        path = path[:-1]
    return f"{places[path]}: {text}" if path else text


def _short(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
