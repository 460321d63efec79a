"""Commands that run an experiment, and what one does with a finished run."""

import json
import os
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
        int, typer.Option(metavar="N", min=1, help="Repeat it with N seeds, from its own on, into DIR/seed-….")
    ] = 1,
    plugins: PluginsOption = None,
) -> None:
    """Run an experiment, and write its metrics, model and result to a folder."""
    started = time.perf_counter()
    from fedsieve.config.experiment_file import experiment_name
    from fedsieve.config.runnable import loaded as loaded_experiment

    settings = context.with_resource(loaded_experiment(experiment, overrides or [], plugins or []))
    if resume and out is None:
        raise InputError("--resume needs to know which run to go on with; add --out DIR")
    folder = out or new_folder(experiment_name(experiment))
    if seeds > 1:
        if profile:
            raise InputError("--profile looks at one run; leave out --seeds")
        return run_seeds(settings, folder, seeds, resume, f"{experiment} from {seeds} seeds into {folder}")
    from fedsieve.analysis.report.tables import result_table, spread_over_clients, times_table
    from fedsieve.engine.torch_setup import SYNCHRONIZE
    from fedsieve.experiment import run as run_experiment
    from fedsieve.observe.progress import ProgressBar

    if profile:
        os.environ[SYNCHRONIZE] = "1"
    loaded = time.perf_counter() - started
    terminal = console()
    with ProgressBar(terminal, f"{experiment} into {folder}") as bar:
        result = run_experiment(settings, folder, resume, bar)
    terminal.print(result_table(result))
    if result.get("clients"):
        terminal.print(spread_over_clients(result["clients"]), soft_wrap=True)
    if profile and bar.times is not None:  # else the run was finished before
        terminal.print(times_table(bar.times, loaded))
    terminal.print(f"written to {folder}", soft_wrap=True)


def run_seeds(settings: "Experiment", folder: Path, count: int, resume: bool, title: str) -> None:
    """`run` with several seeds: a run for each, then their mean with its interval."""
    from fedsieve.analysis.repeat import means, repeat
    from fedsieve.analysis.report.tables import seeds_table
    from fedsieve.observe.progress import ProgressBar

    terminal = console()
    with ProgressBar(terminal, title) as bar:
        results = repeat(settings, folder, count, resume, bar)
    terminal.print(seeds_table(results, means(results)))
    terminal.print(f"± is the 95% interval of the mean; written to {folder}, figures in seeds.json", soft_wrap=True)


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
) -> None:
    """Write a finished run's model in Hugging Face format."""
    from fedsieve.runs.export import export_run

    terminal = console()
    terminal.print(export_run(run, to, overrides or ()), soft_wrap=True)
    terminal.print(f"written to {to}", soft_wrap=True)


def demo(
    out: Annotated[Path, typer.Option(callback=reachable, metavar="DIR", help="Where to write.")] = Path("demo"),
) -> None:
    """Compare dense and sparse fine-tuning, centralized, IID and non-IID, on embedded data, in a few minutes."""
    from fedsieve.analysis.report.demo import run_demo

    run_demo(out, console())
