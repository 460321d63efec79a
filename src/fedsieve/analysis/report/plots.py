"""Pictures as PNG files."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")  # no window: files only
import matplotlib.pyplot as plt
import numpy as np

from fedsieve.errors import InputError
from fedsieve.federate.traffic import size
from fedsieve.files.atomic import written_atomically
from fedsieve.observe.numbers import percent

if TYPE_CHECKING:
    from fedsieve.sieve.density import Layers

COLOURS = ["#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#9c6b4e", "#6cc5b0", "#97bbf5"]


def plot_curves(runs: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """Validation accuracy and training loss by round, one line for each run; phases follow one another."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for (name, lines), colour in zip(runs.items(), COLOURS * len(runs), strict=False):
        rounds = np.arange(1, len(lines) + 1)
        for axis, key in ((left, "val_accuracy"), (right, "train_loss")):
            known = [(x, line[key]) for x, line in zip(rounds, lines, strict=True) if line[key] is not None]
            if known:
                xs, ys = zip(*known, strict=True)
                style = ".-" if len(xs) < 60 else "-"
                axis.plot(xs, ys, style, color=colour, label=name, linewidth=1.8, markersize=4)
        starts = [i + 1 for i in range(1, len(lines)) if lines[i]["phase"] != lines[i - 1]["phase"]]
        for start in starts:
            for axis in (left, right):
                axis.axvline(start - 0.5, color="#bbbbbb", linewidth=0.8, linestyle=":", zorder=0)
    for axis, label in ((left, "validation accuracy"), (right, "training loss")):
        axis.set_xlabel("round")
        axis.set_ylabel(label)
        without_frame(axis)
    left.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    left.legend(frameon=False)
    save_figure(figure, path)


def plot_drift(runs: Mapping[str, list[dict[str, Any]]], path: Path, phase: str) -> None:
    """How far clients drift in each round of a phase (mean, and from the least to the most), and their mean cosine."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for (name, lines), (colour, style) in zip(runs.items(), _styles(len(runs)), strict=True):
        rounds = [line for line in lines if line["phase"] == phase]
        xs = [line["round"] for line in rounds]
        left.plot(xs, [line["drift_mean"] for line in rounds], style, color=colour, label=name, markersize=4)
        drifts = [list(line["drift"].values()) if line.get("drift") else [line["drift_mean"]] for line in rounds]
        left.fill_between(xs, [min(one) for one in drifts], [max(one) for one in drifts], color=colour, alpha=0.08)
        known = [(line["round"], line["cosine"]) for line in rounds if line.get("cosine") is not None]
        if known:
            right.plot(*zip(*known, strict=True), style, color=colour, label=name, markersize=4)
    left.set_ylabel("drift of a client")
    right.set_ylabel("mean cosine of two clients' updates")
    for axis in (left, right):
        axis.set_xlabel(f"round of {phase}")
        axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
        without_frame(axis)
    left.legend(frameon=False)
    save_figure(figure, path)


def plot_bytes(runs: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """Validation accuracy against all bytes sent so far, up and down; a ring where a new phase begins."""
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for (name, lines), (colour, style) in zip(runs.items(), _styles(len(runs)), strict=True):
        sent = np.cumsum([line["bytes_up"] + line["bytes_down"] for line in lines])
        known = [i for i, line in enumerate(lines) if line["val_accuracy"] is not None]
        accuracies = np.array([lines[i]["val_accuracy"] for i in known])
        axis.plot(sent[known], accuracies, style, color=colour, label=name, markersize=4)
        starts = [k for k in range(1, len(known)) if lines[known[k]]["phase"] != lines[known[k] - 1]["phase"]]
        axis.plot(sent[known][starts], accuracies[starts], "o", color=colour, fillstyle="none", markersize=9)
    axis.set_xscale("log")
    axis.set_xlabel("bytes sent, up and down")
    axis.set_ylabel("validation accuracy")
    axis.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda count, _: size(count).replace(".0", "")))
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    without_frame(axis)
    axis.legend(frameon=False)
    save_figure(figure, path)


def _styles(count: int) -> list[tuple[str, str]]:
    """A colour and a kind of line for each of `count` curves."""
    return [(COLOURS[i % len(COLOURS)], (".-", ".--", ".:")[i // len(COLOURS) % 3]) for i in range(count)]


def without_frame(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#eeeeee")


def plot_split(counts: np.ndarray, path: Path) -> None:
    """Who holds which classes: one row per client, one column per class, darker is more samples."""
    figure, axis = plt.subplots(figsize=(8, 6), layout="constrained")
    shown = np.where(counts == 0, np.nan, counts)
    picture = axis.imshow(shown, aspect="auto", cmap="viridis_r", interpolation="nearest", vmin=0)
    for numbered in (axis.xaxis, axis.yaxis):
        numbered.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))  # there is no client 2.5
    axis.set_xlabel("class")
    axis.set_ylabel("client")
    axis.set_title(
        f"{int(counts.sum()):,} samples, {counts.shape[0]:,} clients, {counts.shape[1]:,} classes", loc="left"
    )
    figure.colorbar(picture, label="samples", shrink=0.8)
    save_figure(figure, path)


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
    axis.set_facecolor("#eeeeee")  # of what the mask does not cover
    top = float(np.nanmax(cells, initial=0)) or 1.0
    picture = axis.imshow(cells, aspect="auto", cmap="viridis_r", interpolation="nearest", vmin=0, vmax=top)
    for (row, column), share in np.ndenumerate(cells):
        colour = "white" if share > 0.5 * top else "black"  # to be read on dark and on light
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
