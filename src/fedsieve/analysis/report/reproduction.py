"""What `fedsieve reproduce` shows: the rows of a report beside what was measured, or what would be run."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedsieve.analysis.report.tables import with_margin
from fedsieve.analysis.reproduce.foretell import Estimate
from fedsieve.analysis.reproduce.plan import Outcome, Plan, ranks
from fedsieve.config.schema import Experiment
from fedsieve.observe.numbers import duration, percent
from fedsieve.observe.progress import EstimatePhases, ProgressBar


class OnceNoted(ProgressBar):
    """A bar for one of many runs: what has been said of an earlier one is not said again."""

    def __init__(self, console: Console, said: set[str], estimate: EstimatePhases) -> None:
        super().__init__(console, estimate=estimate)
        self.said = said

    def note(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            super().note(text)

    def _print_tenth(self, label: str, done: int, total: int, status: str) -> None:
        """Nothing: each run ends with a line of its own."""


def measured(outcome: Outcome) -> str:
    """`71.2 ± 0.8%` over seeds, `71.2%` for one."""
    found = outcome.measured
    if found is None:
        return "failed" if outcome.failed else "–"
    return with_margin(found, percent)


def reproduction_table(plan: Plan, outcomes: Sequence[Outcome]) -> Table:
    """One row for each preset; differences only where the figures can be compared, else places in the group."""
    table = Table(title=plan.title, title_justify="left", header_style="bold")
    table.add_column("row", overflow="fold")
    last = ("measured", "difference") if plan.is_comparable else ("rank", "measured", "rank")
    for name in ("reported", *last):
        table.add_column(name, justify="right", no_wrap=True)
    places, group = ranks(outcomes), None
    for one in outcomes:
        if one.row.group != group:
            group = one.row.group
            table.add_section()
            table.add_row(Text(group, style="bold"))
        reported = "–" if one.row.reported is None else f"{100 * one.row.reported:.2f}%"
        if plan.is_comparable:
            end = [measured(one), "–" if one.difference is None else f"{100 * one.difference:+.1f}"]
        else:
            there, here = places.get(one.row.preset, ("–", "–"))
            end = [str(there), measured(one), str(here)]
        table.add_row(one.row.preset, reported, *end)
    return table


def dry_table(plan: Plan, estimates: Mapping[str, Estimate]) -> Table:
    """What each row would run, and how long that would take."""
    table = Table(title=plan.title, title_justify="left", header_style="bold")
    table.add_column("row", overflow="fold")
    table.add_column("what it would run")
    for name in ("runs", "estimate"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.rows:
        found = estimates.get(row.preset)
        if found is None:
            table.add_row(row.preset, f"the same as {row.runs_as}", "", "")
        else:
            runs = f"{found.left} of {plan.seeds}" if found.left < plan.seeds else str(found.left)
            table.add_row(row.preset, in_words(row.experiment), runs, duration(found.seconds))
    return table


def in_words(experiment: Experiment) -> str:
    """`20 clients, 2 a round: head 1 round, edit 3 rounds (50% frozen)`."""
    clients = experiment.clients
    who = "centralized" if clients.count == 1 else f"{clients.count} clients, {clients.per_round} a round"
    parts = []
    for phase in experiment.phases:
        sparse = f" ({percent(phase.mask.sparsity).replace('.0%', '%')} frozen)" if phase.mask else ""
        parts.append(f"{phase.name} {phase.rounds} round{'s' if phase.rounds > 1 else ''}{sparse}")
    return f"{who}: {', '.join(parts)}"
