"""Runs side by side: repetitions grouped, means with intervals, and which groups differ by more than chance.

Two groups are compared by pairs of runs with the same seed, so the same split, validation set and first weights
(paired t test); as there is one test for each group but the baseline, the p values are corrected by Holm's method.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsieve.analysis.collection import (
    Run,
    about_data,
    about_left_out,
    differing,
    find_runs,
    grouped,
    keys_named,
    names_of,
    with_place_of_phase,
    without_repeats,
    worth_showing,
)
from fedsieve.analysis.repeat import means
from fedsieve.analysis.statistics import Interval, Paired, holm, paired
from fedsieve.config.dotted import as_text
from fedsieve.config.experiment_file import parse_value
from fedsieve.errors import InputError
from fedsieve.runs.read import FIGURES


@dataclass(frozen=True)
class Group:
    """Runs that repeat each other."""

    name: str  # the folder or arm of its runs; with `by`, the values it stands for: `sparsity=0.9`
    values: dict[str, str]  # of the keys that groups differ in, as text
    runs: list[Run]
    means: dict[str, Interval]  # by figure
    difference: Paired | None = None  # from the baseline; None for itself, and where no pair of runs belongs together
    corrected: float | None = None  # the p value after Holm

    @property
    def results(self) -> list[dict[str, Any]]:
        return [run.result for run in self.runs if run.result is not None]


@dataclass(frozen=True)
class Comparison:
    metric: str  # that differences are about
    keys: list[str]  # all that groups differ in, or that they were asked to be made by
    shown: list[str]  # with `by`, as many of them as it takes to tell groups apart; else groups have names of their own
    telling: list[str]  # the keys that are worth a word: not what follows from having no mask, say
    groups: list[Group]
    baseline: Group
    unfinished: list[Run]
    warnings: list[str]


def compare(
    paths: Sequence[Path], by: Sequence[str] = (), metric: str = "test_accuracy", baseline: Sequence[str] = ()
) -> Comparison:
    """Group the finished runs at or below these paths by the settings that differ, or by those that `by` names."""
    if metric not in FIGURES:
        raise InputError(f"--metric {metric} is no figure of a result; use {', '.join(FIGURES)}")
    found, problems = find_runs(paths)
    unfinished = [run for run in found if run.result is None]
    runs, repeats = without_repeats([run for run in found if run.result is not None])
    if not runs:
        states = [f"{run.path} is {run.state}" for run in unfinished]
        raise InputError(f"there is no finished run to compare: {'; '.join([*states, *problems])}")
    keys = _keys(runs, by)
    gathered = grouped(runs, keys)
    values = [dict(zip(keys, one, strict=True)) for one in gathered]
    asked = [named[0] for named in (keys_named(word, runs) for word in by) if len(named) == 1]
    shown = telling(values, keys, asked) if by else []
    names = [in_words(one, shown) for one in values] if by else names_of(list(gathered.values()))
    groups = [
        Group(name, one, members, means([run.result for run in members if run.result]))
        for name, one, members in zip(names, values, gathered.values(), strict=True)
    ]
    mixed = list(dict.fromkeys(key for group in groups for key in differing(group.runs)))
    warnings = [*problems, *repeats, *about_data(runs), *_about_by(by, runs), *_about_mixing(mixed)]
    warnings += about_left_out(runs)
    first = _baseline(groups, keys, baseline)
    groups = _tested(groups, first, metric, mixed)
    worth = [key for key in worth_showing(runs) if key in keys]
    return Comparison(metric, keys, shown, worth, groups, groups[first], unfinished, warnings)


def _keys(runs: Sequence[Run], by: Sequence[str]) -> list[str]:
    """What to group by; a word such as `clients.split` stands for all below it that differs."""
    different = differing(runs)
    if not by:
        return different
    named = [keys_named(word, runs) for word in by]
    return list(dict.fromkeys(key for keys in named for key in keys if len(keys) == 1 or key in different))


def _tested(groups: Sequence[Group], first: int, metric: str, mixed: Sequence[str]) -> list[Group]:
    """The groups, each compared with the one at `first`: pairs agree in the seed and in what is mixed in groups."""
    figures = [
        {
            (run.seed, *(as_text(run.settings.get(key)) for key in mixed)): run.result[metric]
            for run in group.runs
            if run.result and run.result[metric] is not None
        }
        for group in groups
    ]
    differences = [paired(own, figures[first]) if own is not figures[first] else None for own in figures]
    corrected = holm([difference.p if difference else None for difference in differences])
    return [
        replace(group, difference=difference, corrected=p)
        for group, difference, p in zip(groups, differences, corrected, strict=True)
    ]


def _baseline(groups: Sequence[Group], keys: Sequence[str], conditions: Sequence[str]) -> int:
    """The place of the group with this name or `key=value`, where the key may be an end; the first without any."""
    fitting = list(range(len(groups)))
    named = [group.name for group in groups]
    if len(conditions) == 1 and conditions[0] in named:
        return named.index(conditions[0])
    for condition in conditions:
        named_key, sign, text = condition.partition("=")
        word = with_place_of_phase(named_key, [run for group in groups for run in group.runs])
        fits = [key for key in keys if key == word] or [key for key in keys if key.endswith(f".{word}")]
        if not sign or len(fits) != 1:
            choice = ", ".join(named) + (f", or a value of {', '.join(keys)}" if keys else "")
            raise InputError(f"--baseline '{condition}' is no group, and no key=value that tells one; use {choice}")
        value = as_text(parse_value(text, f"--baseline '{condition}'"))
        there = dict.fromkeys(group.values[fits[0]] for group in groups)
        if value not in there:
            raise InputError(f"--baseline '{condition}': no group has that value; there are {', '.join(there)}")
        fitting = [place for place in fitting if groups[place].values[fits[0]] == value]
    if not fitting or (conditions and len(fitting) > 1):
        raise InputError(
            f"--baseline {' '.join(conditions)} fits {len(fitting)} groups, not one; "
            f"give a key=value for each of {', '.join(keys)}"
        )
    return fitting[0]


def telling(groups: Sequence[Mapping[str, str]], keys: Sequence[str], first: Sequence[str] = ()) -> list[str]:
    """A few of the keys by which no two groups are alike, those in `first` among them.

    Turning a mask on, say, sets fifteen keys at once, one of which is enough to name a group. Taken is each time the
    key that tells most groups apart; among equals one that all groups have, then one with numbers.
    """
    chosen = list(first)

    def apart(keys: Sequence[str]) -> int:
        return len({tuple(group[key] for key in keys) for group in groups})

    def worth(key: str) -> tuple[int, bool, bool]:
        values = [group[key] for group in groups]
        return apart([*chosen, key]), "–" not in values, any(value[:1].isdecimal() for value in values)

    while apart(chosen) < len(groups):
        chosen.append(max((key for key in keys if key not in chosen), key=worth))
    return chosen


def short(keys: Sequence[str]) -> list[str]:
    """Each key's end, as long as it takes to tell them apart: `phases.1.mask.sparsity` is `sparsity`."""

    def end(key: str, length: int) -> str:
        return ".".join(key.split(".")[-length:])

    names = []
    for key in keys:
        lengths = range(1, key.count(".") + 1)
        alone = (end(key, n) for n in lengths if sum(end(other, n) == end(key, n) for other in keys) == 1)
        names.append(next(alone, key))
    return names


def in_few_words(keys: Sequence[str]) -> str:
    """The keys, where several lie below one group of settings that group: `phases.1.mask.*`."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        parts = key.split(".")
        groups.setdefault(".".join(parts[: 3 if parts[0] == "phases" else 2]), []).append(key)
    return ", ".join(below[0] if len(below) == 1 else f"{group}.*" for group, below in groups.items())


def in_words(values: Mapping[str, str], keys: Sequence[str]) -> str:
    """The values of these keys in a few words: `sparsity=0.9, lr=0.05`."""
    return ", ".join(f"{name}={values[key]}" for name, key in zip(short(keys), keys, strict=True)) or "all"


# ------------------------------------------------------------------------------------------- warnings


def _about_by(by: Sequence[str], runs: Sequence[Run]) -> list[str]:
    return [f"all runs have the same {word}" for word in by if len(grouped(runs, keys_named(word, runs))) == 1]


def _about_mixing(mixed: Sequence[str]) -> list[str]:
    if not mixed:
        return []
    return [f"runs of one group differ in {in_few_words(mixed)}, and means are taken over all; --by tells them apart"]
