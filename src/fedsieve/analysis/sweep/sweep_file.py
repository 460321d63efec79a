"""What a sweep file may say: one experiment, what is varied in it, and how often it is repeated.

arms:    each combination is a way of doing things that is to be compared with the others
search:  in each arm, what is to be chosen by validation accuracy: from lists all combinations are tried, and with
         `trials` a Bayesian search tries so many, also from ranges
seeds:   what was chosen in each arm is repeated with so many seeds, the same in all arms
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from fedsieve.config.experiment_file import (
    all_paths,
    file_text,
    files_beside,
    load_experiment,
    nearest,
    parse,
    parse_value,
)
from fedsieve.config.plugins import used
from fedsieve.config.schema import Experiment
from fedsieve.config.settings import Repeats, Settings
from fedsieve.errors import InputError

Point = dict[str, Any]  # dotted keys of the experiment and their values
Number = Annotated[int, Field(ge=-(10**18), le=10**18)] | Annotated[float, Field(ge=-1e30, le=1e30)]
MOST = 10_000  # combinations of arms and values to search; each is at least a run


class Range(Settings):
    """Numbers from low to high, whole ones if both are."""

    low: Number
    high: Number
    log: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> "Range":
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"log needs numbers above 0, and low is {self.low}")
        return self

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


Choices = Annotated[
    Annotated[list[Any], Tag("list")] | Annotated[Range, Tag("range")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "range"),
]


class Sweep(Settings):
    """The whole file. A key may be several, separated by commas; its values are then lists, one value for each."""

    experiment: str
    set: dict[str, Any] = Field(default_factory=dict)
    arms: dict[str, list[Any]] = Field(default_factory=dict)
    search: dict[str, Choices] = Field(default_factory=dict)
    climb: bool = False
    trials: Repeats | None = None
    prune: bool = True
    seeds: Repeats = 1

    @field_validator("search", mode="before")
    @classmethod
    def _lists_or_ranges(cls, search: Any) -> Any:
        if isinstance(search, dict):
            for key, values in search.items():
                if not isinstance(values, list | dict | Range):
                    raise ValueError(f"'{key}' needs a list of values, or a range such as {{low: 0.01, high: 1.0}}")
        return search

    @field_validator("arms", "search")
    @classmethod
    def _are_choices(cls, varied: dict[str, Any]) -> dict[str, Any]:
        for key, values in varied.items():
            names = _names(key)
            if isinstance(values, Range):
                if len(names) > 1:
                    raise ValueError(f"'{key}' are several keys, which cannot share a range; give lists of values")
                continue
            if not values:
                raise ValueError(f"'{key}' has no values; give at least one")
            if len(values) > MOST:
                raise ValueError(f"'{key}' has {len(values):,} values; use at most {MOST:,}")
            if repeated := [value for i, value in enumerate(values) if value in values[:i]]:
                raise ValueError(f"'{key}' has the value {json.dumps(repeated[0])} twice; keep one of them")
            for value in values:
                if len(names) > 1 and not (isinstance(value, list) and len(value) == len(names)):
                    shown = json.dumps(value)
                    raise ValueError(f"'{key}' are {len(names)} keys, so {shown} should be a list of {len(names)}")
        return varied

    @model_validator(mode="after")
    def _is_consistent(self) -> "Sweep":
        if not self.arms and not self.search:
            raise ValueError("there is nothing to vary: give arms or search")
        if (number := self._number()) > MOST:
            raise ValueError(f"arms and search have {number:,} combinations; use at most {MOST:,}")
        if several := [key for key in self.set if "," in key]:
            raise ValueError(f"'{several[0]}' are several keys, which set takes one by one")
        varied = [name for key in (*self.arms, *self.search) for name in _names(key)]
        if "seed" in varied:
            raise ValueError("the seed is not to be searched; give the first one in set, and seeds: 5")
        keys = [*self.set, *varied]  # in the order in which they take effect
        for place, key in enumerate(keys):
            if key in keys[:place]:
                raise ValueError(f"'{key}' is given twice, in set, arms or search; keep one of them")
            if undone := [before for before in keys[:place] if before.startswith(f"{key}.")]:
                raise ValueError(f"'{key}' would undo '{undone[0]}', which is a part of it; leave one of them out")
        ranges = [key for key, values in self.search.items() if isinstance(values, Range)]
        if ranges and self.trials is None:
            raise ValueError(f"search has a range, '{ranges[0]}', which has no end; say how many trials, such as 20")
        if self.climb and (self.trials is not None or not self.search):
            raise ValueError("climb goes through the lists of a search, without trials; leave one of them out")
        if self.trials is not None and not self.search:
            raise ValueError("trials are tries of a search, and there is none; give search, or leave trials out")
        return self

    def _number(self) -> int:
        """Combinations that are to be run or, of a Bayesian search, checked."""
        lists = [len(values) for values in self.search.values() if isinstance(values, list)]
        searched = max(lists, default=1) if self.is_bayesian else math.prod(lists)
        return math.prod(len(values) for values in self.arms.values()) * searched

    @property
    def is_bayesian(self) -> bool:
        return self.trials is not None

    def arm_points(self) -> list[Point]:
        return combinations(self.arms)

    def grid_points(self) -> list[Point]:
        return combinations({key: values for key, values in self.search.items() if isinstance(values, list)})

    def middle(self) -> Point:
        """Some point of the search, the one that a climb starts from."""
        choices = self.search.items()
        return {key: values.low if isinstance(values, Range) else values[len(values) // 2] for key, values in choices}

    def neighbours(self, point: Point) -> list[Point]:
        """The points of the grid one step away along one key's list."""
        found = []
        for key, values in self.search.items():
            assert isinstance(values, list)
            place = values.index(point[key])
            found += [{**point, key: values[near]} for near in (place - 1, place + 1) if 0 <= near < len(values)]
        return found

    def points_to_try(self, known: Sequence[tuple[Point, float | None]]) -> list[Point]:
        """What a search that is not Bayesian lacks, from what is tried, with the accuracy where it is known.

        Of a grid all the rest. A climb goes on with the neighbours of the best point until they are tried, too.
        """
        there = [point for point, _ in known]
        if not self.climb:
            wanted = self.grid_points()
        elif not known:
            wanted = [self.middle()]
        elif any(accuracy is None for _, accuracy in known):
            wanted = []  # to be seen first
        else:
            wanted = self.neighbours(max(known, key=lambda one: one[1] or 0.0)[0])
        return [point for point in wanted if point not in there]

    def beyond(self, point: Point) -> list[str]:
        """What a person should know if a point was chosen that lies at an end of a list of numbers."""
        told = []
        for key, values in self.search.items():
            if not isinstance(values, list) or len(values) < 2 or any(type(one) not in (int, float) for one in values):
                continue
            if min(values) < point[key] < max(values):
                continue
            end, further = ("lowest", "lower") if point[key] == min(values) else ("highest", "higher")
            told.append(f"{key} {point[key]} was best and is the {end} of its list; a {further} one may be better")
        return told

    def experiment_at(self, *points: Point) -> Experiment:
        """The experiment with what is set for all, and at these points; a report expected something else of it."""
        changes = {key: value for point in (self.set, *points) for key, value in expanded(point).items()}
        overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
        return load_experiment(self.experiment, overrides).model_copy(update={"expect": None})

    def experiments(self) -> list[Experiment]:
        """All that may be run, each checked; of a Bayesian search, where there may be no end of them, the extremes."""
        found = [self.experiment_at(arm, point) for arm in self.arm_points() for point in self._extremes()]
        if self.search and any(experiment.data.validation == 0 for experiment in found):
            raise InputError("a search chooses by validation accuracy; set data.validation above 0")
        return found

    def _extremes(self) -> list[Point]:
        if not self.is_bayesian:
            return self.grid_points()
        ends = {key: [v.low, v.high] if isinstance(v, Range) else v for key, v in self.search.items()}
        return [{**self.middle(), key: value} for key, values in ends.items() for value in values]


def combinations(varied: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Every way to pick one value for each key; the last key varies fastest."""
    return [dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())]


def expanded(point: Point) -> Point:
    """With keys that stand together taken apart."""
    pairs = ((_names(key), value) for key, value in point.items())
    return {n: v for names, value in pairs for n, v in zip(names, value if len(names) > 1 else [value], strict=True)}


def _names(key: str) -> list[str]:
    return [name.strip() for name in key.split(",")]


def sweep_names() -> list[str]:
    """Of the sweeps that come with fedsieve."""
    folder = resources.files("fedsieve") / "presets" / "sweeps"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def sweep_text(name: str) -> str:
    return (resources.files("fedsieve") / "presets" / "sweeps" / f"{name}.yaml").read_text(encoding="utf-8")


def sweep_about(name: str) -> str:
    """The first line of its file."""
    return sweep_text(name).splitlines()[0].lstrip("# ")


@contextmanager
def loaded_sweep(name_or_file: str, overrides: Sequence[str], plugins: Sequence[str | Path]) -> Iterator[Sweep]:
    """`load_sweep`, with the plugins of its experiments, and more, loaded within this context."""
    experiments = load_sweep(name_or_file, overrides, plugins).experiments()
    with used(all_paths(*(experiment.plugins for experiment in experiments))):
        yield load_sweep(name_or_file, overrides, plugins)


def load_sweep(name_or_file: str, overrides: Sequence[str] = (), plugins: Sequence[str | Path] = ()) -> Sweep:
    """A sweep that comes with fedsieve, or a YAML file; `key=value` overrides and `plugins` are of the experiment."""
    if (text := file_text(name_or_file)) is not None:
        path = Path(name_or_file).expanduser()
        sweep = parse(Sweep, text, str(path))
        beside = path.parent / sweep.experiment
        if file_text(beside) is not None:
            sweep = sweep.model_copy(update={"experiment": str(beside.resolve())})
    elif name_or_file in sweep_names():
        sweep = parse(Sweep, sweep_text(name_or_file), f"sweep {name_or_file}")
    else:
        hint = nearest(name_or_file, [*files_beside(name_or_file), *sweep_names()])
        hint = hint or f"; those are {', '.join(sweep_names())}"
        raise InputError(f"'{name_or_file}' is neither a file nor a sweep that comes with fedsieve{hint}")
    given = {}
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign or not key.strip():
            raise InputError(f"'{override[:60]}' is no override; write key=value, such as clients.count=20")
        given[key.strip()] = parse_value(text, f"override '{override[:60]}'")
    if plugins:
        own = {key: value for key, value in {**sweep.set, **given}.items() if key == "plugins"}
        listed = [f"plugins={json.dumps(value)}" for value in own.values()]
        given["plugins"] = list(load_experiment(sweep.experiment, listed, plugins).plugins)
    try:
        sweep = Sweep.model_validate(sweep.model_dump() | {"set": {**sweep.set, **given}})
    except ValidationError as error:  # an override may stand in the way of what is varied
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise InputError(f"{', '.join(overrides)}: {reason}") from None
    _refuse_double_phases(sweep, [phase.name for phase in sweep.experiments()[0].phases])
    return sweep


def _refuse_double_phases(sweep: Sweep, names: Sequence[str]) -> None:
    """A phase may be given by its number or its name, but not the same setting by both."""
    keys = [*sweep.set, *(name for key in (*sweep.arms, *sweep.search) for name in _names(key))]
    seen: dict[str, str] = {}
    for key in keys:
        first, *rest = key.split(".")
        if first == "phases" and rest and rest[0] in names:
            rest[0] = str(names.index(rest[0]))
        same = seen.setdefault(".".join((first, *rest)), key)
        if same != key:
            raise InputError(f"'{same}' and '{key}' are the same setting; keep one of them")
