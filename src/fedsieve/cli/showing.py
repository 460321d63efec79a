"""Commands that look at experiments without running them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsieve.cli.arguments import ExperimentArgument, JsonOption, OverridesArgument, PluginsOption, console, reachable
from fedsieve.errors import InputError

if TYPE_CHECKING:
    from fedsieve.config.schema import Experiment


def presets(
    beginning: Annotated[
        str, typer.Argument(metavar="BEGINNING", help="Only those whose names begin so: 001, digits, 002-table4.2")
    ] = "",
) -> None:
    """List the experiments that come with fedsieve, those of each report under a heading, and the sweeps."""
    from fedsieve.analysis.sweep.sweep_file import sweep_about, sweep_names
    from fedsieve.config.experiment_file import preset_about, preset_names, report_of

    names = [name for name in preset_names() if name.startswith(beginning)]
    sweeps = {name: sweep_about(name) for name in sweep_names() if name.startswith(beginning)}
    if not names and not sweeps:
        raise InputError(f"no preset begins with '{beginning}'; `fedsieve presets` lists them all")
    for report in sorted({report_of(name) or "" for name in names}):
        group = [name for name in names if (report_of(name) or "") == report]
        about = {name: preset_about(name).removeprefix(f"Report {report}, ") for name in group}
        _print_listed(f"Report {report} ({len(group)})" if report else "", about)
    _print_listed("Sweeps, for `fedsieve sweep`", sweeps)


def _print_listed(heading: str, about: dict[str, str]) -> None:
    if heading and about:
        print(f"\n{heading}")
    for name, text in about.items():
        print(f"{name:<{max(map(len, about))}}  {text}")


def show(experiment: ExperimentArgument, overrides: OverridesArgument = None) -> None:
    """Print an experiment as YAML, with every default filled in; settings of plugins' parts as they are given."""
    from fedsieve.config.experiment_file import load_experiment

    print(load_experiment(experiment, overrides or []).resolved().to_yaml(), end="")


def methods(as_json: JsonOption = False, plugins: PluginsOption = None) -> None:
    """List what experiments are made of: methods, aggregators, optimizers, mask rules, selections, splits, data sets.

    Each with one line, its paper, its settings, and what it does not go with.
    """
    from dataclasses import asdict

    from fedsieve.analysis.catalogue import catalogue
    from fedsieve.config.dotted import as_text
    from fedsieve.config.experiment_file import all_paths
    from fedsieve.config.plugins import used

    with used(all_paths(plugins or [])):
        found = catalogue()
    if as_json:
        print(json.dumps({key: [asdict(part) for part in parts] for key, parts in found.items()}))
        return
    terminal = console()
    for key, parts in found.items():
        terminal.print(f"\n{key}", style="bold")
        width = max(len(part.name) for part in parts)
        for part in parts:
            paper = f" ({part.paper})" if part.paper else ""
            terminal.print(f"  {part.name:<{width}}  {part.about}{paper}", soft_wrap=True)
            settings = ", ".join(f"{name}: {as_text(value)}" for name, value in part.settings.items())
            lines = [f"{{{part.name}: {{{settings}}}}}"] if settings else []
            for line in [*lines, *(f"not with {refused}" for refused in part.refuses)]:
                terminal.print(f"  {'':<{width}}  {line}", style="dim", soft_wrap=True)


def split(
    experiment: ExperimentArgument,
    overrides: OverridesArgument = None,
    png: Annotated[Path, typer.Option(metavar="FILE", help="Where to draw it.")] = Path("split.png"),
    as_json: JsonOption = False,
    plugins: PluginsOption = None,
    export: Annotated[
        Path | None,
        typer.Option(callback=reachable, metavar="DIR", help="Write each client's data there; draw nothing."),
    ] = None,
    form: Annotated[
        str, typer.Option("--as", metavar="FORM", help="Of the clients' data with --export: npz or folders (of PNGs).")
    ] = "npz",
) -> None:
    """Show which client holds how many samples of which class, or write them, for a federation of machines."""
    from fedsieve.config.runnable import loaded
    from fedsieve.data.roles import class_counts

    if export is not None:
        with loaded(experiment, overrides or [], plugins or []) as settings:
            _export(settings, export, form, as_json)
        return
    with loaded(experiment, overrides or [], plugins or []) as settings:
        counts, classes, notes = class_counts(settings.resolved())
    if as_json:
        clients = [{classes[k]: int(row[k]) for k in row.nonzero()[0]} for row in counts]
        rows = [
            {"client": client, "samples": int(counts[client].sum()), "classes": held}
            for client, held in enumerate(clients)
        ]
        print(json.dumps({"classes": classes, "clients": rows, "notes": notes}))
        return
    from fedsieve.analysis.report.plots import plot_split
    from fedsieve.analysis.report.tables import split_table

    terminal = console()
    terminal.print(split_table(counts, classes))
    for note in notes:
        terminal.print(f"note: {note}", soft_wrap=True)
    plot_split(counts, classes, png)
    terminal.print(f"written to {png}", soft_wrap=True)


def _export(experiment: "Experiment", folder: Path, form: str, as_json: bool) -> None:
    """Write each client's data, and print what was written."""
    from fedsieve.experiment.export_split import export_split

    if form not in ("npz", "folders"):
        raise InputError(f"--as is '{form}'; use npz or folders")
    federation, notes = export_split(experiment, folder, "npz" if form == "npz" else "folders")
    if as_json:
        print(federation.model_dump_json())
        return
    from fedsieve.analysis.report.tables import split_table

    terminal = console()
    assert federation.class_counts is not None
    terminal.print(split_table(federation.class_counts, federation.classes))
    for note in notes:
        terminal.print(f"note: {note}", soft_wrap=True)
    clients, total = federation.clients, int(federation.samples.sum())
    files = f"{clients[0].file} to {clients[-1].file}" if len(clients) > 1 else clients[0].file
    terminal.print(f"{files}: {total:,} training samples of {len(clients):,} clients", soft_wrap=True)
    terminal.print("server.npz: the validation and test images", soft_wrap=True)
    terminal.print("federation.json and experiment.yaml: what the server and all clients need", soft_wrap=True)
    terminal.print(f"written to {folder}", soft_wrap=True)
