"""The experiments of a report, run again: which of them, at what scale, and what came out beside what was reported.

A row is a preset of the report. Rows that are the same experiment run once, in the folder of the first of them
(`DIR/PRESET/seed-N`), so that a command that was killed, or one that asks for other rows, goes on with what is there.
Figures are compared with the reported ones only where nothing but the seed differs from the preset.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fedsieve.analysis.reproduce.scale import REPORTED_BACKBONE, REPORTED_DATA, Scale, shrunken
from fedsieve.analysis.statistics import Interval, interval
from fedsieve.config.experiment_file import load_experiment, parse_experiment, preset_names, report_of
from fedsieve.config.schema import ExpectSettings, Experiment
from fedsieve.errors import InputError, MachineError, RunError
from fedsieve.files.atomic import write_text

Metric = Literal["test_accuracy", "val_accuracy"]
PLACES = ("table", "figure", "section")
# What may differ from the preset in a comparison with the report.
HARMLESS = ("seed", "device", "workers", "threads", "engine", "track", "data.path", "model.backbone")


@dataclass(frozen=True)
class Row:
    """One preset as it is run, with the seed of its first run."""

    preset: str
    expect: ExpectSettings
    experiment: Experiment
    runs_as: str  # the first preset of the report that is the same experiment

    @property
    def metric(self) -> Metric:
        """What the report measured: what it says, else validation accuracy where it has no other figure."""
        if self.expect.metric is not None:
            return self.expect.metric
        only_validation = self.expect.test_accuracy is None and self.expect.val_accuracy is not None
        return "val_accuracy" if only_validation else "test_accuracy"

    @property
    def reported(self) -> float | None:
        return self.expect.val_accuracy if self.metric == "val_accuracy" else self.expect.test_accuracy

    @property
    def group(self) -> str:
        """The rows among which it can be ranked: `table 2, figure 5`, with the metric if it is unusual."""
        places = [part for part in self.expect.source.split(", ") if part.split()[0] in PLACES]
        return ", ".join(places) + (" (val)" if self.metric == "val_accuracy" else "")


@dataclass(frozen=True)
class Plan:
    """What is to be run, and what its figures can be compared with."""

    report: str
    scale: Scale
    rows: list[Row]
    seeds: int
    folder: Path
    changes: list[str] = field(default_factory=list)  # a person's own, other than the harmless ones

    @property
    def is_comparable(self) -> bool:
        """Whether it is the reported experiment, on the reported data, with the reported backbone."""
        as_reported = all(
            row.experiment.model.backbone == REPORTED_BACKBONE and row.experiment.data.name == REPORTED_DATA
            for row in self.rows
        )
        return self.scale.name == "full" and as_reported and not self.changes

    @property
    def title(self) -> str:
        """What the figures are, and what they are not."""
        if self.is_comparable:
            return f"report {self.report}, full scale"
        data, backbone = self.rows[0].experiment.data.name, self.rows[0].experiment.model.backbone
        parts = [
            "CIFAR-100" if data == REPORTED_DATA else f"{data} instead of CIFAR-100",
            "DINO ViT-S/16" if backbone == REPORTED_BACKBONE else f"{backbone_name(backbone)} instead of DINO ViT-S/16",
            *self.scale.about,
            *(["classes per client in proportion"] if data != REPORTED_DATA else []),
            *self.changes,
        ]
        return (
            f"report {self.report}, {self.scale.name} scale: {', '.join(parts)}; not comparable with the reported "
            "figures, only the order of rows is. Learning rates are as reported, unless changed here."
        )

    def folder_of(self, row: Row, seed: int) -> Path:
        return self.folder / row.runs_as / f"seed-{seed}"

    def runs(self) -> Iterator[tuple[Row, Experiment, Path]]:
        """Each run once: whose row it is, with its seed, and its folder."""
        done = set()
        for row in self.rows:
            for seed in range(row.experiment.seed, row.experiment.seed + self.seeds):
                folder = self.folder_of(row, seed)
                if folder not in done:
                    done.add(folder)
                    yield row, row.experiment.model_copy(update={"seed": seed}), folder


def backbone_name(backbone: str) -> str:
    """A short name, fit for a folder: the last part of a path or hub name, without a file's ending."""
    return backbone.rstrip("/").rpartition("/")[2].removesuffix(".safetensors").removesuffix(".pth") or backbone


# ------------------------------------------------------------------------------------------- choosing rows


def choose(report: str, place: str | None = None, patterns: Sequence[str] = ()) -> list[str]:
    """The presets of a report that stand at a place, such as `table 2`, and whose names fit one of the patterns."""
    reports = sorted({number for name in preset_names() if (number := report_of(name)) is not None})
    if report not in reports:
        raise InputError(f"there is no report '{report}'; the reports are {', '.join(reports)}")
    names = [name for name in preset_names() if report_of(name) == report]
    if place is not None:
        places = {name: places_of(name) for name in names}
        names = [name for name in names if place in places[name]]
        if not names:
            known = sorted({one for some in places.values() for one in some})
            raise InputError(f"report {report} has no {place} that can be run; it has {', '.join(known)}")
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in names):
            raise InputError(f"no row is called '{pattern}'; the rows are {', '.join(names)}")
    return [name for name in names if not patterns or any(_fits(name, pattern) for pattern in patterns)]


def places_of(preset: str) -> list[str]:
    """Where in its report a preset's experiment stands: `table 2`, `figure 5`."""
    expect = _read(preset).expect
    return [part for part in expect.source.split(", ") if part.split()[0] in PLACES] if expect else []


def _fits(name: str, pattern: str) -> bool:
    """Whether a name, with or without its report's number, is what the pattern says."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("-")[2], pattern)


def make_plan(
    report: str,
    names: Sequence[str],
    scale: Scale,
    overrides: Sequence[str] = (),
    seeds: int = 3,
    folder: Path | None = None,
) -> Plan:
    """The rows as they are run at a scale, with `key=value` changes that win over it."""
    if seeds < 1:
        raise InputError(f"--seeds is {seeds}; use at least 1")
    experiments = {name: at_scale(name, scale, overrides) for name in names}
    first_of: dict[str, str] = {}
    for name in (name for name in preset_names() if report_of(name) == report):
        with suppress(InputError):  # of a row that nobody asks for, and that the changes do not fit
            experiment = experiments.get(name) or at_scale(name, scale, overrides)
            first_of.setdefault(experiment.outcome().model_dump_json(), name)
    rows = []
    for name, experiment in experiments.items():
        assert experiment.expect is not None
        rows.append(Row(name, experiment.expect, experiment, first_of[experiment.outcome().model_dump_json()]))
    groups = [row.group for row in rows]
    rows.sort(key=lambda row: groups.index(row.group))  # those that can be ranked stand together
    changes = [one for one in overrides if not _is_harmless(one.partition("=")[0].strip())]
    default = Path("runs") / "reproduce" / f"{scale.name}-{backbone_name(rows[0].experiment.model.backbone)}"
    return Plan(report, scale, rows, seeds, folder or default, changes)


def _is_harmless(key: str) -> bool:
    return any(f"{key}.".startswith(f"{one}.") for one in HARMLESS)


def at_scale(preset: str, scale: Scale, overrides: Sequence[str] = ()) -> Experiment:
    """A preset, shrunken; whatever an override says stays as it says."""
    asked = _read(preset, (*scale.defaults, *overrides))
    small = shrunken(asked, scale)
    return parse_experiment(small.to_yaml(), f"preset {preset}", overrides) if overrides else small


@cache
def _read(preset: str, overrides: tuple[str, ...] = ()) -> Experiment:
    """Kept, since reading YAML takes most of the time of planning."""
    return load_experiment(preset, overrides)


# ------------------------------------------------------------------------------------- running and comparing


@dataclass(frozen=True)
class Outcome:
    """What the runs of a row gave."""

    row: Row
    values: dict[int, float]  # by seed
    hashes: dict[int, str]
    failed: dict[int, str]  # why

    @property
    def measured(self) -> Interval | None:
        return interval(list(self.values.values())) if self.values else None

    @property
    def difference(self) -> float | None:
        if self.measured is None or self.row.reported is None:
            return None
        return self.measured.mean - self.row.reported


Run = Callable[[Row, Experiment, Path], dict[str, Any]]


def run_plan(plan: Plan, run: Run) -> list[Outcome]:
    """Each run once, in order; one that fails is named, and the others go on."""
    results: dict[Path, dict[str, Any]] = {}
    failures: dict[Path, str] = {}
    for row, experiment, folder in plan.runs():
        try:
            results[folder] = run(row, experiment, folder)
        except MachineError:  # of this machine, so the others would not do better
            raise
        except RunError as error:
            failures[folder] = str(error)
    outcomes = []
    for row in plan.rows:
        folders = {seed: plan.folder_of(row, seed) for seed in _seeds(plan, row)}
        found = {seed: results[folder] for seed, folder in folders.items() if folder in results}
        outcomes.append(
            Outcome(
                row,
                {seed: one[row.metric] for seed, one in found.items() if one[row.metric] is not None},
                {seed: one["model_sha256"] for seed, one in found.items()},
                {seed: failures[folder] for seed, folder in folders.items() if folder in failures},
            )
        )
    return outcomes


def _seeds(plan: Plan, row: Row) -> range:
    return range(row.experiment.seed, row.experiment.seed + plan.seeds)


def ranks(outcomes: Sequence[Outcome]) -> dict[str, tuple[int, int]]:
    """By preset, its place (1 is best) in its group as reported and as measured; equal figures share a place.

    Only rows that have both figures are ranked, and only against each other.
    """
    known = [one for one in outcomes if one.measured is not None and one.row.reported is not None]
    places = {}
    for one in known:
        group = [other for other in known if other.row.group == one.row.group]
        better = sum((other.row.reported or 0) > (one.row.reported or 0) for other in group)
        ahead = sum(_mean(other) > _mean(one) for other in group)
        places[one.row.preset] = (1 + better, 1 + ahead)
    return places


def _mean(outcome: Outcome) -> float:
    assert outcome.measured is not None
    return outcome.measured.mean


def as_data(plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What table.json says; a difference is in it only where the figures can be compared."""
    places = ranks(outcomes)
    rows = []
    for one in outcomes:
        measured, (reported_rank, measured_rank) = one.measured, places.get(one.row.preset, (None, None))
        row = {
            "row": one.row.preset,
            "source": one.row.expect.source,
            "metric": one.row.metric,
            "reported": one.row.reported,
            "measured": measured and measured.mean,
            "low": measured and measured.low,
            "high": measured and measured.high,
            "difference": one.difference,
            "rank_reported": reported_rank,
            "rank_measured": measured_rank,
            "runs_as": one.row.runs_as,
            "seeds": one.values,
            "model_sha256": one.hashes,
            "failed": one.failed,
        }
        rows.append(row if plan.is_comparable else {key: row[key] for key in row if key != "difference"})
    return {"title": plan.title, "scale": plan.scale.name, "comparable": plan.is_comparable, "rows": rows}


def write_tables(plan: Plan, outcomes: Sequence[Outcome]) -> None:
    """DIR/table.json with everything, DIR/table.csv with one line for each row."""
    data = as_data(plan, outcomes)
    text = io.StringIO()
    what = {  # on every line, which may be cut out
        "scale": plan.scale.name,
        "data": plan.rows[0].experiment.data.name,
        "backbone": backbone_name(plan.rows[0].experiment.model.backbone),
        "comparable": str(plan.is_comparable).lower(),
    }
    columns = [*(key for key in data["rows"][0] if key not in ("model_sha256", "failed")), *what]
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "seeds": len(row["seeds"]), **what} for row in data["rows"])
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_text(plan.folder / "table.json", json.dumps(data, indent=2) + "\n")
    write_text(plan.folder / "table.csv", text.getvalue())
