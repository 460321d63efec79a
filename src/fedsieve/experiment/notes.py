"""What the user is told before a run begins: what its phases need on disk and in memory, and what settings imply."""

import math
import shutil
from pathlib import Path

from fedsieve.config.mask_settings import MaskSettings
from fedsieve.config.schema import Experiment
from fedsieve.config.settings import option
from fedsieve.errors import InputError
from fedsieve.federate.aggregators import AGGREGATORS
from fedsieve.federate.local_optimizers import LOCAL_OPTIMIZERS
from fedsieve.federate.traffic import size
from fedsieve.files.memory import must_fit
from fedsieve.phase import Phase
from fedsieve.sieve.mask import bytes_of_file, shapes_of


def notes_on(experiment: Experiment, phase: Phase) -> list[str]:
    """Notes for the user on a phase before it begins."""
    clients, notes, name, mask = experiment.clients, [], phase.settings.name, phase.settings.mask
    if (each := remembered(experiment, phase)) and clients.count > 1:
        most = size(each * versions_kept(phase, clients.count))
        notes.append(f"phase {name}: each client remembers {size(each)} on disk, all of them up to {most}")
    if held := held_in_memory(experiment, phase):
        notes.append(f"phase {name}: {option(phase.settings.aggregate)} holds all updates of a round: {size(held)}")
    if clients.zero_sum and experiment.analyze.level != "none":
        notes.append(
            f"phase {name}: with clients.secure: zero_sum nobody sees single updates, so there is no drift of single "
            "clients, cosine, opposition or agreement in the metrics"
        )
    if clients.zero_sum and option(clients.select) == "high_loss":
        notes.append(f"phase {name}: zero_sum hides updates, not the losses by which clients are selected")
    if (each := kept_masks(phase)) and clients.count > 1:
        notes.append(f"phase {name}: each client's mask is kept and takes {_taken(each, clients.count)}")
    if mask is not None and clients.count > 1 and sends_the_same(mask):
        same = f"{mask.rule} gives every client the same mask"
        notes.append(f"phase {name}: {same}; mask.scope: server gives the same model and sends fewer bytes")
    if experiment.compile and mask is not None and mask.unit != "weight":
        notes.append(f"phase {name}: compile changes nothing for training under masks of whole rows or tensors")
    if clients.zero_sum and mask is not None and mask.scope == "federated" and mask.looks_at_data:
        notes.append(f"phase {name}: zero_sum hides updates, not the scores with which clients calibrate the mask")
    return notes


def sends_the_same(mask: MaskSettings) -> bool:
    """Whether clients find the same mask by themselves, and send it back: it depends on the server's weights only."""
    from_weights = mask.rule in ("smallest_magnitude", "largest_magnitude") and mask.refresh != "epoch"
    return mask.scope == "client" and from_weights


def check_room(experiment: Experiment, phases: list[Phase], folder: Path) -> None:
    """InputError if what a phase keeps fits neither the disk nor, for some aggregators, the memory."""
    masks, count = 0, experiment.clients.count
    for phase in phases:
        name = phase.settings.name
        must_fit(
            held_in_memory(experiment, phase),
            f"phase {name}: {option(phase.settings.aggregate)} holds all {phase.per_round} updates of a round",
            "use aggregate: mean, a smaller clients.fraction, or a mask with more sparsity",
        )
        masks += kept_masks(phase) * taking_part(phase, count)  # until the end of the run
        if phase.settings.mask is not None and phase.settings.mask.needs_start:
            masks += 4 * phase.scope.size
        needed = remembered(experiment, phase) * versions_kept(phase, count) + masks
        must_fit_on_disk(needed, folder, f"phase {name}: what clients remember takes up to")


def must_fit_on_disk(
    needed: int, folder: Path, what: str, remedy: str = "make room, use another --out, or fewer clients"
) -> None:
    """InputError if a disk has less room than is needed, counting what this run has written already."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    written = sum(file.stat().st_size for kept in ("clients/*/*", "masks/*/*") for file in folder.glob(kept))
    if needed > (free := shutil.disk_usage(there).free + written):
        more = f"{size(needed)}, and there are {size(free)} free at {there}"
        raise InputError(f"{what} {more}; {remedy}")


def versions_kept(phase: Phase, clients: int) -> int:
    """The most states on disk at once: one of each client that has taken part, and more of those of the last rounds.

    Two checkpoints and the weights since the newer one each need their own; a round under way adds another.
    """
    return taking_part(phase, clients) + 3 * phase.per_round


def taking_part(phase: Phase, clients: int) -> int:
    """How many clients are expected to take part in a phase."""
    return math.ceil(clients * (1 - (1 - phase.per_round / clients) ** phase.settings.rounds))


def remembered(experiment: Experiment, phase: Phase) -> int:
    """Bytes that each client keeps from one of its rounds to the next."""
    each, replies = phase.method.remembers(phase.scope), phase.method.replies
    if "delta" not in replies:
        return each
    if experiment.wire.values == "int8" and not experiment.clients.zero_sum:
        each += 4 * sum(replies.values())
    if phase.settings.optimizer_state == "carry":
        each += momentum_size(phase)
    return each


def momentum_size(phase: Phase) -> int:
    """Bytes of momentum that a client carries from round to round, if no weight in scope is frozen."""
    optimizer, mask = LOCAL_OPTIMIZERS[option(phase.settings.local.optimizer)], phase.settings.mask
    differs = mask is not None and mask.refresh != "once" and mask.momentum_policy != "reset"  # from weight to weight
    return 4 * phase.scope.weights * (len(optimizer.remembers) - (0 if differs else len(optimizer.shared)))


def kept_masks(phase: Phase) -> int:
    """Bytes of each client's own mask, if it is kept."""
    mask = phase.settings.mask
    is_kept = mask is not None and mask.file is None and not mask.is_shared and mask.refresh == "once"
    return bytes_of_file(shapes_of(phase.scope.sieved.items())) if is_kept else 0


def held_in_memory(experiment: Experiment, phase: Phase) -> int:
    """Bytes of all updates of a round, if the aggregator keeps them until all have arrived."""
    settings, scope = phase.settings, phase.scope
    if not getattr(AGGREGATORS[option(settings.aggregate)], "needs_all", False):
        return 0
    mask = settings.mask
    if mask is None:
        return phase.per_round * 4 * scope.size
    is_wider = mask.refresh == "epoch" or mask.momentum_policy == "leak" or phase.method.changes_frozen
    each = scope.size - (0 if is_wider else round(scope.sieved_weights * (mask.sparsity or 0.0)))
    return phase.per_round * 12 * each  # values, and their positions


def _taken(each: int, clients: int) -> str:
    return f"{size(each)} on disk, {size(each * clients)} once all {clients:,} have taken part"
