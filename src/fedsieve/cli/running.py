"""Commands that run an experiment, and what one does with a finished run."""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsieve.cli.arguments import (
    ExperimentArgument,
    JsonOption,
    NewFolderOption,
    OverridesArgument,
    PluginsOption,
    RunArgument,
    console,
    new_folder,
    reachable,
)
from fedsieve.errors import InputError

if TYPE_CHECKING:
    from fedsieve.config.schema import Experiment


def run(
    context: typer.Context,
    experiment: ExperimentArgument,
    overrides: OverridesArgument = None,
    out: NewFolderOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in DIR where it was ended.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="End with a table of where the time went.")] = False,
    seeds: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Repeat it with N seeds, from its own on, each (if N > 1) into DIR/seed-…."
        ),
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the input, and say what would be run and about how long.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the run in DIR, after asking.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before replacing.")] = False,
    plugins: PluginsOption = None,
) -> None:
    """Run an experiment, and write its metrics, model and result to a folder."""
    started = time.perf_counter()
    from fedsieve.config.experiment_file import experiment_name
    from fedsieve.config.runnable import loaded as loaded_experiment

    settings = context.with_resource(loaded_experiment(experiment, overrides or [], plugins or []))
    if resume and out is None:
        raise InputError("--resume needs to know which run to go on with; add --out DIR")
    if yes and not force:
        raise InputError("--yes answers what --force asks; add --force, or leave it out")
    if force and (resume or out is None):
        raise InputError(
            "--force replaces a run and --resume goes on with it; give one of them"
            if resume
            else "--force needs to know which run to replace; add --out DIR"
        )
    folder = out or new_folder(experiment_name(experiment))
    if seeds > 1 and profile:
        raise InputError("--profile looks at one run; leave out --seeds")
    if seeds > 1 and settings.federation is not None:
        from fedsieve.analysis.repeat import refuse_unless_any_seed

        refuse_unless_any_seed(settings, seeds)  # before --force deletes anything
    if dry_run:
        return foretell(settings, folder, seeds, resume, force)
    if force:
        replace_runs(settings, folder, yes)
    if seeds > 1:
        return run_seeds(settings, folder, seeds, resume, f"{experiment} from {seeds} seeds into {folder}")
    from fedsieve.analysis.collection import left_out
    from fedsieve.analysis.estimate import Estimator
    from fedsieve.analysis.report.tables import result_table, spread_over_clients, times_table
    from fedsieve.engine.torch_setup import SYNCHRONIZE
    from fedsieve.experiment import run as run_experiment
    from fedsieve.observe.progress import ProgressBar
    from fedsieve.runs.read import read_metrics

    if profile:
        os.environ[SYNCHRONIZE] = "1"
    loaded = time.perf_counter() - started
    terminal = console()
    estimate = Estimator().phases if settings.federation is None else None  # what nodes need is not known here
    with ProgressBar(terminal, f"{experiment} into {folder}", estimate) as bar:
        result = run_experiment(settings, folder, resume, bar)
    terminal.print(result_table(result))
    if result.get("clients"):
        terminal.print(spread_over_clients(result["clients"]), soft_wrap=True)
    if found := left_out(read_metrics(folder)):
        terminal.print(found, soft_wrap=True)
    if profile and bar.times is not None:  # else the run was finished before
        terminal.print(times_table(bar.times, loaded))
    terminal.print(f"written to {folder}", soft_wrap=True)


def run_seeds(settings: "Experiment", folder: Path, count: int, resume: bool, title: str) -> None:
    """`run` with several seeds: a run for each, then their mean with its interval."""
    from fedsieve.analysis.estimate import Estimator
    from fedsieve.analysis.repeat import means, repeat
    from fedsieve.analysis.report.tables import seeds_table
    from fedsieve.observe.progress import ProgressBar

    terminal = console()
    estimate = Estimator().phases if settings.federation is None else None
    with ProgressBar(terminal, title, estimate) as bar:
        results = repeat(settings, folder, count, resume, bar)
    terminal.print(seeds_table(results, means(results)))
    terminal.print(f"± is the 95% interval of the mean; written to {folder}, figures in seeds.json", soft_wrap=True)


def foretell(settings: "Experiment", folder: Path, seeds: int, resume: bool, force: bool) -> None:
    """`run --dry-run`: each phase with its estimated time and bytes; nothing is run or written."""
    from fedsieve.analysis.foretell_run import foretold
    from fedsieve.analysis.report.tables import foretold_phases_table
    from fedsieve.runs.replace import described, runs_to_replace

    rows = foretold(settings, folder, seeds, resume, force)
    terminal = console()
    terminal.print(foretold_phases_table(rows, seeds))
    for note in (note for row in rows for note in row.notes):
        terminal.print(f"note: {note}", soft_wrap=True)
    if force and (runs := runs_to_replace(folder)):
        terminal.print(f"would replace {described(folder, runs)}", soft_wrap=True)
    terminal.print(f"would be written to {folder}; nothing was run or written", soft_wrap=True)


def replace_runs(settings: "Experiment", folder: Path, is_sure: bool) -> None:
    """Delete the run, or runs over seeds, in a folder: after a question, and once the new input is checked."""
    from fedsieve.experiment import check
    from fedsieve.runs.replace import delete_runs, described, refuse_to_lose_input, runs_to_replace

    if not (runs := runs_to_replace(folder)):
        return
    refuse_to_lose_input(settings, folder)
    what = described(folder, runs)
    if not is_sure and not sys.stdin.isatty():
        raise InputError(f"--force would replace {what}; add --yes to do so without being asked")
    check(settings, folder)
    if not is_sure:
        print(f"replace {what}? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise InputError(f"{folder} was not replaced; give another --out")
    delete_runs(folder)


PlacesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Where things are now: data.path=DIR model.backbone=FILE device=cpu"),
]


def evaluate(
    run: RunArgument, overrides: PlacesArgument = None, as_json: JsonOption = False, plugins: PluginsOption = None
) -> None:
    """Score a finished run's model again, on its validation and test sets."""
    from fedsieve.analysis.report.tables import scores_table
    from fedsieve.experiment import evaluate_run

    scores = evaluate_run(run, overrides or (), plugins or ())
    if as_json:
        print(json.dumps(scores))
    else:
        console().print(scores_table(scores))


def export(
    run: RunArgument,
    overrides: PlacesArgument = None,
    *,
    to: Annotated[Path, typer.Option(callback=reachable, metavar="DIR", help="The folder to make.")],
    plugins: PluginsOption = None,
) -> None:
    """Write a finished run's model in Hugging Face format."""
    from fedsieve.runs.export import export_run

    terminal = console()
    terminal.print(export_run(run, to, overrides or (), plugins=plugins or ()), soft_wrap=True)
    terminal.print(f"written to {to}", soft_wrap=True)


def demo(
    out: Annotated[Path, typer.Option(callback=reachable, metavar="DIR", help="Where to write.")] = Path("demo"),
) -> None:
    """Compare dense and sparse fine-tuning, centralized, IID and non-IID, on embedded data, in a few minutes."""
    from fedsieve.analysis.report.demo import run_demo

    run_demo(out, console())
