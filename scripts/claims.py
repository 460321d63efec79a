"""Rebuild docs/claims.md and its pictures from the raw results in docs/results.

    make claims

What each claim is, who says it and which runs decide it stands in docs/claims/claims.yaml; the figures are computed
here. To measure anew: `fedsieve sweep docs/claims/NAME.yaml --out DIR`, then copy DIR/results.json to
docs/results/NAME.json.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import yaml

from fedsieve.federate.traffic import size
from fedsieve.report.plots import COLOURS, save_figure, without_frame
from fedsieve.report.statistics import holm, interval, paired
from fedsieve.runs.atomic import write_text

DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Cell:
    """An arm of a sweep: runs that differ only in their seed."""

    arm: dict[str, Any]

    @cached_property
    def accuracies(self) -> dict[int, float]:
        return {int(seed): run["test_accuracy"] for seed, run in self.arm["seeds"].items()}

    @property
    def gains(self) -> dict[int, float]:
        """What the last phase added."""
        runs = self.arm["seeds"].items()
        return {int(seed): run["test_accuracy"] - run["test_accuracy_before"] for seed, run in runs}

    def mean_of(self, key: str) -> float:
        return sum(run[key] for run in self.arm["seeds"].values()) / len(self.arm["seeds"])


@cache
def results(sweep: str) -> dict[str, Any]:
    return json.loads((DOCS / "results" / f"{sweep}.json").read_text())


def find(sweep: str, where: dict[str, Any]) -> Cell | None:
    """The arm of a sweep whose values are these; other keys may have any. None while nothing is measured."""
    if not (DOCS / "results" / f"{sweep}.json").exists():
        return None
    fitting = [arm for arm in results(sweep)["arms"] if all(arm["values"].get(k, v) == v for k, v in where.items())]
    assert len(fitting) <= 1, f"{sweep}: {len(fitting)} arms fit {where}"
    return Cell(fitting[0]) if fitting and fitting[0]["seeds"] else None


@dataclass(frozen=True)
class Study:
    """The runs that decide a claim, as a table: rows are compared with each other within each column."""

    rows: dict[str, dict[str, Any]]  # label -> {sweep: …, where: {…}}
    columns: dict[str, dict[str, Any]]  # label -> where
    baseline: str

    def cell(self, row: str, column: str) -> Cell | None:
        spec = self.rows[row]
        return find(spec["sweep"], {**spec.get("where", {}), **self.columns[column]})

    def cells(self, column: str) -> dict[str, Cell]:
        found = {row: self.cell(row, column) for row in self.rows}
        return {row: cell for row, cell in found.items() if cell is not None}


def points(value: float, sign: bool = False) -> str:
    return f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}"


def chance(p: float | None) -> str:
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def accuracy_table(study: Study) -> list[str]:
    """Mean test accuracy ± 95% interval, the learning rate that was chosen, and bytes up of a client in a round."""
    lines = ["| test accuracy, % | " + " | ".join(study.columns) + " |", "|---|" + "---|" * len(study.columns)]
    for row in study.rows:
        texts = []
        for column in study.columns:
            cell = study.cell(row, column)
            if cell is None:
                texts.append("–")
                continue
            about = interval(list(cell.accuracies.values()))
            margin = "" if about.margin is None else f" ± {points(about.margin)}"
            chosen = ", ".join(str(value) for value in (cell.arm["chosen"] or {}).values())
            texts.append(f"{points(about.mean)}{margin}" + (f" (lr {chosen})" if chosen else ""))
        lines.append(f"| {row} | " + " | ".join(texts) + " |")
    return lines


def difference_table(study: Study) -> list[str]:
    """Each row less the baseline over the same seeds, with p values corrected for the number of rows (Holm)."""
    others = [row for row in study.rows if row != study.baseline]
    lines = [
        f"| points more than *{study.baseline}*, paired | " + " | ".join(study.columns) + " |",
        "|---|" + "---|" * len(study.columns),
    ]
    texts: dict[str, list[str]] = {row: [] for row in others}
    for column in study.columns:
        cells = study.cells(column)
        base = cells.get(study.baseline)
        tests = {row: paired(cells[row].accuracies, base.accuracies) for row in others if base and row in cells}
        corrected = dict(zip(tests, holm([test.p if test else None for test in tests.values()]), strict=True))
        for row in others:
            test = tests.get(row)
            if test is None:
                texts[row].append("–")
                continue
            margin = "" if test.difference.margin is None else f" ± {points(test.difference.margin)}"
            texts[row].append(f"{points(test.difference.mean, True)}{margin} (p {chance(corrected[row])})")
    return [*lines, *(f"| {row} | " + " | ".join(texts[row]) + " |" for row in others)]


def picture(study: Study, path: Path) -> bool:
    """A panel for each column: means and intervals, the single runs behind them, and the head alone as a line."""
    columns = [column for column in study.columns if study.cells(column)]
    if not columns:
        return False
    height = 1.3 + 0.36 * len(study.rows)
    figure, axes = plt.subplots(
        1, len(columns), figsize=(3.1 * len(columns) + 1.4, height), layout="constrained", squeeze=False
    )
    for axis, column in zip(axes[0], columns, strict=True):
        for place, row in enumerate(study.rows):
            cell = study.cell(row, column)
            if cell is None:
                continue
            about = interval([100 * value for value in cell.accuracies.values()])
            colour = COLOURS[place % len(COLOURS)]
            axis.plot(
                [100 * value for value in cell.accuracies.values()],
                [place] * about.count,
                ".",
                color=colour,
                alpha=0.35,
            )
            axis.errorbar(about.mean, place, xerr=about.margin, fmt="o", color=colour, capsize=3)
            before = [run["test_accuracy_before"] for run in cell.arm["seeds"].values()]
            if None not in before:
                axis.axvline(100 * sum(before) / len(before), color="#bbbbbb", linestyle=":", linewidth=1, zorder=0)
        axis.set_title(column, loc="left", fontsize="medium")
        axis.set_yticks(range(len(study.rows)), list(study.rows) if axis is axes[0][0] else [""] * len(study.rows))
        axis.set_ylim(len(study.rows) - 0.5, -0.5)
        axis.set_xlabel("test accuracy, %")
        without_frame(axis)
    save_figure(figure, path)
    return True


def section(claim: dict[str, Any], docs: Path) -> list[str]:
    """One claim: what is said, what was run, what came out, and the verdict."""
    study = Study(claim["rows"], claim["columns"], claim["baseline"])
    sweeps = list(dict.fromkeys(spec["sweep"] for spec in study.rows.values()))
    files = ", ".join(f"[{sweep}](claims/{sweep}.yaml)" for sweep in sweeps)
    lines = [f"## {claim['title']}", "", f"**Claimed.** {claim['claimed'].strip()}", ""]
    lines += [f"**Run.** {files}. {claim.get('run', '').strip()}".rstrip(), ""]
    lines += [*accuracy_table(study), "", *difference_table(study), ""]
    if picture(study, docs / "claims" / f"{claim['name']}.png"):
        lines += [f"![{claim['title']}](claims/{claim['name']}.png)", ""]
    return [*lines, f"**Verdict: {claim['verdict'].strip()}**", "", claim.get("why", "").strip(), ""]


def guidelines(
    budgets: Sequence[int], columns: dict[str, dict[str, Any]], candidates: dict[str, dict[str, Any]]
) -> list[str]:
    """For each split and each limit on the bytes that a client sends in a round: what did best within it."""
    lines = ["| data | a client may send in a round | best | test accuracy, % | sends |", "|---|---|---|---|---|"]
    for column, where in columns.items():
        for budget in budgets:
            within = {}
            for label, spec in candidates.items():
                cell = find(spec["sweep"], {**spec.get("where", {}), **where})
                if cell is not None and sent(cell, spec) <= budget:
                    within[label] = cell
            if not within:
                continue
            best = max(within, key=lambda label: interval(list(within[label].accuracies.values())).mean)
            about = interval(list(within[best].accuracies.values()))
            margin = "" if about.margin is None else f" ± {points(about.margin)}"
            cost = size(round(sent(within[best], candidates[best])))
            lines.append(f"| {column} | {size(budget)} | {best} | {points(about.mean)}{margin} | {cost} |")
    return lines


def sent(cell: Cell, spec: dict[str, Any]) -> float:
    """Bytes that a client sends up in a round of the last phase."""
    rounds = len(next(iter(cell.arm["seeds"].values()))["drift"])
    return cell.mean_of("phase_bytes_up") / rounds / spec.get("clients", 10)


def build(docs: Path) -> str:
    """The page, with its pictures drawn into `docs`/claims."""
    spec = yaml.safe_load((DOCS / "claims" / "claims.yaml").read_text())
    lines = ["# What holds, and what does not", "", spec["introduction"].strip(), ""]
    for claim in spec["claims"]:
        lines += section(claim, docs)
    advice = spec["guidelines"]
    lines += ["## Guidelines", "", advice["introduction"].strip(), ""]
    lines += guidelines(advice["budgets"], advice["columns"], advice["candidates"])
    lines += ["", advice["conclusion"].strip(), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Rebuild docs/claims.md from docs/results.")
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder to write to; default: docs")
    out = parser.parse_args().out
    write_text(out / "claims.md", build(out))
    print(f"written to {out / 'claims.md'}")
