"""`fedsieve reproduce`: the experiments of a report, run again."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsieve.cli.arguments import OverridesArgument, console, reachable
from fedsieve.errors import InputError, RunError

if TYPE_CHECKING:
    from rich.console import Console

    from fedsieve.analysis.reproduce.plan import Plan, Row
    from fedsieve.config.schema import Experiment


def reproduce(
    report: Annotated[str, typer.Argument(metavar="REPORT", help="Its number: 000 to 004.")],
    overrides: OverridesArgument = None,
    table: Annotated[str | None, typer.Option(metavar="N", help="Only the rows of this table, such as 4.2.")] = None,
    figure: Annotated[str | None, typer.Option(metavar="N", help="Only what this figure shows.")] = None,
    section: Annotated[str | None, typer.Option(metavar="N", help="Only what this section tells of.")] = None,
    rows: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these rows, such as 'table2-nc5-*'; repeatable.")
    ] = None,
    scale: Annotated[str, typer.Option(metavar="NAME", help="smoke (digits and pico), small or full.")] = "full",
    seeds: Annotated[int, typer.Option(metavar="N", help="Runs of each row, with seeds one apart.")] = 3,
    backbone: Annotated[
        str | None, typer.Option(metavar="NAME", help="pico, a path or a hub name; default: the reported one.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(callback=reachable, metavar="DIR", help="Where to write; default: runs/reproduce/SCALE-BACKBONE."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run, and about how long.")] = False,
) -> None:
    """Run the experiments of a report, and show what comes out beside what was reported.

    The same command again goes on where it was ended, and runs nothing twice.
    """
    places = [f"{kind} {number}" for kind, number in _given(table=table, figure=figure, section=section)]
    if len(places) > 1:
        raise InputError(f"--{places[0]} and --{places[1]} do not go together; give one of them")
    from fedsieve.analysis.reproduce.plan import choose, make_plan, run_plan, write_tables
    from fedsieve.analysis.reproduce.scale import scale_called

    changes = [f"model.backbone={backbone}"] if backbone else []
    chosen = choose(report, places[0] if places else None, rows or [])
    plan = make_plan(report, chosen, scale_called(scale), [*changes, *(overrides or [])], seeds, out)
    terminal = console()
    if dry_run:
        _foretell(plan, terminal)
        return
    from fedsieve.analysis.report.reproduction import reproduction_table
    from fedsieve.experiment import check_all

    check_all(experiment for _, experiment, folder in plan.runs() if not (folder / "result.json").exists())
    outcomes = run_plan(plan, _runner(plan, terminal))
    write_tables(plan, outcomes)
    terminal.print(reproduction_table(plan, outcomes))
    terminal.print(f"written to {plan.folder}: the runs, table.csv and table.json", soft_wrap=True)
    if failed := [(one.row.preset, why) for one in outcomes for why in one.failed.values()]:
        raise RunError(f"{len(failed)} runs failed; the first is of {failed[0][0]}: {failed[0][1]}")


def _given(**options: str | None) -> list[tuple[str, str]]:
    return [(kind, number) for kind, number in options.items() if number is not None]


def _runner(plan: "Plan", terminal: "Console") -> Any:
    """Runs one experiment after another, each with a line of what came out."""
    from fedsieve.analysis.estimate import Estimator
    from fedsieve.analysis.report.reproduction import OnceNoted
    from fedsieve.experiment import run
    from fedsieve.observe.numbers import duration, percent

    estimate = Estimator().phases
    total, number, said = sum(1 for _ in plan.runs()), 0, set[str]()

    def one(row: "Row", experiment: "Experiment", folder: Path) -> dict[str, Any]:
        nonlocal number
        number += 1
        title = f"{number} of {total}: {row.runs_as}, seed {experiment.seed}"
        said.add(f"{folder} is finished already")  # its line says so
        was_finished = (folder / "result.json").exists()
        with OnceNoted(terminal, said, estimate) as bar:
            try:
                result = run(experiment, folder, True, bar)
            except RunError as error:
                terminal.print(f"{title}: failed: {error}", soft_wrap=True)
                raise
            except InputError as error:
                raise InputError(f"{row.runs_as}: {error}") from None
        how = "finished before" if was_finished else duration(result["seconds"])
        terminal.print(f"{title}: {percent(result[row.metric])} ({how})", soft_wrap=True)
        return result

    return one


def _foretell(plan: "Plan", terminal: "Console") -> None:
    """The rows, what each would run, and an estimate; nothing is written."""
    from fedsieve.analysis.report.reproduction import dry_table
    from fedsieve.analysis.reproduce.foretell import estimates_of
    from fedsieve.observe.numbers import duration

    estimates = estimates_of(plan)
    terminal.print(dry_table(plan, estimates))
    total = duration(sum(one.seconds for one in estimates.values()))
    terminal.print(f"about {total} in all, estimated from a few timed images; into {plan.folder}", soft_wrap=True)
