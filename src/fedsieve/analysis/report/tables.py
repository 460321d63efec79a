"""Tables for the terminal."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.containers import Lines
from rich.table import Table
from rich.text import Text

from fedsieve.analysis.statistics import Interval, interval
from fedsieve.federate.traffic import size
from fedsieve.observe.numbers import duration, number, percent
from fedsieve.observe.profile import SECTIONS, Times

if TYPE_CHECKING:  # it brings torch, which the other tables need not wait for
    from fedsieve.analysis.compare import Comparison, Group
    from fedsieve.analysis.foretell_run import ForetoldPhase
    from fedsieve.engine.cluster_check import NodeCheck
    from fedsieve.sieve.density import Layers


class Name(Text):
    """A name of runs: too long for its column, it is broken at `_`, `/` or `-` where that will do."""

    def wrap(self, console: Console, width: int, **options: Any) -> Lines:
        start, breaks = 0, []
        for part in re.finditer(r"[^\s_/-]+|[\s_/-]", self.plain):
            if len(self.plain[start : part.end()].rstrip()) > width and part.start() > start:
                start = part.start()
                breaks.append(start)
        return Lines(line for one in self.divide(breaks) for line in one.wrap(console, width, **options))


def columns_of(columns: Sequence[str], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column(columns[0])
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table


def result_table(result: Mapping[str, Any]) -> Table:
    """One row for each phase of a run."""
    table = columns_of(["phase", "rounds", "best val (round)", "test", "test loss", "sent up", "time"])
    for phase in result["phases"]:
        table.add_row(
            phase["name"],
            str(phase["rounds"]),
            f"{percent(phase['best_val_accuracy'])} ({phase['best_round'] or '–'})",
            percent(phase["test_accuracy"]),
            number(phase["test_loss"]),
            size(phase["bytes_up"]),
            duration(phase["seconds"]),
        )
    return table


def times_table(times: Times, start: float = 0.0) -> Table:
    """Where a run's time went; `start` are the seconds before it, in which the program was loaded."""
    wall = times.wall + start
    columns = {"main process": {**times.main, "start": times.main.get("start", 0.0) + start}}
    if times.workers > 1:
        columns[f"each of {times.workers} workers"] = {**times.each_worker, "start": start}
    table = columns_of(["time", *(name for name in columns for name in (name, "share"))])
    for name in SECTIONS:
        cells = [seconds.get(name, 0.0) for seconds in columns.values()]
        if any(cells):
            table.add_row(name, *(text for cell in cells for text in (duration(cell), percent(cell / wall))))
    table.add_section()
    totals = [sum(seconds.values()) for seconds in columns.values()]
    table.add_row("in all", *(text for total in totals for text in (duration(total), percent(total / wall))))
    return table


def spread_over_clients(clients: Mapping[str, Any]) -> str:
    return (
        f"accuracy of clients: mean {percent(clients['mean'])}, worst tenth {percent(clients['worst_tenth'])}, "
        f"standard deviation {percent(clients['deviation'])}"
    )


def nodes_table(nodes: Sequence["NodeCheck"]) -> Table:
    """One row for each node of a cluster."""
    table = Table(header_style="bold")
    for name in ("node", "versions", "devices", "same\nbits", "data", "MB/s", "used"):
        table.add_column(name, justify="right" if name == "MB/s" else "left")
    words = {True: "yes", False: "no", None: "–"}
    for node in nodes:
        told, speed = node.facts, node.megabytes_per_second
        versions = [f"{what} {told[what.lower()]}" for what in ("fedsieve", "torch", "Python")] if told else ["–"]
        devices = [f"{told['cpus']} CPUs", told["cpu"], *(told["gpus"] or ["no GPU"])] if "cpu" in told else ["–"]
        table.add_row(
            node.name.removeprefix("node ").replace(" (", "\n("),
            "\n".join(versions),
            "\n".join(devices),
            words[node.is_same],
            words[node.has_data],
            f"{speed:,.0f}" if speed is not None else "–",
            words[node.problem is None],
        )
    return table


def runs_table(results: Mapping[str, Mapping[str, Any]], title: str | None = None) -> Table:
    """One row for each run."""
    table = columns_of(["run", "test accuracy", "test loss", "best val", "sent up", "time"], title)
    for name, result in results.items():
        table.add_row(
            name,
            percent(result["test_accuracy"]),
            number(result["test_loss"]),
            percent(result["best_val_accuracy"]),
            size(result["bytes_up"]),
            duration(result["seconds"]),
        )
    return table


def seeds_table(results: Sequence[Mapping[str, Any]], means: Mapping[str, Interval]) -> Table:
    """One row for each seed's run, then the means with their intervals."""
    columns = {
        "test accuracy": ("test_accuracy", percent),
        "test loss": ("test_loss", number),
        "best val": ("best_val_accuracy", percent),
        "sent up": ("bytes_up", size),
        "time": ("seconds", duration),
    }
    table = columns_of(["seed", *columns])
    for result in results:
        table.add_row(str(result["seed"]), *(show(result[name]) for name, show in columns.values()))
    table.add_section()
    table.add_row("mean", *(with_margin(means.get(name), show) for name, show in columns.values()))
    return table


def with_margin(mean: Interval | None, show: Callable[[float], str]) -> str:
    """A mean ± half the width of its interval, and the unit once: 69.2 ± 3.4%."""
    if mean is None or mean.margin is None:
        return "–" if mean is None else show(mean.mean)
    value, margin = show(mean.mean), show(mean.margin) if mean.margin else "0"
    figures = [re.fullmatch(r"([-+]?[\d.]+)(\D+)", text) for text in (value, margin)]
    if figures[0] and figures[1] and figures[0][2] == figures[1][2]:
        value = figures[0][1]
    return f"{value} ± {margin}"


def comparison_table(comparison: "Comparison") -> Table:
    """One row for each group of runs: means over their seeds."""
    from fedsieve.analysis.compare import short

    shown = {
        "test": ("test_accuracy", percent),
        "test loss": ("test_loss", number),
        "best val": ("best_val_accuracy", percent),
        "sent up": ("bytes_up", size),
        "down": ("bytes_down", size),
        "time": ("seconds", duration),
    }
    keys = comparison.shown
    title = "mean ± 95% interval" + (f" by {', '.join(keys)}" if keys else "")
    table = columns_of([*(short(keys) or ["runs"]), "n", *shown], title)
    table.columns[0].overflow = "fold"
    for group in comparison.groups:
        cells = [*_beginning(group, keys), str(len(group.runs))]
        for name, show in shown.values():
            mean = group.means.get(name)
            with_interval = name.startswith("test")  # the files have all of them; a line has no room
            cells.append("–" if mean is None else with_margin(mean, show) if with_interval else show(mean.mean))
        table.add_row(Name(cells[0]), *map(Text, cells[1:]))
    return table


def _beginning(group: "Group", keys: Sequence[str]) -> list[str]:
    """What a row about a group begins with: its name or, for groups by settings, their values."""
    return [brief(group.values[key]) for key in keys] or [group.name]


def differences_table(comparison: "Comparison") -> Table:
    """One row for each group but the baseline: how far from it, over runs with the same seed."""
    from fedsieve.analysis.compare import short

    keys, metric = comparison.shown, comparison.metric
    show = {"bytes_up": size, "bytes_down": size, "seconds": duration}.get(
        metric, points if metric.endswith("accuracy") else number
    )
    title = f"{metric.replace('_', ' ')} less that of {comparison.baseline.name}"
    table = columns_of([*(short(keys) or ["runs"]), "pairs", "difference", "p", "p (Holm)"], title)
    table.columns[0].overflow = "fold"
    for group in comparison.groups:
        if group is comparison.baseline:
            continue
        found = group.difference
        cells = _beginning(group, keys)
        if found is None:
            cells += ["0", "–", "–"]
        else:
            cells += [str(found.difference.count), signed(found.difference, show), chance(found.p)]
        table.add_row(Name(cells[0]), *map(Text, [*cells[1:], chance(group.corrected)]))
    return table


def signed(difference: Interval, show: Callable[[float], str]) -> str:
    """A difference with its sign and its interval: +1.5 ± 0.4 points."""
    amount = with_margin(replace(difference, mean=abs(difference.mean)), show)
    return f"{'-' if difference.mean < 0 else '+'}{amount}"


def points(difference: float) -> str:
    """The difference of two shares in percentage points."""
    return f"{100 * difference:.1f} points"


def chance(p: float | None) -> str:
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def brief(text: str, limit: int = 20) -> str:
    """The text, or its end where it is long: of a path the name."""
    return text if len(text) <= limit else "…" + text[1 - limit :]


def scores_table(scores: Mapping[str, Mapping[str, float | None]]) -> Table:
    """Figures measured again beside those the run recorded."""
    table = columns_of(["", "measured now", "recorded by the run"])
    for name, values in scores.items():
        show = percent if name.endswith("accuracy") else number
        table.add_row(name, show(values["measured"]), show(values["recorded"]))
    return table


def split_table(counts: np.ndarray, classes: Sequence[str], limit: int = 20) -> Table:
    """One row for each client (the first `limit`): its samples and its most frequent classes."""
    table = Table(header_style="bold")
    for name in ("client", "samples", "classes"):
        table.add_column(name, justify="right")
    table.add_column("most frequent")
    for client, row in enumerate(counts[:limit]):
        held = [index for index in np.argsort(-row, kind="stable") if row[index]]
        names = ", ".join(f"{classes[index]} {row[index]}" for index in held[:5])
        more = ", …" if len(held) > 5 else ""
        table.add_row(str(client), f"{row.sum():,}", str(len(held)), Text(names + more))  # a name may hold brackets
    if len(counts) > limit:
        table.add_row("…", "", "", f"{len(counts) - limit:,} more clients; --json has all")
    return table


def layers_table(layers: "Layers", title: str) -> Table:
    """A mask layer by layer: one row for each block, then what is not in blocks, then the whole."""

    def short(value: float | None) -> str:
        return percent(value).replace("100.0%", "100%")  # so that nine columns fit into 80 characters

    columns = list(next(iter(layers.blocks.values()), ["all"]))
    table = columns_of(["block" if layers.blocks else "layers", *columns], title)
    for block, row in layers.blocks.items():
        table.add_row(str(block), *map(short, row.values()))
    table.add_section()
    for name, value in [*layers.rest.items(), ("total", layers.total)]:
        table.add_row(name, *[""] * (len(columns) - 1), short(value))
    return table


def sweep_table(results: Mapping[str, Any]) -> Table:
    """One row for each arm: what was chosen in it, and its test accuracy over the seeds that are done."""
    table = columns_of(["arm", "trials", "chosen", "val", "test (95%)", "seeds"])
    for arm in results["arms"]:
        done = [trial for trial in arm["trials"] if trial["state"] not in ("waiting", "running")]
        scores = [seed["test_accuracy"] for seed in arm["seeds"].values() if seed["test_accuracy"] is not None]
        best = max((trial["val_accuracy"] for trial in done if trial["state"] == "complete"), default=None)
        table.add_row(
            arm["name"],
            f"{len(done)} of {len(arm['trials'])}",
            "–" if arm["chosen"] is None else ", ".join(f"{v}" for v in arm["chosen"].values()) or "as it is",
            percent(best),
            with_margin(interval(scores) if scores else None, percent),
            f"{len(arm['seeds'])} of {results['seeds']}",
        )
    return table


def foretold_table(rows: Sequence[tuple[str, int, float]]) -> Table:
    """What would be run, how often, and how long that would take."""
    table = columns_of(["arm", "runs left", "estimate"])
    for about, left, seconds in rows:
        table.add_row(Text(about), str(left), duration(seconds))
    table.add_section()
    table.add_row(
        "in all, estimated from a few timed images",
        str(sum(row[1] for row in rows)),
        duration(sum(row[2] for row in rows)),
    )
    return table


def foretold_phases_table(phases: Sequence["ForetoldPhase"], seeds: int) -> Table:
    """What a run, or those of all seeds, would do in each phase, and how long that would take."""
    table = columns_of(["phase", "rounds", "clients", "up a round", "down a round", "estimate"])
    for phase in phases:
        up, down = (f"{about} {size(count)}" for about, count in (("~", phase.up), ("≤", phase.down)))
        table.add_row(phase.name, str(phase.rounds), str(phase.clients), up, down, duration(phase.seconds))
    table.add_section()
    label = "in all" if seeds == 1 else f"{seeds} seeds"
    rounds, seconds = sum(phase.rounds for phase in phases), sum(phase.seconds for phase in phases)
    table.add_row(label, str(rounds), "", "", "", duration(seconds))
    return table
