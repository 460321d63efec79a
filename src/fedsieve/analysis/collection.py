"""Several runs side by side: where they are, what differs between their settings, which repeat one another."""

import difflib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from fedsieve.analysis.applicable import applicable, at_default
from fedsieve.config.dotted import as_text
from fedsieve.config.model_settings import RidgeHead
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError
from fedsieve.runs.read import PLUGINS, Digests, digests_in, read_experiment, read_metrics, read_result, sha256_of

ALWAYS_THE_SAME = ("cifar100", "digits")  # data sets whose content is checked or built in, wherever they lie
SEED = re.compile(r"[-_/. ]*seed[-_. ]*\d+$")  # at the end of a run's name


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
        settings = applicable(self.experiment)
        if self.experiment.data.name in ALWAYS_THE_SAME:
            del settings["data.path"]
        if self.experiment.data.name == "given" and self.result:
            settings["data.given"] = self.result["data_fingerprint"]  # objects have no name to tell them apart
        without = {key: value for key, value in settings.items() if key.partition(".")[0] != "plugins"}
        return without | {f"plugins.{number}": one for number, one in enumerate(self._plugins())}

    def _plugins(self) -> list[str]:
        """Names and digests of the run's plugins: what is in them counts, not where they lie."""
        found = []
        for path in map(Path, self.experiment.plugins):
            copy = self.path / PLUGINS / path.name
            digest = self.digests.get(f"{PLUGINS}/{path.name}") or (sha256_of(copy) if copy.is_file() else None)
            found.append(f"{path.name} ({digest[:12]})" if digest else str(path))  # it has only just begun
        return sorted(found)

    @cached_property
    def defaults(self) -> set[str]:
        """The keys of settings that have their default values."""
        return at_default(self.experiment)

    @property
    def latest(self) -> dict[str, float | None]:
        """The figures of a result as far as the rounds so far have them: scores of the newest that was evaluated."""
        lines = self.metrics
        scores = ("test_accuracy", "test_loss", "val_accuracy", "val_loss")
        known = {name: [line[name] for line in lines if line.get(name) is not None] for name in scores}
        return {
            **{name: values[-1] if values else None for name, values in known.items()},
            "best_val_accuracy": max(known["val_accuracy"], default=None),
            **{name: sum(line[name] for line in lines) for name in ("bytes_up", "bytes_down", "seconds")},
        }


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
    """The folders at or below a path that hold a run, also one whose experiment.yaml is gone, so that it is missed.

    Each once: a run that a link leads to has the link's name only if it does not lie below the path itself.
    """
    names = {"experiment.yaml", "metrics.jsonl"}
    found: dict[Path, Path] = {}
    for top in (path, *_links_in(path)):
        below = [Path(folder) for folder, folders, files in os.walk(top) if not names.isdisjoint(files + folders)]
        for folder in sorted(below):
            found.setdefault(folder.resolve(), folder)
    return sorted(found.values())


def _links_in(path: Path) -> list[Path]:
    """The links to folders directly in a folder, as a sweep's `best/` has them, less those back to what holds it."""
    _, folders, _ = next(os.walk(path), (path, [], []))  # nothing, not an error, where it cannot be read
    links = [path / name for name in sorted(folders) if (path / name).is_symlink()]
    return [link for link in links if not path.resolve().is_relative_to(link.resolve())]


def differing(runs: Sequence[Run]) -> list[str]:
    """The dotted keys whose values are not the same in all runs, the seed aside."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "seed")
    return [key for key in keys if len({as_text(run.settings.get(key)) for run in runs}) > 1]


def worth_showing(runs: Sequence[Run]) -> list[str]:
    """Of the keys that differ, those that say something: not the defaults of a mask that only some runs have."""

    def is_worth(key: str) -> bool:
        having = [run for run in runs if key in run.settings]
        if len({as_text(run.settings[key]) for run in having}) > 1:
            return True
        return key.endswith(".mask.rule") or any(key not in run.defaults for run in having)

    return [key for key in differing(runs) if is_worth(key)]


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


def about_left_out(runs: Sequence[Run]) -> list[str]:
    """A line about each run in which replies of clients could not be used: it learned from fewer than it says."""
    return [f"{run.path}: {found}" for run in runs if (found := left_out(run.metrics))]


def left_out(lines: Sequence[dict[str, Any]]) -> str | None:
    """How many replies of clients were left out of their rounds, and why the first; None without any."""
    found = [(line, client, why) for line in lines for client, why in line.get("failed", {}).items()]
    if not found:
        return None
    line, client, why = found[0]
    first = f"client {client} in phase {line['phase']}, round {line['round']}: {why}"
    if len(found) == 1:
        return f"1 reply was left out of its round ({first})"
    return f"{len(found)} replies were left out of their rounds (the first: {first})"


def names_of(groups: Sequence[Sequence[Run]]) -> list[str]:
    """A short name for each group: where its runs lie, below the folder that holds all of them, less the seed."""
    normal = os.path.normpath  # not resolve(): a link to an arm's runs has the arm's name
    place = {run.path: Path(normal(run.path.absolute())) for group in groups for run in group}
    everything = list(place.values())
    if not everything:
        return []
    root = everything[0].parent if len(everything) == 1 else Path(os.path.commonpath(everything))
    names = []
    for group in groups:
        labels = [str(place[run.path].relative_to(root)) for run in group]
        bare = list(dict.fromkeys(SEED.sub("", label) for label in labels))
        names.append(bare[0] if len(bare) == 1 else f"{labels[0]} and {len(labels) - 1} more")
    names = [root.name if name in ("", ".") else name for name in names]
    repeated = {name for name, count in Counter(names).items() if count > 1}
    paths = [str(place[group[0].path].relative_to(root)) for group in groups]
    return [path if name in repeated else name for name, path in zip(names, paths, strict=True)]


def keys_named(word: str, runs: Sequence[Run]) -> list[str]:
    """The dotted keys that `word` means: a key or its end, or a group of settings and all keys in it.

    Of several with that end it is the one that differs between the runs; else they are an error, which names them. An
    end that fits none names what may be meant instead.
    """
    word = with_place_of_phase(word, runs)
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    if named := _at_or_below(word, keys):
        return named
    used = [key for key in keys if any(run.settings.get(key) is not None for run in runs)]
    places = dict.fromkeys(place for key in used for place in accumulate(key.split("."), "{}.{}".format))
    ending = [place for place in places if place.endswith(f".{word}")]
    different = differing(runs)
    changing = [place for place in ending if _at_or_below(place, different)]
    for only in (ending, changing):
        if len(only) == 1:
            return _at_or_below(only[0], keys)
    if ending:
        raise InputError(f"'{word}' is the end of several settings: {', '.join(ending)}; give one of them")
    ends = {key.rpartition(".")[2]: key for key in reversed(used)}
    near = difflib.get_close_matches(word, [*used, *ends], n=3, cutoff=0.6)
    candidates = list(dict.fromkeys(ends.get(one, one) for one in near))
    if candidates:
        raise InputError(f"no run has a setting '{word}'; did you mean {' or '.join(candidates)}?")
    worth = worth_showing(runs)
    hint = f"the runs differ in {', '.join(worth)}" if worth else "`fedsieve show EXPERIMENT` lists all keys"
    raise InputError(f"no run has a setting '{word}'; {hint}")


def with_place_of_phase(word: str, runs: Sequence[Run]) -> str:
    """`phases.edit.mask.rule` as `phases.1.mask.rule`, as overrides have it; other words as they are."""
    first, _, inner = word.partition(".")
    name, dot, rest = inner.partition(".")
    phases = [[phase.name for phase in run.experiment.phases] for run in runs]
    places = {names.index(name) for names in phases if name in names}
    if first != "phases" or not places:
        return word
    place = min(places)
    if any(names[place] != name for names in phases if len(names) > place) or len(places) > 1:
        numbers = " or ".join(f"phases.{number}" for number in sorted(places))
        raise InputError(f"'{word}': phase {name} is not in the same place in all runs; give {numbers}")
    return f"phases.{place}{dot}{rest}"


def _at_or_below(place: str, keys: Sequence[str]) -> list[str]:
    return [key for key in keys if key == place or key.startswith(f"{place}.")]
