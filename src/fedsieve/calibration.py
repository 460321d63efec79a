"""The mask of a phase without the phase itself: calibrated as a run would do it, and saved."""

from pathlib import Path

from fedsieve.config import Experiment, PhaseSettings, RidgeHead
from fedsieve.errors import InputError
from fedsieve.experiment import run
from fedsieve.federate.client import Broadcast
from fedsieve.model.checkpoint import fill
from fedsieve.model.classifier import read_classifier_file
from fedsieve.observer import Observer
from fedsieve.phases import Phase, masks_of, plan, training_depth
from fedsieve.sieve.mask import FILE_NAME, Mask
from fedsieve.workbench import Workbench, configure_torch

BEFORE = "before"  # beside it: the run of the phases before


def calibrate_phase(
    experiment: Experiment, out: Path, phase: str | None = None, client: int = 0, observer: Observer | None = None
) -> Mask:
    """The mask with which `phase` begins (None: the first that has one), also written to `out`.

    It is the one of all clients or, with `scope: client`, that of `client`; if masks are drawn anew, the first.
    What comes before the phase is run first, into `out`/before, or taken from there.
    """
    experiment, observer = experiment.resolved(), observer or Observer()
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
    bench = Workbench(experiment, observer if starts_here else Observer())  # else the run before says its notes
    planned = next(one for one in plan(experiment, bench) if one.settings.name == settings.name)
    if not starts_here:
        run(before, out / BEFORE, resume=True, observer=observer)
        tensors, _ = read_classifier_file(out / BEFORE / "model.safetensors")
        fill(bench.classifier, tensors, str(out / BEFORE))
        bench.observer = observer
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out} cannot be made ({error.strerror}); give another folder") from None
    mask = first_mask(experiment, planned, bench, client)
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


def first_mask(experiment: Experiment, phase: Phase, bench: Workbench, client: int) -> Mask:
    """A client's mask in the first round (and epoch) of a phase that begins with the weights on the bench."""
    settings, scope = phase.settings, phase.scope
    bench.begin_phase(scope.named)
    depth, start = training_depth(experiment, phase, bench), scope.read()
    masks = masks_of(experiment, phase, bench, depth, start, folder=None)  # there is only one to keep, by the caller
    broadcast = Broadcast(settings.name, 1, settings.rounds, start)
    masks.begin_phase()
    masks.begin_round(broadcast)
    return masks.mask(bench.client_data(client, depth), broadcast)
