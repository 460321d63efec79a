"""A comparison of runs as JSON, CSV and LaTeX."""

import csv
import io
from typing import Any

from fedsieve.analysis.compare import Comparison, Group, short
from fedsieve.analysis.statistics import LEVEL, Interval
from fedsieve.runs.read import FIGURES


def as_data(comparison: Comparison) -> dict[str, Any]:
    """All there is to know, for `--json`."""
    return {
        "metric": comparison.metric,
        "level": LEVEL,
        "by": comparison.keys,
        "groups": [_group(group, comparison) for group in comparison.groups],
        "unfinished": [
            {"path": str(run.path), "round": len(run.metrics), "of": run.rounds} for run in comparison.unfinished
        ],
        "warnings": comparison.warnings,
    }


def _group(group: Group, comparison: Comparison) -> dict[str, Any]:
    difference = group.difference
    return {
        "name": group.name,
        "settings": {key: group.runs[0].settings.get(key) for key in comparison.keys},
        "is_baseline": group is comparison.baseline,
        "n": len(group.runs),
        "runs": [str(run.path) for run in group.runs],
        "seeds": [run.seed for run in group.runs],
        "figures": {
            name: {**_limits(mean), "values": [result[name] for result in group.results]}
            for name, mean in group.means.items()
        },
        "difference": difference
        and {
            **_limits(difference.difference),
            "pairs": difference.difference.count,
            "p": difference.p,
            "p_holm": group.corrected,
        },
    }


def _limits(mean: Interval) -> dict[str, float | None]:
    return {"mean": mean.mean, "low": mean.low, "high": mean.high}


def as_csv(comparison: Comparison) -> str:
    """One line for each group, every number with all its digits; what is not known is empty."""
    parts = ("mean", "low", "high")
    columns = ["name", *comparison.keys, "n", "seeds", *(f"{name}_{part}" for name in FIGURES for part in parts)]
    columns += ["baseline", *(f"difference_{part}" for part in parts), "pairs", "p", "p_holm"]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    for group in as_data(comparison)["groups"]:
        settings = [group["settings"][key] for key in comparison.keys]
        figures = [group["figures"].get(name, {}).get(part) for name in FIGURES for part in parts]
        difference = [(group["difference"] or {}).get(part) for part in (*parts, "pairs", "p", "p_holm")]
        seeds = " ".join(map(str, group["seeds"]))
        writer.writerow([group["name"], *settings, group["n"], seeds, *figures, int(group["is_baseline"]), *difference])
    return file.getvalue()


# ---------------------------------------------------------------------------------------------- LaTeX

SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
LATEX_COLUMNS: dict[str, tuple[str, float, int]] = {
    # what a figure is called, what it is multiplied by, and how many decimals are kept: as in the other tables
    "test_accuracy": (r"test accuracy (\%)", 100, 1),
    "test_loss": ("test loss", 1, 3),
    "best_val_accuracy": (r"best validation (\%)", 100, 1),
    "bytes_up": ("up (MB)", 1e-6, 1),
    "bytes_down": ("down (MB)", 1e-6, 1),
    "seconds": ("time (s)", 1, 1),
}
OTHER_FIGURES = {"val_accuracy": (r"validation accuracy (\%)", 100, 1), "val_loss": ("validation loss", 1, 3)}


def escaped(text: str) -> str:
    """Text as LaTeX prints it."""
    return "".join(SPECIAL.get(character, character) for character in text)


def as_latex(comparison: Comparison) -> str:
    """A table with booktabs' lines, to be put into a `table` of one's own."""
    name, factor, decimals = (LATEX_COLUMNS | OTHER_FIGURES)[comparison.metric]
    first = [*map(escaped, short(comparison.shown))] or ["runs"]
    titles = [*first, "$n$", *(title for title, _, _ in LATEX_COLUMNS.values())]
    titles += [f"difference in {name}", "$p$ (Holm)"]
    lines = [_row(titles), r"\midrule"]
    for group in comparison.groups:
        told = [group.values[key] for key in comparison.shown] or [group.name]
        cells = [*map(escaped, told), str(len(group.runs))]
        cells += [_mean(group.means.get(figure), by, digits) for figure, (_, by, digits) in LATEX_COLUMNS.items()]
        difference = group.difference.difference if group.difference else None
        cells += [_mean(difference, factor, decimals, "+"), _chance(group.corrected)]
        lines.append(_row(cells))
    alignment = "l" * len(first) + "r" * (len(titles) - len(first))
    opening = ["% \\usepackage{booktabs}; ± is the 95% interval of the mean", rf"\begin{{tabular}}{{{alignment}}}"]
    return "\n".join([*opening, r"\toprule", *lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _row(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _mean(mean: Interval | None, factor: float, decimals: int, sign: str = "") -> str:
    if mean is None:
        return "--"
    value = f"{factor * mean.mean:{sign}.{decimals}f}"
    return f"${value}$" if mean.margin is None else rf"${value} \pm {factor * mean.margin:.{decimals}f}$"


def _chance(p: float | None) -> str:
    return "--" if p is None else "$<0.001$" if p < 0.001 else f"${p:.3f}$"
