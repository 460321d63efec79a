"""What the page about runs shows, as plain data: figures, curves and heat maps of groups of runs.

A group is the runs that differ in nothing but the seed; of what each has alone the page shows the mean over them, with
its 95% interval. Nothing here depends on where or when the page is made.
"""

import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve import __version__
from fedsieve.analysis.collection import (
    Run,
    about_data,
    about_left_out,
    differing,
    grouped,
    names_of,
    without_repeats,
    worth_showing,
)
from fedsieve.analysis.report.figures import Figure, figure, short
from fedsieve.analysis.report.phase_gains import phase_gains
from fedsieve.analysis.statistics import interval
from fedsieve.config.dotted import as_text
from fedsieve.errors import InputError
from fedsieve.runs.read import read_split

POINTS = 240  # of a curve at most: more than a chart has room for
SHOWN_CLIENTS = 100  # in the heat map of who holds what
BINS = 20  # of the histogram of clients' accuracies
CURVES = ("val_accuracy", "test_accuracy", "val_loss", "test_loss", "train_loss", "drift_mean", "cosine", "seconds")
FIGURES = ("test_accuracy", "test_loss", "val_accuracy", "best_val_accuracy", "bytes_up", "bytes_down", "seconds")


def overview(runs: Sequence[Run], problems: Sequence[str] = (), title: str = "fedsieve report") -> dict[str, Any]:
    """All that the page shows; `problems` are told on it, with what there is to say about the runs themselves."""
    runs, repeats = without_repeats(runs)
    groups = list(grouped(runs, differing(runs)).values())
    keys = worth_showing(runs)
    names = names_of(groups)
    splits: list[dict[str, Any]] = []
    damaged: list[str] = []
    described = [described_group(name, group, splits, damaged) for name, group in zip(names, groups, strict=True)]
    for group, members in zip(described, groups, strict=True):
        group["settings"] = {key: as_text(members[0].settings.get(key)) for key in keys}
    common = {key: value for run in runs for key, value in run.settings.items()}  # the same wherever they apply
    return {
        "title": title,
        "version": __version__,
        "warnings": [*problems, *damaged, *repeats, *about_data(runs), *about_left_out(runs)],
        "groups": described,
        "splits": splits,
        "differing": keys,
        "common": {key: as_text(value) for key, value in common.items() if key not in keys and key != "seed"},
    }


# -------------------------------------------------------------------------------------------------- one group


def described_group(
    name: str, runs: Sequence[Run], splits: list[dict[str, Any]], problems: list[str]
) -> dict[str, Any]:
    """One group of runs; who holds what goes to `splits`, where groups with the same find the same."""
    results = [run.result for run in runs if run.result is not None]
    states = [run.state for run in runs]
    unfinished = [run.state for run in runs if run.result is None]
    some = f"{len(results)} of {len(runs)} finished" if results else f"{unfinished[0]} (first of {len(runs)} seeds)"
    lines, data = [run.metrics for run in runs], runs[0].experiment.data
    return {
        "name": name,
        "seeds": [run.seed for run in runs],
        "data": " ".join(filter(None, [data.name, data.path and Path(data.path).name])),
        "backbone": runs[0].experiment.model.backbone,
        "state": states[0] if len(set(states)) == 1 else some,
        "finished": not unfinished,
        "figures": {key: figure([result[key] for result in results]) for key in FIGURES},
        "latest": None if results else latest_of(runs),
        "gains": phase_gains(runs),
        "phases": phases_of(max(lines, key=len)),
        "curves": {key: curve(lines, lambda line, key=key: line.get(key)) for key in CURVES},  # type: ignore[misc]
        "sent": sent(lines),
        "time": time_by_phase(lines),
        "density": density_by_phase(max(lines, key=len)),
        "split": split_of(runs[0], splits, problems),
        "clients": spread(results),
        "runs": [
            {"seed": run.seed, "state": state, "command": command(name, runs, run)}
            for run, state in zip(runs, states, strict=True)
        ],
        "yaml": runs[0].experiment.to_yaml(),
    }


def latest_of(runs: Sequence[Run]) -> dict[str, Figure | None]:
    """The figures of runs that are not finished, as they stand."""
    begun = [run.latest for run in runs if run.metrics]
    return {key: figure([latest[key] for latest in begun]) for key in FIGURES}


def curve(
    runs: Sequence[list[dict[str, Any]]], value: Callable[[dict[str, Any]], float | None]
) -> dict[str, list[Any]] | None:
    """A value by round, over the runs that have it: `x` rounds of all phases counted on, `y` means.

    With several runs also `n`, how many have it, and `margin`, half the interval's width.
    """
    by_round: dict[int, list[float]] = {}
    for lines in runs:
        for place, line in enumerate(lines, start=1):
            if (found := value(line)) is not None and math.isfinite(found):
                by_round.setdefault(place, []).append(found)
    if not by_round:
        return None
    rounds = thinned(sorted(by_round))
    means = [interval(by_round[place]) for place in rounds]
    margins = [None if mean.margin is None else short(mean.margin) for mean in means]
    curve: dict[str, list[Any]] = {"x": rounds, "y": [short(mean.mean) for mean in means]}
    if len(runs) > 1:
        curve["n"] = [mean.count for mean in means]
    return {**curve, "margin": margins} if any(margin is not None for margin in margins) else curve


def sent(runs: Sequence[list[dict[str, Any]]]) -> dict[str, list[Any]] | None:
    """Accuracy on validation samples against the bytes sent so far up and down, both means over the runs."""
    totals = [np.cumsum([line["bytes_up"] + line["bytes_down"] for line in lines]).tolist() for lines in runs]
    told = [
        [{**line, "total": total} for line, total in zip(lines, sums, strict=True)]
        for lines, sums in zip(runs, totals, strict=True)
    ]
    accuracy = curve(told, lambda line: line["val_accuracy"])
    bytes_sent = curve(told, lambda line: line["total"] if line["val_accuracy"] is not None else None)
    if accuracy is None or bytes_sent is None:
        return None
    return {**accuracy, "round": accuracy["x"], "x": bytes_sent["y"]}


def phases_of(lines: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """[name, first round] of every phase that has begun, rounds of all phases counted on."""
    starts: list[list[Any]] = []
    for place, line in enumerate(lines, start=1):
        if not starts or starts[-1][0] != line["phase"]:
            starts.append([line["phase"], place])
    return starts


def time_by_phase(runs: Sequence[list[dict[str, Any]]]) -> list[list[Any]]:
    """[name, seconds of its rounds] of every phase, the mean over the runs that have been in it."""
    seconds: dict[str, list[float]] = {}
    for lines in runs:
        for phase in dict.fromkeys(line["phase"] for line in lines):
            seconds.setdefault(phase, []).append(sum(line["seconds"] for line in lines if line["phase"] == phase))
    return [[phase, short(math.fsum(values) / len(values))] for phase, values in seconds.items()]


def density_by_phase(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where the masks of a run let weights change: of each phase that has masks, as it was last written down."""
    last = {line["phase"]: line for line in lines if line.get("layers")}
    return [{"phase": phase, "round": line["round"], **line["layers"]} for phase, line in last.items()]


def split_of(run: Run, splits: list[dict[str, Any]], problems: list[str]) -> int | None:
    """Where in `splits` it stands who holds what in this run; None if that is not known."""
    try:
        told = read_split(run.path, run.digests)
    except InputError as error:
        problems.append(str(error))
        return None
    if told is None or not told["clients"]:
        return None
    classes = told["classes"]
    rows = [
        ",".join(str(held[key]) if (key := str(k)) in held else "" for k in range(len(classes))).rstrip(",")
        for held in told["clients"][:SHOWN_CLIENTS]
    ]
    split = {"classes": classes, "count": told["count"], "rows": rows}
    if split not in splits:
        splits.append(split)
    return splits.index(split)


def spread(results: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """How the clients of all runs of a group fare: a histogram of their accuracies, and its summary."""
    told = [result["clients"] for result in results if result.get("clients")]
    known = [one for clients in told for one in clients["accuracies"] if one is not None]
    if not known:
        return None
    counts, _ = np.histogram(known, bins=BINS, range=(0, 1))
    summary = {name: figure([clients[name] for clients in told]) for name in ("mean", "worst_tenth", "deviation")}
    return {"histogram": counts.tolist(), "count": len(known), **summary}


def command(name: str, runs: Sequence[Run], run: Run) -> str:
    """How to repeat a run from the first one's experiment.yaml, saved under the group's name."""
    stem = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "experiment"
    own = [f"seed={run.seed}"] if run.seed != runs[0].seed else []
    own += [f"threads={run.experiment.threads}"] if run.experiment.threads != runs[0].experiment.threads else []
    out = f"runs/{stem}/seed-{run.seed}" if len(runs) > 1 else f"runs/{stem}"
    return shlex.join(["fedsieve", "run", f"{stem}.yaml", *own, "--out", out])


# --------------------------------------------------------------------------------------------------- numbers


def thinned(places: Sequence[int]) -> list[int]:
    """At most POINTS of them, evenly spread, the first and the last among them."""
    if len(places) <= POINTS:
        return list(places)
    return [places[round(k)] for k in np.linspace(0, len(places) - 1, POINTS)]
