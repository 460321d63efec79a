"""Several runs side by side: where they are, what differs between their settings, which repeat one another."""

import difflib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsieve.config.dotted import as_text, flat
from fedsieve.config.model_settings import RidgeHead
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError
from fedsieve.runs.read import Digests, digests_in, read_experiment, read_metrics, read_result

ALWAYS_THE_SAME = ("cifar100", "digits")  # data sets whose content is checked or built in, wherever they lie


@dataclass(frozen=True)
class Run:
    """What a run's folder says; `result` is None as long as it is not finished."""

    path: Path
    experiment: Experiment
    metrics: list[dict[str, Any]]
    result: dict[str, Any] | None

    @property
    def seed(self) -> int:
        return self.experiment.seed

    @property
    def rounds(self) -> int:
        """How many it has when it is finished; a ridge head takes one of its own."""
        alone = isinstance(self.experiment.model.head, RidgeHead)
        return alone + sum(phase.rounds for phase in self.experiment.phases)

    @property
    def state(self) -> str:
        return "finished" if self.result else f"unfinished: round {len(self.metrics)} of {self.rounds}"

    @property
    def digests(self) -> Digests:
        return digests_in(self.result)

    @property
    def dataset(self) -> str:
        """The data set's name, with its place where the name does not say which images are in it."""
        data = self.experiment.data
        return data.name if data.name in (*ALWAYS_THE_SAME, "given") else f"{data.name} {data.path}"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that the outcome depends on, by dotted key."""
        unimportant = {"workers", "threads", "track", "expect"}
        settings = flat(self.experiment.model_dump(mode="json", exclude=unimportant))
        if self.experiment.data.name in ALWAYS_THE_SAME:
            del settings["data.path"]
        if self.experiment.data.name == "given" and self.result:
            settings["data.given"] = self.result["data_fingerprint"]  # objects have no name to tell them apart
        return settings


def read_run(path: Path) -> Run:
    """The run in this folder; an error if anything is damaged or missing in it that others rely on."""
    result = read_result(path) if (path / "result.json").exists() else None  # first: the run may end in the meantime
    digests = digests_in(result)
    return Run(path, read_experiment(path, digests), read_metrics(path, digests), result)


def find_runs(paths: Iterable[Path], read: Callable[[Path], Run] = read_run) -> tuple[list[Run], list[str]]:
    """The runs at or below these paths, and a line about each path that holds none and each run that is damaged."""
    runs: dict[Path, Run] = {}
    problems = []
    for path in paths:
        below = run_folders(path) if path.is_dir() else []
        if not below:
            state = "holds no run (no experiment.yaml in it or below)" if path.is_dir() else "is no folder"
            problems.append(f"{path} {state}; give the folder of a run, or one with runs in it")
        for folder in below:
            try:
                runs.setdefault(folder.resolve(), read(folder))
            except InputError as error:
                problems.append(str(error))
    return list(runs.values()), problems


def run_folders(path: Path) -> list[Path]:
    """The folders at or below a path that hold a run, also one whose experiment.yaml is gone, so that it is missed."""
    names = {"experiment.yaml", "metrics.jsonl"}
    return sorted(Path(folder) for folder, folders, files in os.walk(path) if not names.isdisjoint(files + folders))


def differing(runs: Sequence[Run]) -> list[str]:
    """The dotted keys whose values are not the same in all runs, the seed aside."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "seed")
    return [key for key in keys if len({as_text(run.settings.get(key)) for run in runs}) > 1]


def grouped(runs: Sequence[Run], by: Sequence[str]) -> dict[tuple[str, ...], list[Run]]:
    """Runs with the same values of these keys, as text; the seeds of one experiment, say."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(as_text(run.settings.get(key)) for key in by), []).append(run)
    return groups


def without_repeats(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """One of all runs with the same settings and seed, the first that is finished, and a line about each other one."""
    firsts: dict[str, Run] = {}
    notes = []
    for run in sorted(runs, key=lambda run: run.result is None):
        first = firsts.setdefault(json.dumps(run.settings, sort_keys=True), run)
        if first is not run:
            same = f"the same settings, seed {run.seed}"
            notes.append(f"{run.path} repeats {first.path} ({same}); only the latter counts")
    counting = {run.path for run in firsts.values()}
    return [run for run in runs if run.path in counting], notes


def about_data(runs: Sequence[Run]) -> list[str]:
    """Lines about runs of other images than the rest: their accuracies do not compare, whatever the settings say."""
    names = list(dict.fromkeys(run.dataset for run in runs))
    notes = [f"these are runs of different data sets: {', '.join(names)}"] if len(names) > 1 else []
    firsts: dict[str, Run] = {}
    for run in runs:
        if ours := (run.result or {}).get("data_fingerprint"):
            settings = str({key: value for key, value in run.settings.items() if key.startswith("data.")})
            first = firsts.setdefault(settings, run)
            if first.result and first.result["data_fingerprint"] != ours:
                notes.append(f"{run.dataset} held other images or labels in {run.path} than in {first.path}")
    return notes


def keys_named(word: str, runs: Sequence[Run]) -> list[str]:
    """The dotted keys that are, or lie below, the key `word`; an error names those that may be meant instead."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    if named := [key for key in keys if key == word or key.startswith(f"{word}.")]:
        return named
    ending = [key for key in keys if key.endswith(f".{word}")]
    near = ending or difflib.get_close_matches(word, keys, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near[:3])}?" if near else "`fedsieve show EXPERIMENT` lists all keys"
    raise InputError(f"no run has a setting '{word}'; {hint}")
