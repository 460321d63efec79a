"""Pages for a browser: `fedsieve report`, `fedsieve watch`, `fedsieve explore`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedsieve.cli.common import JsonOption, console
from fedsieve.errors import InputError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or with runs below them.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page to write.  [default: report.html]", show_default=False)
    ] = None,
    title: Annotated[str, typer.Option(metavar="TEXT", help="What stands above it.")] = "fedsieve report",
    as_json: JsonOption = False,
) -> None:
    """Write one HTML page about runs, finished or not: results, curves, drift, bytes, masks, who holds what.

    Runs that differ only in the seed are shown as their mean with its 95% interval. With --json the page's data is
    printed, and the page is written only if --out says where.
    """
    from fedsieve.report.overview import overview
    from fedsieve.report.page import page, write_page
    from fedsieve.runs.collection import find_runs

    found, problems = find_runs(runs)
    if not found:
        raise InputError("; ".join(problems))
    data = overview(found, problems, title)
    for warning in data["warnings"]:
        print("warning: " + " ".join(warning.split()), file=sys.stderr)
    if not as_json or out is not None:
        file = out or Path("report.html")
        write_page(file, page(data["title"], "report.js", data))
    if as_json:
        print(json.dumps(data))
        return
    from fedsieve.report.tables import groups_table

    terminal = console()
    terminal.print(groups_table(data["groups"]))
    terminal.print(f"written to {file}", soft_wrap=True)
