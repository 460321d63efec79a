"""`fedsieve sweep`: compare ways of doing things, search for the best settings of each, repeat with several seeds."""

from pathlib import Path
from typing import Annotated

import typer

from fedsieve.cli.arguments import OverridesArgument, PluginsOption, console, reachable
from fedsieve.errors import RunError


def sweep(
    context: typer.Context,
    file: Annotated[
        str,
        typer.Argument(metavar="SWEEP", help="A sweep file, or one of `fedsieve presets`."),
    ],
    overrides: OverridesArgument = None,
    out: Annotated[
        Path | None, typer.Option(callback=reachable, metavar="DIR", help="Where to write; default: runs/NAME.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="With how many seeds to repeat what was chosen.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run, and about how long.")] = False,
    plugins: PluginsOption = None,
) -> None:
    """Try the settings of a sweep file, choose by validation accuracy, and repeat what was chosen with several seeds.

    The same command goes on after an interruption; started twice, two processes share the work.
    """
    from fedsieve.analysis.sweep.sweep_file import loaded_sweep

    settings = context.with_resource(loaded_sweep(file, overrides or [], plugins or []))
    if seeds is not None:
        settings = settings.model_copy(update={"seeds": seeds})
    folder = out or Path("runs") / Path(file).stem
    from fedsieve.analysis.estimate import Estimator
    from fedsieve.analysis.report.tables import foretold_table, sweep_table
    from fedsieve.analysis.sweep.outlook import foretell
    from fedsieve.analysis.sweep.run_sweep import as_words, run_sweep
    from fedsieve.observe.progress import ProgressBar

    terminal = console()
    if dry_run:
        rows = [(as_words(arm) or "as it is", left, seconds) for arm, left, seconds in foretell(settings, folder)]
        terminal.print(foretold_table(rows))
        return
    estimator = Estimator()  # which times the network only once
    results = run_sweep(settings, folder, lambda title: ProgressBar(terminal, title, estimator.phases))
    terminal.print(sweep_table(results))
    terminal.print(f"written to {folder}", soft_wrap=True)
    for arm in results["arms"]:
        for told in settings.beyond(arm["chosen"]) if arm["chosen"] else []:
            terminal.print(f"{arm['name']}: {told}", soft_wrap=True)
    failed = [(arm["name"], one) for arm in results["arms"] for one in arm["trials"] if one["state"] == "fail"]
    if failed:
        name, trial = failed[0]
        terminal.print(f"{len(failed)} trials failed; the first, in {name}: {trial['reason']}", soft_wrap=True)
    if idle := [arm["name"] for arm in results["arms"] if arm["chosen"] is None]:
        raise RunError(f"no trial of {', '.join(idle)} came to an end, so there is nothing to choose")
