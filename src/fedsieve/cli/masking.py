"""`fedsieve mask`: calibrate masks, and compare them."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedsieve.cli.arguments import (
    ExperimentArgument,
    JsonOption,
    NewFolderOption,
    OverridesArgument,
    PluginsOption,
    console,
    new_folder,
)


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


@mask_app.command("calibrate")
def mask_calibrate(
    context: typer.Context,
    experiment: ExperimentArgument,
    overrides: OverridesArgument = None,
    out: NewFolderOption = None,
    phase: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose mask; default: the first phase that has one.")
    ] = None,
    client: Annotated[int, typer.Option(metavar="N", help="Whose mask, where each client has its own.")] = 0,
    as_json: JsonOption = False,
    plugins: PluginsOption = None,
) -> None:
    """Calibrate the mask of a phase as a run would, save it, and show how dense it is where.

    The phases before it are run first, into DIR/before; after an interruption the same command goes on there.
    """
    from fedsieve.config.experiment_file import experiment_name
    from fedsieve.config.runnable import loaded

    settings = context.with_resource(loaded(experiment, overrides or [], plugins or []))
    folder = out or new_folder(f"{experiment_name(experiment)}-mask")
    from fedsieve.analysis.estimate import Estimator
    from fedsieve.analysis.phase_mask import calibrate_phase
    from fedsieve.analysis.report.plots import plot_density
    from fedsieve.analysis.report.tables import layers_table
    from fedsieve.observe.progress import ProgressBar
    from fedsieve.sieve.density import density

    terminal = console(stderr=as_json)  # so that data is all there is to read
    with ProgressBar(terminal, f"what comes before the mask into {folder / 'before'}", Estimator().phases) as bar:
        mask = calibrate_phase(settings, folder, phase, client, bar)
    layers = density(mask)
    plot_density(layers, folder / "density.png")
    if as_json:
        figures = {"density": mask.density, "active": mask.active, "size": mask.size, "tensors": mask.densities()}
        print(json.dumps({**figures, "blocks": layers.blocks, "rest": layers.rest}))
        return
    terminal.print(layers_table(layers, f"{mask.active:,} of {mask.size:,} weights may change"))
    terminal.print(f"written to {folder}: mask.safetensors and density.png", soft_wrap=True)


@mask_app.command("compare")
def mask_compare(
    one: Annotated[Path, typer.Argument(metavar="A", help="A mask's file, or a folder that `fedsieve mask` wrote.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="Another of the same model and phase.")],
    as_json: JsonOption = False,
) -> None:
    """Show how much two masks have in common: weights in both over weights in either (Jaccard index)."""
    from fedsieve.sieve.density import overlap
    from fedsieve.sieve.mask import Mask

    first, second = Mask.load(one), Mask.load(other)
    second.must_fit(first.shapes, str(other))
    layers = overlap(first, second)
    if as_json:
        figures = {"overlap": layers.total, "densities": [first.density, second.density]}
        tensors = first.overlaps(second)
        print(json.dumps({**figures, "tensors": tensors, "blocks": layers.blocks, "rest": layers.rest}))
        return
    from fedsieve.analysis.report.tables import layers_table
    from fedsieve.observe.numbers import percent

    terminal = console()
    terminal.print(layers_table(layers, "overlap: weights in both over weights in either"))
    terminal.print(f"density {percent(first.density)}: {one}", soft_wrap=True)
    terminal.print(f"density {percent(second.density)}: {other}", soft_wrap=True)
