"""Rebuild docs/claims.md and its pictures from the raw results in docs/results.

    make claims

What each claim is, who says it and which runs decide it stands in docs/claims/claims.yaml; the figures are computed
here. To measure anew:

    fedsieve sweep docs/claims/NAME.yaml data.path=PATH/TO/cifar-100-python --out DIR/NAME
    python scripts/claims.py --take DIR/NAME        # its results, without paths, as docs/results/NAME.json
"""

import argparse
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import yaml

from fedsieve.analysis.report.palette import COLOURS, in_page_colours, page_colour
from fedsieve.analysis.report.plots import save_figure, without_frame
from fedsieve.analysis.statistics import Interval, holm, interval, paired
from fedsieve.analysis.sweep.run_sweep import in_lines
from fedsieve.federate.traffic import size
from fedsieve.files.atomic import write_text

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOUBT = 0.05  # a difference with a larger p value is not significant


# ------------------------------------------------------------------------------------------- raw results


def take(folder: Path) -> Path:
    """Copy a sweep's results into docs/results, without what depends on the machine."""
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    found["experiment"] = Path(found["experiment"]).name
    found["set"] = {key: value for key, value in found["set"].items() if key not in ("data.path", "model.backbone")}
    path = DOCS / "results" / f"{folder.resolve().name}.json"
    path.parent.mkdir(exist_ok=True)
    write_text(path, in_lines(found))
    return path


@dataclass(frozen=True)
class Cell:
    """An arm of a sweep: runs that differ only in their seed."""

    arm: dict[str, Any]
    measure: str = "test_accuracy"

    @cached_property
    def accuracies(self) -> dict[int, float]:
        return {int(seed): run[self.measure] for seed, run in self.arm["seeds"].items()}

    @cached_property
    def validation(self) -> dict[int, float]:
        """The accuracies on the validation images, at the same moment as `accuracies`; {} where it is not known."""
        return {int(seed): run["val_accuracy"] for seed, run in self.arm["seeds"].items()} if self.is_last else {}

    @property
    def is_last(self) -> bool:
        """Whether it is measured at the end of the runs."""
        return self.measure == "test_accuracy"

    @property
    def before(self) -> dict[int, float] | None:
        """The accuracies at the last phase's start; None without a phase before it, or if they are the measure."""
        values = {int(seed): run["test_accuracy_before"] for seed, run in self.arm["seeds"].items()}
        return None if None in values.values() or self.measure == "test_accuracy_before" else values

    @property
    def chosen(self) -> str:
        """What the search chose for what is measured; nothing for what came before it."""
        chosen = self.arm["chosen"] if self.is_last else None
        return ", ".join(f"{short_name(key)} {value}" for key, value in (chosen or {}).items())

    def mean_of(self, key: str, seeds: set[str] | None = None) -> float:
        """Over all its seeds, or over these."""
        values = [run[key] for seed, run in self.arm["seeds"].items() if seeds is None or seed in seeds]
        return sum(values) / len(values)


def short_name(key: str) -> str:
    """Of a setting that was searched: `lr`, `server lr`, `mu`."""
    return ("server " if "server_optimizer" in key else "") + key.rpartition(".")[2]


@cache
def results(sweep: str) -> dict[str, Any] | None:
    """None while nothing is measured."""
    path = DOCS / "results" / f"{sweep}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def find(*specs: dict[str, Any]) -> Cell | None:
    """The arm that all of these describe, each {sweep: …, where: {key: value}, measure: …}.

    The first that names a sweep, or several, decides which. Keys that a sweep leaves as they are may have any value.
    """
    where = {key: value for spec in specs for key, value in spec.get("where", {}).items()}
    fitting = [
        arm
        for sweep in sweeps_of(next(spec for spec in specs if "sweep" in spec))
        if (found := results(sweep)) is not None
        for arm in found["arms"]
        if all({**found["set"], **arm["values"]}.get(key, value) == value for key, value in where.items())
    ]
    assert len(fitting) <= 1, f"{specs}: {len(fitting)} arms fit {where}"
    measure = next((spec["measure"] for spec in specs if "measure" in spec), "test_accuracy")
    return Cell(fitting[0], measure) if fitting and fitting[0]["seeds"] else None


def sweeps_of(spec: dict[str, Any]) -> list[str]:
    named = spec.get("sweep", [])
    return [named] if isinstance(named, str) else named


@dataclass(frozen=True)
class Study:
    """The runs that decide a claim, as a table: rows are compared with each other within each column."""

    rows: dict[str, dict[str, Any]]
    columns: dict[str, dict[str, Any]]
    baseline: str

    def cell(self, row: str, column: str) -> Cell | None:
        return find(self.rows[row], self.columns[column])

    def row(self, row: str) -> list[Cell | None]:
        return [self.cell(row, column) for column in self.columns]

    def cells(self, column: str) -> dict[str, Cell]:
        found = {row: self.cell(row, column) for row in self.rows}
        return {row: cell for row, cell in found.items() if cell is not None}

    @property
    def sweeps(self) -> list[str]:
        specs = (*self.rows.values(), *self.columns.values())
        return list(dict.fromkeys(sweep for spec in specs for sweep in sweeps_of(spec)))


# ------------------------------------------------------------------------------------------------ tables


def points(value: float, sign: bool = False) -> str:
    return f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}"


def with_margin(about: Interval, sign: bool = False) -> str:
    return points(about.mean, sign) + ("" if about.margin is None else f" ± {points(about.margin)}")


def chance(p: float | None) -> str:
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def may_be_chance(p: float | None) -> bool:
    """Without a p value, as with a single seed, nothing is known, so it may be."""
    return p is None or p > DOUBT


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def accuracy_table(study: Study) -> list[str]:
    """Mean test accuracy ± 95% interval, and the learning rate that was chosen."""

    def text(cell: Cell | None) -> str:
        if cell is None:
            return "–"
        return with_margin(interval(list(cell.accuracies.values()))) + (f" ({cell.chosen})" if cell.chosen else "")

    rows = [[row, *(text(study.cell(row, column)) for column in study.columns)] for row in study.rows]
    return table(["test accuracy, %", *study.columns], rows)


def difference_table(study: Study) -> list[str]:
    """Each row less the baseline over the same seeds, on the test images and on the validation images."""
    rows = [row for row in study.rows if row != study.baseline]
    lines = []
    for images, of in (("test", lambda cell: cell.accuracies), ("validation", lambda cell: cell.validation)):
        title = f"points more than *{study.baseline}*, paired, {images} images"
        lines += compared(study, title, rows, of, lambda _, cells, of=of: of(cells[study.baseline]))
    return lines


def gain_table(study: Study) -> list[str]:
    """Each row less what it began with, the same seeds' accuracies before the last phase; no lines if none had one."""
    rows = [row for row in study.rows if any(cell and cell.before for cell in study.row(row))]
    title = "points more than before the phase, paired, test images"
    return compared(study, title, rows, lambda cell: cell.accuracies, lambda cell, _: cell.before)


def compared(
    study: Study,
    title: str,
    rows: list[str],
    of: Callable[[Cell], dict[int, float]],
    reference: Callable[[Cell, dict[str, Cell]], dict[int, float] | None],  # from a cell and those of its column
) -> list[str]:
    """Mean differences with intervals; p values are corrected for the number of rows in a column (Holm)."""
    if not rows:
        return []
    texts: dict[str, list[str]] = {row: [row] for row in rows}
    for column in study.columns:
        cells, tests = study.cells(column), {}
        for row in rows:
            other = reference(cells[row], cells) if row in cells else None
            tests[row] = paired(of(cells[row]), other) if other else None
        corrected = dict(zip(rows, holm([test.p if test else None for test in tests.values()]), strict=True))
        for row, test in tests.items():
            told = "–" if test is None else f"{with_margin(test.difference, True)} (p {chance(corrected[row])})"
            texts[row].append(told)
    return [*table([title, *study.columns], list(texts.values())), ""]


def bench_table(names: list[str]) -> list[str]:
    """Rows of bench/results.json: ratios of times measured in turns, with their middle half."""
    known = {
        row["what"]: row
        for row in json.loads((ROOT / "bench" / "results.json").read_text(encoding="utf-8"))["sieve"]["rows"]
    }
    rows = []
    for name in names:
        row = known[name]
        rows.append([name, row["to"], f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"])
    return table(["", "of the time of", "ratio (half of the turns)"], rows)


# ---------------------------------------------------------------------------------------------- pictures


@in_page_colours
def picture(study: Study, path: Path, one_scale: bool) -> bool:
    """A panel for each column: means and intervals, the single runs behind them, and the head alone as a line.

    Panels have a scale each, on which small differences between rows show, or one for all.
    """
    columns = [column for column in study.columns if study.cells(column)]
    if not columns:
        return False
    shape = (3.1 * len(columns) + 1.4, 1.3 + 0.36 * len(study.rows))
    figure, (axes,) = plt.subplots(
        1, len(columns), figsize=shape, layout="constrained", squeeze=False, sharex=one_scale
    )
    for axis, column in zip(axes, columns, strict=True):
        for place, (row, colour) in enumerate(zip(study.rows, COLOURS * len(study.rows), strict=False)):
            if (cell := study.cell(row, column)) is None:
                continue
            values = [100 * value for value in cell.accuracies.values()]
            about = interval(values)
            axis.plot(values, [place] * len(values), ".", color=colour, alpha=0.35)
            axis.errorbar(about.mean, place, xerr=about.margin, fmt="o", color=colour, capsize=3)
            if cell.before is not None:
                began = 100 * sum(cell.before.values()) / len(cell.before)
                axis.vlines(began, place - 0.4, place + 0.4, page_colour("quiet"), ":", linewidth=1.2, zorder=0)
        axis.set_title(column, loc="left", fontsize="medium")
        axis.set_yticks(range(len(study.rows)), list(study.rows) if axis is axes[0] else [""] * len(study.rows))
        axis.set_ylim(len(study.rows) - 0.5, -0.5)
        axis.set_xlabel("test accuracy, %")
        without_frame(axis)
    save_figure(figure, path)
    return True


# ---------------------------------------------------------------------------------------------- the page


def section(claim: dict[str, Any], docs: Path) -> list[str]:
    """One claim: what is said, what was run, what came out, and the verdict."""
    lines = [f"## {claim['title']}", "", f"**Claimed.** {claim['claimed'].strip()}", ""]
    if "bench" in claim:
        lines += [f"**Run.** {claim['run'].strip()}", "", *bench_table(claim["bench"]), ""]
    else:
        study = Study(claim["rows"], claim["columns"], claim["baseline"])
        files = ", ".join(f"[{sweep}](claims/{sweep}.yaml)" for sweep in study.sweeps)
        lines += [f"**Run.** {files}. {claim.get('run', '').strip()}".rstrip(), ""]
        lines += [*accuracy_table(study), "", *difference_table(study), *gain_table(study)]
        if picture(study, docs / "claims" / f"{claim['name']}.png", claim.get("one_scale", False)):
            lines += [f"![{claim['title']}](claims/{claim['name']}.png)", ""]
    return [*lines, f"**Verdict: {claim['verdict'].strip()}**", claim["why"].strip(), ""]


def anchor(title: str) -> str:
    """What a heading is linked by: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def kept(active: float, weights: int) -> float:
    """Bytes of momentum and positions that SparseSGDM keeps for single weights, so many of which are active."""
    return weights * (4.0 if active == 1 else 8 * active if 3 * active <= 2 else 4 + 4 * (1 - active))


def best_of(cells: dict[str, Cell]) -> str:
    """By validation accuracy over the seeds that all have: others are measured on other images."""
    common = set.intersection(*(set(cell.arm["seeds"]) for cell in cells.values()))
    return max(cells, key=lambda label: cells[label].mean_of("val_accuracy", common))


def guidelines(spec: dict[str, Any]) -> list[str]:
    """For each kind of data and each budget: the best by validation accuracy, and what may be as good.

    A budget that is narrower than the one before it, but for which the same is best, is left out. With all of the
    backbone frozen there is no phase, so nothing is sent in it.
    """
    rows = []
    for column, where in spec["columns"].items():
        found = {label: find(candidate, where) for label, candidate in spec["candidates"].items()}
        cells = {label: cell for label, cell in found.items() if cell is not None}
        active = {label: 1 - spec["candidates"][label]["frozen"] for label in cells}
        sends = {label: cell.mean_of("phase_bytes_up") if active[label] else 0 for label, cell in cells.items()}
        keeps = {label: kept(active[label], spec["weights"]) for label in cells}
        last = None
        for budget in spec["budgets"]:
            sent, memory = budget.get("sent", math.inf), budget.get("kept", math.inf)
            within = {label: cell for label, cell in cells.items() if sends[label] <= sent and keeps[label] <= memory}
            if not within or (best := best_of(within)) == last:
                continue
            last, cell, candidate = best, within[best], spec["candidates"][best]
            tests = {label: paired(other.accuracies, cell.accuracies) for label, other in within.items()}
            alike = [label for label, test in tests.items() if label != best and test and may_be_chance(test.p)]
            limit = f"{size(sent)}, {size(memory)}" if budget else "none"
            takes = [candidate["rule"], f"{candidate['frozen']:.0%}", candidate["calibration"], candidate["steps"]]
            gain = paired(cell.accuracies, cell.before or {})
            brings = with_margin(gain.difference, sign=True) if gain else "–"
            accuracy = with_margin(interval(list(cell.accuracies.values())))
            costs = [size(sends[best]), size(keeps[best])]
            rows.append([column, limit, *map(str, takes), accuracy, brings, *costs, "; ".join(alike) or "–"])
    head = ["data", "limits", "rule", "frozen", "calibration rounds", "J", "test accuracy, %", "more than before"]
    return table([*head, "sent up", "optimizer keeps", "not significantly different from it"], rows)


def build(docs: Path) -> str:
    """The page, with its pictures drawn into `docs`/claims."""
    spec = yaml.safe_load((DOCS / "claims" / "claims.yaml").read_text(encoding="utf-8"))
    decided = [claim for claim in spec["claims"] if "verdict" in claim]  # none is given before all its runs are done
    summary = [[f"[{claim['title']}](#{anchor(claim['title'])})", claim["verdict"].strip()] for claim in decided]
    lines = [
        "# What holds, and what does not",
        "",
        spec["introduction"].strip(),
        "",
        *table(["", "verdict"], summary),
        "",
    ]
    for claim in decided:
        lines += section(claim, docs)
    advice = spec["guidelines"]
    if "conclusion" in advice:
        lines += ["## Guidelines", "", advice["introduction"].strip(), "", *guidelines(advice), ""]
        lines += [advice["conclusion"].strip(), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Rebuild docs/claims.md from docs/results.")
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder to write to; default: docs")
    parser.add_argument("--take", type=Path, nargs="+", metavar="DIR", help="first copy the results of these sweeps")
    options = parser.parse_args()
    for folder in options.take or []:
        print(f"taken: {take(folder).name}")
    write_text(options.out / "claims.md", build(options.out))
    print(f"written to {options.out / 'claims.md'}")
