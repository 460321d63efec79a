"""Pages for a browser: `fedsieve report`, `fedsieve watch`, `fedsieve explore`."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from fedsieve.cli.arguments import JsonOption, console, reachable
from fedsieve.errors import InputError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or with runs below them.")],
    out: Annotated[
        Path | None, typer.Option(callback=reachable, metavar="FILE", help="The page to write; default: report.html.")
    ] = None,
    title: Annotated[str, typer.Option(metavar="TEXT", help="What stands above it.")] = "fedsieve report",
    as_json: JsonOption = False,
) -> None:
    """Write one HTML page about runs, finished or not: results, curves, drift, bytes, masks, who holds what.

    Runs that differ only in the seed are shown as their mean with its 95% interval. With --json the page's data is
    printed, and the page is written only if --out says where.
    """
    from fedsieve.analysis.collection import find_runs
    from fedsieve.analysis.report.overview import overview
    from fedsieve.analysis.report.page import page, write_file

    found, problems = find_runs(runs)
    if not found:
        raise InputError("; ".join(problems))
    data = overview(found, problems, title)
    for warning in data["warnings"]:
        print("warning: " + " ".join(warning.split()), file=sys.stderr)
    file = out or Path("report.html")
    if not as_json or out is not None:
        write_file(file, page(data["title"], "report", data))
    if as_json:
        print(json.dumps(data))
        return
    from fedsieve.analysis.report.overview_tables import gains_table, groups_table

    terminal = console()
    terminal.print(groups_table(data["groups"]))
    if any(len(group["gains"]) > 1 for group in data["groups"]):
        terminal.print(gains_table(data["groups"]))
    terminal.print(f"written to {file}", soft_wrap=True)


def explore(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="A folder of images, an npz file, digits, cifar100; or an experiment, for its data."
        ),
    ],
    path: Annotated[str | None, typer.Option(metavar="PATH", help="Where the data lies, as data.path says.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(callback=reachable, metavar="FILE", help="The page to write; default: explore.html."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the images that are shown at random.")] = 0,
    reference: Annotated[
        int | None, typer.Option(metavar="N", help="The training image to compare with; default: one at random.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one HTML page about a data set: balance, samples, likeness, spread of classes, colours out of line.

    With --json the page's figures are printed, and the page is written only if --out says where.
    """
    from fedsieve.analysis.report.exploration import data_settings, exploration, figures
    from fedsieve.analysis.report.page import page, write_file
    from fedsieve.data.explore import sizes_in_files
    from fedsieve.data.load import load
    from fedsieve.data.pictures import shown

    refuse_a_federation(data)
    settings = data_settings(data, path)
    name = " ".join(filter(None, [settings.name, settings.path and shown(Path(settings.path).resolve().name)]))
    found = exploration(load(settings), name, seed, reference, sizes_in_files(settings))
    file = out or Path("explore.html")
    if not as_json or out is not None:
        write_file(file, page(found["title"], "explore", found))
    if as_json:
        print(json.dumps(figures(found)))
        return
    terminal, outliers = console(), found["outliers"]
    ends = list(found["sizes"].values()) if found["sizes"] else [found["shape"][:0:-1]] * 2
    sizes = " x ".join(f"{least}" if least == most else f"{least} to {most}" for least, most in zip(*ends, strict=True))
    terminal.print(
        f"{sum(found['train']):,} training and {sum(found['test']):,} test images of {len(found['classes'])} classes, "
        f"{sizes} pixels; {outliers['count']:,} training images have a mean colour out of line",
        soft_wrap=True,
    )
    terminal.print(f"written to {file}", soft_wrap=True)


def refuse_a_federation(data: str) -> None:
    """InputError if it is an experiment whose data are elsewhere."""
    from fedsieve.config.experiment_file import file_text, load_experiment
    from fedsieve.data import DATASETS

    is_experiment = data not in DATASETS and Path(data).suffix != ".npz" and file_text(data) is not None
    if is_experiment and load_experiment(data).federation is not None:
        raise InputError(
            "the data of this experiment are at its nodes; name data that are here instead, or set engine=local in it"
        )


def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder in which runs are or will be.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to serve; 0 is any that is free.")] = 8000,
    host: Annotated[str, typer.Option(help="Who can see it; 0.0.0.0 is everybody on the network.")] = "127.0.0.1",
) -> None:
    """Serve the report on all runs below DIR while they go on; the page in the browser follows by itself."""
    from fedsieve.analysis.report.watch import serving

    with serving(folder, port, host) as server:
        address = f"http://{host}:{server.server_address[1]}/"
        print(f"the runs in {folder} at {address} until Ctrl-C", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
