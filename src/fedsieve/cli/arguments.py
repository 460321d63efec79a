"""What the commands share: arguments, the terminal, names of new folders."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsieve.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

ExperimentArgument = Annotated[
    str, typer.Argument(metavar="EXPERIMENT", help="A preset's name (see `fedsieve presets`) or a YAML file.")
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes to it: clients.count=20 phases.0.rounds=5"),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]
PluginsOption = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE", help="A Python file with parts of your own; repeatable (docs/extend.md)."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print data instead of a table.")]


def console(stderr: bool = False) -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False, stderr=stderr)  # paths and class names may hold brackets


def reachable(path: Path | None) -> Path | None:
    """The place that an option names; InputError if one cannot look there, or if safetensors could not."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise InputError(f"{ascii(str(path))[:60]} is no name in UTF-8; give another place") from None
    try:
        if path is not None and path.is_dir():
            next(path.iterdir(), None)
    except OSError as error:
        raise InputError(f"'{str(path)[:60]}' cannot be used ({error.strerror}); give another place") from None
    return path


NewFolderOption = Annotated[
    Path | None,
    typer.Option(callback=reachable, metavar="DIR", help="Where to write; default: a new folder under runs/."),
]


def new_folder(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, NAME-3, … that is not there yet."""
    folder, number = Path("runs") / name, 2
    while folder.exists():
        folder, number = Path("runs") / f"{name}-{number}", number + 1
    return folder
