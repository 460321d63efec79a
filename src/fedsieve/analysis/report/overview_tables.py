"""Tables for the terminal of what `overview` describes: groups of runs, and their phases."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fedsieve.analysis.report.tables import Name, columns_of, signed, with_margin
from fedsieve.analysis.statistics import Interval
from fedsieve.federate.traffic import size
from fedsieve.observe.numbers import duration, percent


def groups_table(groups: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each group of runs that differ only in the seed, as `report.overview` describes them."""
    scores = {"test accuracy": "test_accuracy"}
    if any(group["latest"] for group in groups):  # of which most have not been tested yet
        scores["validation"] = "val_accuracy"
    table = columns_of(["runs", "seeds", *scores, "sent up", "time", "state"])
    table.columns[0].overflow = "fold"
    for group in groups:
        figures = group["latest"] or group["figures"]
        cells = [_cell(figures[name], percent) for name in scores.values()]
        cells += [_cell(figures[name], show, False) for name, show in (("bytes_up", size), ("seconds", duration))]
        table.add_row(Name(group["name"]), str(len(group["seeds"])), *cells, group["state"])
    return table


def gains_table(groups: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each phase of each group: the accuracy before and after it. The page has bytes and times as well.

    The gain is that on test samples; where it is not known, that on validation samples, which is marked.
    """
    table = columns_of(["runs", "phase", "rounds", "validation", "test", "gain (points)"], "accuracy by phase")
    table.columns[0].overflow = "fold"
    for group in groups:
        for place, phase in enumerate(group["gains"]):
            cells = [_before_and_after(phase[score]) for score in ("val", "test")]
            cells.append(_gain(phase))
            table.add_row(Name("" if place else group["name"]), Text(phase["name"]), rounds_of(phase), *cells)
        table.add_section()
    for column in table.columns[2:]:
        column.no_wrap = True
    return table


def rounds_of(phase: Mapping[str, Any]) -> str:
    """`10`, or `3 of 10` while it goes on."""
    return f"{phase['rounds'][0]:g}" + (f" of {phase['of']}" if phase["of"] is not None else "")


def _gain(phase: Mapping[str, Any]) -> str:
    """`+1.5 ± 0.4`, or `val +1.5 ± 0.4`."""
    tested = phase["test"]["gain"]
    found = tested or phase["val"]["gain"]
    if found is None:
        return "–"
    return ("" if tested else "val ") + signed(_interval(found), lambda share: f"{100 * share:.1f}")


def _before_and_after(score: Mapping[str, Any]) -> str:
    """`75.1 → 86.4%`."""
    before, after = (_cell(score[name], percent, False) for name in ("before", "after"))
    return after if before == "–" else f"{before.removesuffix('%')} → {after}"


def _cell(found: Sequence[Any] | None, show: Callable[[float], str], has_margin: bool = True) -> str:
    """A figure of `report.overview`."""
    return "–" if found is None else with_margin(_interval(found), show) if has_margin else show(found[0])


def _interval(found: Sequence[Any]) -> Interval:
    return Interval(mean=found[0], margin=found[1], count=found[2])
