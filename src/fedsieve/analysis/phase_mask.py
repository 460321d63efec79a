"""The mask of a phase without the phase itself: calibrated as a run would do it, and saved."""

from pathlib import Path

from fedsieve.config.model_settings import RidgeHead
from fedsieve.config.phase_settings import PhaseSettings
from fedsieve.config.runnable import with_plugins
from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.engine.client_runtime import ClientRuntime
from fedsieve.engine.serial import Serial
from fedsieve.engine.torch_setup import configure_torch
from fedsieve.errors import InputError
from fedsieve.experiment import run
from fedsieve.experiment.prepare import publish_phase, shared_masks_of
from fedsieve.federate.types import Broadcast
from fedsieve.federate.versions import Versions
from fedsieve.model.pretrained import fill
from fedsieve.observe.callbacks import Callback
from fedsieve.phase import Phase, calibration_depth, check_mask_files, client_side, mask_source, plan
from fedsieve.runs.model_file import read_classifier_file
from fedsieve.sieve.mask import FILE_NAME, Mask

BEFORE = "before"  # beside it: the run of the phases before


def calibrate_phase(
    experiment: Experiment, out: Path, phase: str | None = None, client: int = 0, callback: Callback | None = None
) -> Mask:
    """The mask with which `phase` begins (None: the first that has one), also written to `out`.

    It is the one of all clients or, with `scope: client`, that of `client`; if masks are drawn anew, the first.
    What comes before the phase is run first, into `out`/before, or taken from there.
    """
    with with_plugins(experiment) as known:
        return _calibrate(known.resolved(), out, phase, client, callback or Callback())


def _calibrate(experiment: Experiment, out: Path, phase: str | None, client: int, callback: Callback) -> Mask:
    if experiment.federation is not None:
        raise InputError("the data of this experiment are at its nodes; engine=local uses data that are here")
    index = masked_phase(experiment, phase)
    settings, count = experiment.phases[index], experiment.clients.count
    assert settings.mask is not None
    if not 0 <= client < count:
        raise InputError(f"--client {client}: there is no such client; use 0 to {count - 1}")
    refuse_unless_free(out)
    configure_torch(experiment)
    before = experiment.model_copy(update={"phases": experiment.phases[:index], "track": ()})
    is_first = not before.phases and not isinstance(experiment.model.head, RidgeHead)
    starts_here = is_first or settings.mask.file is not None  # a file's mask does not depend on the weights
    context = RunContext(experiment, callback if starts_here else Callback())  # else the run before says its notes
    phases = plan(experiment, context)
    check_mask_files(experiment, phases)
    planned = next(one for one in phases if one.settings.name == settings.name)
    if not starts_here:
        run(before, out / BEFORE, resume=True, callback=callback)
        tensors, _ = read_classifier_file(out / BEFORE / "model.safetensors")
        fill(context.classifier, tensors, str(out / BEFORE))
        context.callback = callback
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out} cannot be made ({error.strerror}); give another folder") from None
    mask = first_mask(context, phases, planned, client)
    mask.save(out / FILE_NAME)
    return mask


def masked_phase(experiment: Experiment, name: str | None) -> int:
    """Where among the phases the one with this name stands, or the first that has a mask."""
    phases = experiment.phases
    names = [phase.name for phase in phases]
    if name is not None and name not in names:
        there = f"use {' or '.join(names)}" if names else "the experiment has none"
        raise InputError(f"--phase {name}: there is no such phase; {there}")
    masked = [index for index, phase in enumerate(phases) if phase.mask and name in (None, phase.name)]
    if masked:
        return masked[0]
    if name is not None:
        raise InputError(f"phase {name} has no mask; add phases.{names.index(name)}.mask={{sparsity: 0.9}}")
    if not phases:
        raise InputError("this experiment has no phases, so there is nothing to mask; add one that has a mask")
    raise InputError(
        f"no phase of this experiment has a mask; add phases.{_worth_a_mask(phases)}.mask={{sparsity: 0.9}}"
    )


def _worth_a_mask(phases: tuple[PhaseSettings, ...]) -> int:
    """The first phase that trains more than a head, else the last."""
    return next((index for index, phase in enumerate(phases) if phase.train != "head"), len(phases) - 1)


def refuse_unless_free(out: Path) -> None:
    """InputError if the folder holds anything but what an earlier, interrupted calibration left."""
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"--out {out} is a file; give the name of a new folder")
    if (out / FILE_NAME).exists():
        raise InputError(f"--out {out} holds a mask already; give another folder")
    if any(entry.name != BEFORE and not entry.name.startswith(".") for entry in out.iterdir()):
        raise InputError(f"--out {out} holds something else than a mask; give the name of a new folder")


def first_mask(context: RunContext, phases: list[Phase], phase: Phase, client: int) -> Mask:
    """A client's mask in the first round (and epoch) of a phase that begins with the model's weights."""
    start, settings = phase.scope.read(), phase.settings
    engine = Serial(ClientRuntime(context, phases, kept=None))
    publish_phase(engine, phase, context.model.vector.clone(), start, is_whole=True)
    masks = mask_source(context, phase, start, files=None)  # there is only one to keep, by the caller
    assert masks is not None
    versions = Versions.at_start(context.model, len(context.sizes), have_backbone=True)
    transport = client_side(context, phase, masks, versions).transport
    shared_masks = shared_masks_of(context, phase, masks, engine, transport)
    broadcast = Broadcast(settings.name, 1, settings.rounds, start)
    shared_masks.begin_phase(is_new=False)
    shared_masks.begin_round(broadcast)
    return masks.mask(context.client_data(client, calibration_depth(context, phase)), broadcast)
