"""The commands: parse, call, print. What they call is imported when it is needed, so that --help is quick."""

import io
import os
import sys
from typing import Annotated, Any

import typer

from fedsieve import __version__
from fedsieve.cli import comparing, federating, reporting, reproducing, running, showing, sweeping
from fedsieve.cli.caching import cache_app
from fedsieve.cli.clusters import cluster_app
from fedsieve.cli.linking import relay_app, superlink_app
from fedsieve.cli.masking import mask_app
from fedsieve.errors import INTERRUPTED_ADVICE, InputError, RunError, machine_error

app = typer.Typer(
    help="Federated sparse fine-tuning of pretrained vision models.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """What stands before a command: nothing at all prints the help."""
    if version:
        print(f"fedsieve {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), end="")


for command in (
    running.run,
    sweeping.sweep,
    comparing.compare,
    reproducing.reproduce,
    reporting.report,
    reporting.watch,
    reporting.explore,
    showing.presets,
    showing.show,
    showing.methods,
    showing.split,
    federating.node,
    running.evaluate,
    running.export,
    running.demo,
):
    app.command()(command)
app.add_typer(mask_app, name="mask")
app.add_typer(cache_app, name="cache")
app.add_typer(cluster_app, name="cluster")
app.add_typer(superlink_app, name="superlink")
app.add_typer(relay_app, name="relay")

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # typer brings its own copy of click, or uses the installed one


def main(arguments: list[str] | None = None) -> Any:
    """The program `fedsieve`: 0 if all went well, 2 for bad input, 1 for a run that failed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # of names that the terminal cannot show
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="fedsieve", standalone_mode=False)
    except InputError as error:
        code = _fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except USAGE_ERROR as error:
        code = _fail(f"{error.format_message()} See 'fedsieve --help'.", 2)
    except UnicodeEncodeError as error:
        code = _fail(f"{error.object[:60]!a} is a name that is not UTF-8; rename it", 2)
    except Exception as error:
        code = _fail(_said_of(error), 1)
    if code == 130:  # typer has swallowed Ctrl-C
        _fail(INTERRUPTED_ADVICE, 130)
    sys.exit(_flushed(code or 0))


def _said_of(error: Exception) -> str:
    """What ended a run; an error that nobody foresaw is raised again, with its traceback."""
    if (known := machine_error(error)) is not None:
        return str(known)
    if isinstance(error, RunError | OSError):
        return str(error)
    raise error


def _flushed(code: int) -> int:
    """The exit code once all that was printed has arrived; where it could not, Python must not try again."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or _fail(str(error), 1)
    return code


def _fail(message: str, code: int) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code
