"""Pictures as PNG files, in the colours of the pages."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib  # palette has told it to draw to files only
import matplotlib.pyplot as plt
import numpy as np

from fedsieve.analysis.report.palette import (
    HEAT,
    HEAT_TURNS,
    in_page_colours,
    line_styles,
    page_colour,
    where_equal,
)
from fedsieve.errors import InputError
from fedsieve.federate.traffic import size
from fedsieve.files.atomic import written_atomically
from fedsieve.observe.numbers import percent

if TYPE_CHECKING:
    from fedsieve.sieve.density import Layers

Lines = list[dict[str, Any]]  # of metrics
Curve = dict[Any, float]  # x to y
SHOWN = {"val_accuracy": "validation accuracy", "train_loss": "training loss"}


@in_page_colours
def plot_curves(runs: Mapping[str, Lines], path: Path) -> None:
    """Validation accuracy and training loss by round, one line for each run, with a column for each phase.

    Phases have axes of their own, since the first one's changes are far larger. Each begins with the accuracy that the
    phase before it ended with.
    """
    phases = {name: list(dict.fromkeys(line["phase"] for line in lines)) for name, lines in runs.items()}
    count = max(map(len, phases.values()))
    figure, axes = plt.subplots(2, count, figsize=(5.2 * count, 6.6), layout="constrained", squeeze=False, sharex="col")
    for place in range(count):
        there = {name: named[place] for name, named in phases.items() if place < len(named)}
        for axis, (key, label) in zip(axes[:, place], SHOWN.items(), strict=True):
            curves = {name: curve_in(runs[name], phase, key) for name, phase in there.items()}
            _draw(axis, curves, dict(zip(runs, line_styles(len(runs)), strict=True)))
            axis.set_ylabel(label)
            without_frame(axis)
        axes[0, place].set_title(f"phase {place + 1}: {' / '.join(dict.fromkeys(there.values()))}", loc="left")
        axes[0, place].xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes[0, place].yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
        axes[1, place].set_xlabel("round of the phase")
        _set_log(axes[1, place])
    handles = {text: line for axis in axes[0] for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(3, len(handles)))
    save_figure(figure, path)


def curve_in(lines: Lines, phase: str, key: str) -> Curve:
    """A value by round of a phase; round 0 is the accuracy at the end of the phase before."""
    first = next(place for place, line in enumerate(lines) if line["phase"] == phase)
    before = {0: lines[first - 1][key]} if first and key.endswith("accuracy") else {}
    found = before | {line["round"]: line[key] for line in lines if line["phase"] == phase}
    return {round: value for round, value in found.items() if value is not None}


def _draw(axis: Any, curves: Mapping[str, Curve], styles: Mapping[str, tuple[str, str]]) -> None:
    """One line for each curve, in its colour and with its marker; dashed if it lies on another."""
    for (name, curve), look in zip(curves.items(), where_equal(list(curves.values())), strict=True):
        colour, marker = styles[name]
        look |= {"color": colour, "marker": marker, "markersize": 4.5, "linewidth": 1.8}
        axis.plot(list(curve), list(curve.values()), label=name, **look)


def _set_log(axis: Any) -> None:
    """A logarithmic scale with plain numbers, if there is nothing that it cannot show."""
    values = np.concatenate([line.get_ydata() for line in axis.lines] or [np.ones(1)])
    if values.min() <= 0:
        return
    axis.set_yscale("log")
    is_short = values.max() / values.min() < 300
    axis.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5) if is_short else (1,)))
    axis.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())


@in_page_colours
def plot_drift(runs: Mapping[str, Lines], path: Path, phase: str) -> None:
    """How far clients drift in each round of a phase (mean, and from the least to the most), and their mean cosine."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    rounds = {name: [line for line in lines if line["phase"] == phase] for name, lines in runs.items()}
    styles = dict(zip(runs, line_styles(len(runs)), strict=True))
    for axis, key in ((left, "drift_mean"), (right, "cosine")):
        curves = {
            name: {line["round"]: line[key] for line in lines if line.get(key) is not None}
            for name, lines in rounds.items()
        }
        _draw(axis, curves, styles)
    for name, lines in rounds.items():
        drifts = [list(line["drift"].values()) if line.get("drift") else [line["drift_mean"]] for line in lines]
        ends = [min(one) for one in drifts], [max(one) for one in drifts]
        left.fill_between([line["round"] for line in lines], *ends, color=styles[name][0], alpha=0.08)
    left.set_ylabel("drift of a client")
    right.set_ylabel("mean cosine of two clients' updates")
    for axis in (left, right):
        axis.set_xlabel(f"round of {phase}")
        axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
        without_frame(axis)
    left.legend()
    save_figure(figure, path)


@in_page_colours
def plot_bytes(runs: Mapping[str, Lines], path: Path) -> None:
    """Validation accuracy against all bytes sent so far, up and down; a ring where a new phase begins."""
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    styles = dict(zip(runs, line_styles(len(runs)), strict=True))
    curves = {}
    for name, lines in runs.items():
        sent = np.cumsum([line["bytes_up"] + line["bytes_down"] for line in lines]).tolist()
        known = [place for place, line in enumerate(lines) if line["val_accuracy"] is not None]
        curves[name] = {sent[place]: lines[place]["val_accuracy"] for place in known}
        starts = [place for place in known[1:] if lines[place]["phase"] != lines[place - 1]["phase"]]
        rings = [sent[place] for place in starts], [lines[place]["val_accuracy"] for place in starts]
        axis.plot(*rings, "o", color=styles[name][0], fillstyle="none", markersize=10)
    _draw(axis, curves, styles)
    axis.set_xscale("log")
    axis.set_xlabel("bytes sent, up and down")
    axis.set_ylabel("validation accuracy")
    axis.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda count, _: size(count).replace(".0", "")))
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    without_frame(axis)
    axis.legend()
    save_figure(figure, path)


def without_frame(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color=page_colour("faint"))


@in_page_colours
def plot_split(counts: np.ndarray, classes: Sequence[str], path: Path) -> None:
    """Who holds which classes: one row per client, one column per class, darker is more samples."""
    figure, axis = plt.subplots(figsize=(max(8, min(16, 0.16 * len(classes))), 6), layout="constrained")
    shown = np.where(counts == 0, np.nan, counts)
    axis.set_facecolor(page_colour("faint"))
    picture = axis.imshow(shown, aspect="auto", cmap=HEAT, interpolation="nearest", vmin=0)
    axis.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))  # there is no client 2.5
    every = -(-len(classes) // 100)  # as many names as there is room for
    names = [name if len(name) <= 16 else f"{name[:15]}…" for name in classes[::every]]
    lies = sum(map(len, names)) + 2 * len(names) < 80
    small = {} if len(names) <= 50 else {"fontsize": 7}
    axis.set_xticks(range(0, len(classes), every), names, rotation=0 if lies else 90, parse_math=False, **small)
    axis.set_xlabel("class")
    axis.set_ylabel("client")
    axis.set_title(
        f"{int(counts.sum()):,} samples, {counts.shape[0]:,} clients, {counts.shape[1]:,} classes", loc="left"
    )
    whole = matplotlib.ticker.MaxNLocator(integer=True)
    figure.colorbar(picture, label="samples", shrink=0.8, ticks=whole)
    save_figure(figure, path)


@in_page_colours
def plot_density(layers: "Layers", path: Path) -> None:
    """Where a mask lets weights change: one row per block, one column per layer, darker is denser."""
    rows = {str(block): dict(row) for block, row in layers.blocks.items()}
    title = [f"{percent(layers.total)} of the weights may change"]
    for row in rows.values():
        del row["all"]
    if rows:
        title.append(", ".join(f"{name} {percent(share)}" for name, share in layers.rest.items() if share is not None))
    else:
        rows = {name: {"all": share} for name, share in layers.rest.items()}
    columns = list(next(iter(rows.values())))
    cells = np.array([[np.nan if share is None else share for share in row.values()] for row in rows.values()])
    figure, axis = plt.subplots(figsize=(4 + 0.6 * len(columns), 1.6 + 0.36 * len(rows)), layout="constrained")
    axis.set_facecolor(page_colour("faint"))  # of what the mask does not cover
    top = float(np.nanmax(cells, initial=0)) or 1.0
    picture = axis.imshow(cells, aspect="auto", cmap=HEAT, interpolation="nearest", vmin=0, vmax=top)
    for (row, column), share in np.ndenumerate(cells):
        colour = "white" if share > HEAT_TURNS * top else "black"  # to be read on dark and on light
        axis.text(column, row, percent(None if np.isnan(share) else share), ha="center", va="center", color=colour)
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), list(rows))
    axis.set_ylabel("block" if layers.blocks else "")
    axis.set_title("\n".join(filter(None, title)), loc="left", fontsize="medium")
    figure.colorbar(picture, label="may change", format=matplotlib.ticker.PercentFormatter(1.0))
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_atomically(path) as partial:
            figure.savefig(partial, dpi=150, format="png")
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); give another file name") from None
    finally:
        plt.close(figure)
