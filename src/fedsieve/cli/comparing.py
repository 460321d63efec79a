"""`fedsieve compare`: runs side by side."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedsieve.cli.arguments import JsonOption, console, reachable
from fedsieve.errors import InputError


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or with runs in them.")],
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Group by this setting (its end will do); default: all that differ."),
    ] = None,
    metric: Annotated[str, typer.Option(metavar="NAME", help="The figure that is tested.")] = "test_accuracy",
    baseline: Annotated[
        list[str] | None,
        typer.Option(metavar="GROUP", help="What to compare with: a name, or KEY=VALUE; default: the first."),
    ] = None,
    to_csv: Annotated[
        Path | None, typer.Option("--csv", callback=reachable, metavar="FILE", help="Also write it as CSV.")
    ] = None,
    to_latex: Annotated[
        Path | None, typer.Option("--latex", callback=reachable, metavar="FILE", help="Also write it as LaTeX.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare finished runs: means over seeds with their intervals, and which differ by more than chance."""
    from fedsieve.analysis import compare as comparing
    from fedsieve.analysis.report.formats import as_csv, as_data, as_latex
    from fedsieve.analysis.report.page import write_file
    from fedsieve.analysis.report.tables import comparison_table, differences_table
    from fedsieve.observe.numbers import percent

    for file in (to_csv, to_latex):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise InputError(f"{file} cannot be written; give a file in a folder that exists")
    comparison = comparing.compare(runs, by or [], metric, baseline or [])
    terminal, errors = console(), console(stderr=True)
    for warning in comparison.warnings:
        errors.print(f"warning: {warning}", soft_wrap=True)
    asked = [(file, form) for file, form in ((to_csv, as_csv), (to_latex, as_latex)) if file is not None]
    for file, text in [(file, form(comparison)) for file, form in asked]:  # all there before the first is written
        write_file(file, text)
    if as_json:
        print(json.dumps(as_data(comparison)))
        return
    terminal.print(comparison_table(comparison))
    if len(comparison.groups) > 1:
        terminal.print(differences_table(comparison))
    for run in comparison.unfinished:
        accuracy = run.latest["val_accuracy"]
        so_far = "" if accuracy is None else f" (validation accuracy {percent(accuracy)} so far)"
        terminal.print(f"{run.path} is {run.state}{so_far}, and left out", soft_wrap=True)
    if hidden := [key for key in comparison.telling if key not in comparison.shown]:
        also = "also " if comparison.shown else ""
        terminal.print(f"groups {also}differ in {comparing.in_few_words(hidden)}; --json has all", soft_wrap=True)
    for file, _ in asked:
        terminal.print(f"written to {file}", soft_wrap=True)
