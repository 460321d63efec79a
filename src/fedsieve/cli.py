"""The commands: parse, call, print. What they call is imported when it is needed, so that --help is quick."""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from fedsieve.errors import InputError, RunError

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    help="Federated sparse fine-tuning of pretrained vision models.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="The cache of downloads and features.")
app.add_typer(cache_app, name="cache")


class CalibrateUnlessSaid(TyperGroup):
    """`fedsieve mask EXPERIMENT` means `fedsieve mask calibrate EXPERIMENT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        said = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if said else ["calibrate", *args])


mask_app = typer.Typer(
    cls=CalibrateUnlessSaid,
    subcommand_metavar="EXPERIMENT [KEY=VALUE]... | compare A B",
    help="Calibrate the mask of a phase and show where it lets weights change, or compare two masks. "
    "`fedsieve mask EXPERIMENT` is short for `fedsieve mask calibrate EXPERIMENT`.",
)
app.add_typer(mask_app, name="mask")

ExperimentArgument = Annotated[
    str, typer.Argument(metavar="EXPERIMENT", help="A preset's name (see `fedsieve presets`) or a YAML file.")
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes to it: clients.count=20 phases.0.rounds=5"),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print data instead of a table.")]


@app.command()
def run(
    experiment: ExperimentArgument,
    overrides: OverridesArgument = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write; default: a new folder under runs/.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in DIR where it was ended.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="End with a table of where the time went.")] = False,
) -> None:
    """Run an experiment, and write its metrics, model and result to a folder."""
    started = time.perf_counter()
    from fedsieve.experiment_file import load_experiment

    settings = load_experiment(experiment, overrides or [])
    if resume and out is None:
        raise InputError("--resume needs to know which run to go on with; add --out DIR")
    folder = out or _new_folder(Path(experiment).stem)
    from fedsieve.experiment import run as run_experiment
    from fedsieve.report.progress import ProgressBar
    from fedsieve.report.tables import result_table, spread_over_clients, times_table
    from fedsieve.workbench import SYNCHRONIZE

    if profile:
        os.environ[SYNCHRONIZE] = "1"
    loaded = time.perf_counter() - started
    console = _console()
    with ProgressBar(console, f"{experiment} into {folder}") as bar:
        result = run_experiment(settings, folder, resume, bar)
    console.print(result_table(result))
    if result.get("clients"):
        console.print(spread_over_clients(result["clients"]), soft_wrap=True)
    if profile and bar.times is not None:  # else the run was finished before
        console.print(times_table(bar.times, loaded))
    console.print(f"written to {folder}", soft_wrap=True)


@app.command()
def presets() -> None:
    """List the experiments that come with fedsieve."""
    from fedsieve.experiment_file import preset_names, preset_text

    names = preset_names()
    for name in names:
        about = preset_text(name).splitlines()[0].lstrip("# ")
        print(f"{name:<{max(map(len, names))}}  {about}")


@app.command()
def show(experiment: ExperimentArgument, overrides: OverridesArgument = None) -> None:
    """Print an experiment as YAML, with every default filled in."""
    from fedsieve.experiment_file import load_experiment

    print(load_experiment(experiment, overrides or []).resolved().to_yaml(), end="")


@app.command()
def split(
    experiment: ExperimentArgument,
    overrides: OverridesArgument = None,
    png: Annotated[Path, typer.Option(metavar="FILE", help="Where to draw it.")] = Path("split.png"),
    as_json: JsonOption = False,
) -> None:
    """Show which client holds how many samples of which class."""
    from fedsieve.experiment_file import load_experiment
    from fedsieve.workbench import class_counts

    settings = load_experiment(experiment, overrides or []).resolved()
    counts, classes, notes = class_counts(settings)
    if as_json:
        clients = [{classes[k]: int(row[k]) for k in row.nonzero()[0]} for row in counts]
        rows = [
            {"client": client, "samples": int(counts[client].sum()), "classes": held}
            for client, held in enumerate(clients)
        ]
        print(json.dumps({"classes": classes, "clients": rows, "notes": notes}))
        return
    from fedsieve.report.plots import plot_split
    from fedsieve.report.tables import split_table

    console = _console()
    console.print(split_table(counts, classes))
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)
    plot_split(counts, png)
    console.print(f"written to {png}", soft_wrap=True)


@app.command()
def evaluate(run: RunArgument, as_json: JsonOption = False) -> None:
    """Score a finished run's model again, on its validation and test sets."""
    from fedsieve.experiment import evaluate_run
    from fedsieve.report.tables import scores_table

    scores = evaluate_run(run)
    if as_json:
        print(json.dumps(scores))
    else:
        _console().print(scores_table(scores))


@app.command()
def export(
    run: RunArgument,
    to: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make.")],
) -> None:
    """Write a finished run's model in Hugging Face format."""
    from fedsieve.runs.export import export_run

    console = _console()
    console.print(export_run(run, to), soft_wrap=True)
    console.print(f"written to {to}", soft_wrap=True)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write.")] = Path("demo"),
) -> None:
    """Compare dense and sparse fine-tuning, centralized, IID and non-IID, on embedded data, in a few minutes."""
    from fedsieve.report.demo import run_demo

    run_demo(out, _console())


@mask_app.command("calibrate")
def mask_calibrate(
    experiment: ExperimentArgument,
    overrides: OverridesArgument = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write; default: a new folder under runs/.")
    ] = None,
    phase: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose mask; default: the first phase that has one.")
    ] = None,
    client: Annotated[int, typer.Option(metavar="N", help="Whose mask, where each client has its own.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Calibrate the mask of a phase as a run would, save it, and show how dense it is where.

    The phases before it are run first, into DIR/before; after an interruption the same command goes on there.
    """
    from fedsieve.experiment_file import load_experiment

    settings = load_experiment(experiment, overrides or [])
    folder = out or _new_folder(f"{Path(experiment).stem}-mask")
    from fedsieve.calibration import calibrate_phase, density
    from fedsieve.report.plots import plot_density
    from fedsieve.report.progress import ProgressBar
    from fedsieve.report.tables import layers_table

    console = _console(stderr=as_json)  # so that data is all there is to read
    with ProgressBar(console, f"what comes before the mask into {folder / 'before'}") as bar:
        mask = calibrate_phase(settings, folder, phase, client, bar)
    layers = density(mask)
    plot_density(layers, folder / "density.png")
    if as_json:
        figures = {"density": mask.density, "active": mask.active, "size": mask.size, "tensors": mask.densities()}
        print(json.dumps({**figures, "blocks": layers.blocks, "rest": layers.rest}))
        return
    console.print(layers_table(layers, f"{mask.active:,} of {mask.size:,} weights may change"))
    console.print(f"written to {folder}: mask.safetensors and density.png", soft_wrap=True)


@mask_app.command("compare")
def mask_compare(
    one: Annotated[Path, typer.Argument(metavar="A", help="A mask's file, or a folder that `fedsieve mask` wrote.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="Another of the same model and phase.")],
    as_json: JsonOption = False,
) -> None:
    """Show how much two masks have in common: weights in both over weights in either (Jaccard index)."""
    from fedsieve.calibration import overlap
    from fedsieve.sieve.mask import Mask

    first, second = Mask.load(one), Mask.load(other)
    second.must_fit(first.shapes, str(other))
    layers = overlap(first, second)
    if as_json:
        figures = {"overlap": layers.total, "densities": [first.density, second.density]}
        tensors = first.overlaps(second)
        print(json.dumps({**figures, "tensors": tensors, "blocks": layers.blocks, "rest": layers.rest}))
        return
    from fedsieve.report.tables import layers_table, percent

    console = _console()
    console.print(layers_table(layers, "overlap: weights in both over weights in either"))
    console.print(f"density {percent(first.density)}: {one}", soft_wrap=True)
    console.print(f"density {percent(second.density)}: {other}", soft_wrap=True)


@cache_app.command("show")
def cache_show() -> None:
    """Say where the cache is and how much is in it."""
    from fedsieve.cache import cache_folder, cache_size
    from fedsieve.federate.traffic import size

    print(f"{cache_folder()}: {size(cache_size())}")


@cache_app.command("clear")
def cache_clear() -> None:
    """Delete everything in the cache."""
    from fedsieve.cache import cache_folder, clear
    from fedsieve.federate.traffic import size

    print(f"{cache_folder()}: {size(clear())} freed")


def _console(stderr: bool = False) -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False, stderr=stderr)  # paths and class names may hold brackets


def _new_folder(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, NAME-3, … that is not there yet."""
    folder, number = Path("runs") / name, 2
    while folder.exists():
        folder, number = Path("runs") / f"{name}-{number}", number + 1
    return folder


USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # typer brings its own copy of click, or uses the installed one


def main(arguments: list[str] | None = None) -> Any:
    """The program `fedsieve`: 0 if all went well, 2 for bad input, 1 for a run that failed."""
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="fedsieve", standalone_mode=False)
    except InputError as error:
        code = _fail(str(error), 2)
    except (RunError, OSError) as error:  # a full disk, say
        code = _fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except USAGE_ERROR as error:
        code = _fail(f"{error.format_message()} See 'fedsieve --help'.", 2)
    if code == 130:  # typer has swallowed Ctrl-C
        _fail("interrupted; the same command with --out (and --resume, for a run) goes on", 130)
    sys.exit(code or 0)


def _fail(message: str, code: int) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code
