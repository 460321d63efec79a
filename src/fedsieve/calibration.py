"""The mask of a phase without the phase itself: calibrated as a run would do it, saved, and counted layer by layer."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fedsieve.config import Experiment, PhaseSettings, RidgeHead
from fedsieve.errors import InputError
from fedsieve.experiment import run
from fedsieve.federate.client import Broadcast
from fedsieve.model.checkpoint import fill
from fedsieve.model.classifier import read_classifier_file
from fedsieve.model.flat import KINDS, kind_of
from fedsieve.phases import Phase, masks_of, plan, training_depth
from fedsieve.sieve.mask import FILE_NAME, Mask
from fedsieve.workbench import Observer, Workbench, configure_torch

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
        tensors, _ = read_classifier_file(out / BEFORE / "model.safetensors", "--out")
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


# -------------------------------------------------------------------------------------- layer by layer

LAYERS = ("q", "k", "v", "proj", "fc1", "fc2", "norms")  # of a ViT's block
REST = {"patch": "patch", "tokens": "tokens", "norm": "final norm", "head": "head"}  # of a ViT outside of its blocks
BLOCK = re.compile(r"(?:backbone\.)?blocks\.(\d+)\.(?:attn\.|mlp\.)?(\w+)")
Cell = tuple[int | str, str]  # row and column: a block's number or a kind of layer, and one of LAYERS or "all"


@dataclass(frozen=True)
class Layers:
    """A share (a density, say) of every layer; None for layers that a mask does not cover."""

    blocks: dict[int, dict[str, float | None]]  # by number, then by LAYERS and "all"; empty for a network without
    rest: dict[str, float | None]  # by kind of layer
    total: float


def density(mask: Mask) -> Layers:
    """The active share of every layer's weights."""
    return shares(mask, Mask.full(mask.shapes))


def overlap(one: Mask, other: Mask) -> Layers:
    """The Jaccard index of every layer: weights in both over weights in either; 1 where both are empty."""
    return shares(one & other, one | other)


def shares(part: Mask, whole: Mask) -> Layers:
    """How much of `whole` is in `part`, which lies within it."""
    counted, size = Counter[Cell](), Counter[Cell]()
    has_blocks = any(BLOCK.match(name) for name in whole.shapes)
    for name in whole.shapes:
        cells = _cells(name) if has_blocks else [(kind_of(name) or "other", "all")]
        for mask, total in ((part, counted), (whole, size)):
            for (row, column), bits in zip(cells, mask[name].flatten().chunk(len(cells)), strict=True):
                for cell in {(row, column), (row, "all")}:
                    total[cell] += int(bits.sum())

    def share(row: int | str, column: str = "all") -> float | None:
        if (row, column) not in size:
            return None
        return counted[row, column] / size[row, column] if size[row, column] else 1.0

    depth = 1 + max((row for row, _ in size if isinstance(row, int)), default=-1)
    blocks = {row: {column: share(row, column) for column in (*LAYERS, "all")} for row in range(depth)}
    rows = [*(REST.values() if has_blocks else (kind for kind in KINDS if (kind, "all") in size))]
    rest = {row: share(row) for row in rows + ["other"] * (("other", "all") in size)}
    return Layers(blocks, rest, part.active / whole.active if whole.active else 1.0)


def _cells(name: str) -> list[Cell]:
    """Where a tensor of a ViT is counted; in three cells for q, k and v, which are the thirds of one tensor."""
    found = BLOCK.match(name)
    if found is None:
        return [(REST.get(kind_of(name) or "", "other"), "all")]
    block, layer = int(found[1]), found[2]
    columns = {"qkv": ("q", "k", "v"), "norm1": ("norms",), "norm2": ("norms",), "ls1": ("norms",), "ls2": ("norms",)}
    places = columns.get(layer, (layer,) if layer in LAYERS else ())
    return [(block, column) for column in places] or [("other", "all")]
