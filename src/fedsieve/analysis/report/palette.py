"""The colours of the pages (web/style.css, in light mode) for pictures, and what pictures look like."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window: files only
from matplotlib.colors import LinearSegmentedColormap

DASH = 3.0  # times the width of a line
MARKERS = 14  # on a curve, about, as on the pages


@cache
def page_colours() -> dict[str, str]:
    """By their names in the style: `c0` to `c7` for groups, `ink`, `paper`, `heat-high`, …"""
    style = (files("fedsieve.analysis.report") / "web" / "style.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([a-z0-9-]+): light-dark\((#[0-9a-f]{6}),", style))


def page_colour(name: str) -> str:
    return page_colours()[name]


COLOURS = [page_colour(f"c{place}") for place in range(8)]
HEAT = LinearSegmentedColormap.from_list("heat", [page_colour("heat-low"), page_colour("heat-high")])
HEAT_TURNS = 0.7  # where white is easier to read on it than black
LOOKS: dict[str, Any] = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), page_colour("paper")),
    **dict.fromkeys(("text.color", "axes.titlecolor"), page_colour("ink")),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), page_colour("quiet")),
    "grid.color": page_colour("faint"),
    "legend.frameon": False,
}
in_page_colours = matplotlib.rc_context(LOOKS)  # decorates functions that draw; other pictures stay as they are


def line_styles(count: int) -> list[tuple[str, str]]:
    """A colour and a marker for each of `count` curves, as the pages have them."""
    return [(COLOURS[place % len(COLOURS)], "os^D"[place % 4]) for place in range(count)]


def where_equal(curves: Sequence[Mapping[Any, float]]) -> list[dict[str, Any]]:
    """What tells curves ({x: y}) apart that lie on each other for a while: dashes and markers side by side.

    The first of them is drawn in full. Returns arguments of matplotlib's `plot` for each curve.
    """
    looks = []
    for place, curve in enumerate(curves):
        below = sum(_lies_on(curve, other) for other in curves[:place])
        count = below + sum(_lies_on(other, curve) for other in curves[place + 1 :]) + 1
        every = max(-(-len(curve) // MARKERS), count)
        dashes = (-DASH * (below - 1), (DASH, DASH * (count - 1))) if below else "-"
        looks.append({"linestyle": dashes, "markevery": (below * every // count, every)})
    return looks


def _lies_on(one: Mapping[Any, float], other: Mapping[Any, float]) -> bool:
    same = sum(other.get(x) == y for x, y in one.items())
    return same > 2 or (same == 2 and len(one) < 4)
