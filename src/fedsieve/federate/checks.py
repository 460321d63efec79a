"""What the server checks of a client's reply before it uses any of it: a client may send whatever it likes.

`Exchange.decode_update` has checked the form. Here the content is compared with what the server knows by itself. The
reason in the error is what the run says of a client that it leaves out.
"""

import torch
from torch import Tensor

from fedsieve.errors import RunError
from fedsieve.federate.aggregate import all_finite
from fedsieve.federate.client import Broadcast, Context, Update, number_of_epochs
from fedsieve.federate.norms import norm_of
from fedsieve.federate.ridge import check_sums

LARGEST = torch.finfo(torch.float32).max  # of what clients compute, and small enough to be summed in float64
HARMLESS = 1e30  # less than half a unit in the last place of LARGEST: added to a weight, it cannot overflow


def check_update(update: Update, broadcast: Broadcast, samples: int, context: Context) -> float:
    """RunError unless a client with so many samples could have sent this update in this round.

    Returns the norm by which it is compared with other updates: that of the change of the weights, or the drift that
    the client reports if that is larger. Sums grow with the number of samples, so theirs is the norm per sample.
    """
    if update.samples != samples:
        raise RunError(f"it reports {update.samples} samples but has {samples}")
    if "delta" not in update.vectors:
        _check_names(update, set())
        check_sums(update)
        return norm_of(*update.vectors.values()) / samples
    _check_names(update, {"train_loss", "drift"} | ({"density"} if context.masks is not None else set()))
    for name, number in update.metrics.items():
        check_number(name, number)
    _check_mask(update, broadcast, samples, context)
    if update.mask is not None and update.metrics["density"] != update.mask.density:
        raise RunError(f"it reports a density of {update.metrics['density']}, but its mask's is {update.mask.density}")
    delta = update.vectors["delta"]
    if (norm := norm_of(delta)) > HARMLESS:  # the average of weights that are finite is finite
        where = update.positions(len(broadcast.weights))
        weights = broadcast.weights if where is None else broadcast.weights[where.to(delta.device)]
        if not all_finite(weights + delta):
            raise RunError("its weights are not finite")
    return max(norm, update.metrics["drift"])


def check_number(name: str, number: float) -> None:
    """RunError for what no loss, drift or density can be."""
    if not 0 <= number <= LARGEST:
        raise RunError(f"its {name} is {number:g}")


def check_scores(scores: Tensor, size: int, client: int, clients: int) -> None:
    """RunError unless a client's sensitivity scores, which are means of squares, can be summed over all clients."""
    if len(scores) != size:
        raise RunError(f"client {client} sent {len(scores)} sensitivity scores instead of {size}")
    if size and not (scores.min() >= 0 and scores.max() <= HARMLESS / clients):
        raise RunError(f"client {client} sent sensitivity scores that are negative, not finite or too large to sum")


def _check_names(update: Update, expected: set[str]) -> None:
    if update.metrics.keys() != expected:
        wanted = ", ".join(sorted(expected)) or "nothing"
        raise RunError(f"it reports {', '.join(sorted(update.metrics)) or 'nothing'} instead of {wanted}")


def _check_mask(update: Update, broadcast: Broadcast, samples: int, context: Context) -> None:
    """RunError if the update changes other weights than the client's mask lets it, as far as the server can tell."""
    masks, mask = context.masks, update.mask
    if masks is None and mask is None:
        return
    if masks is None or mask is None:
        raise RunError(f"its update is {'under a' if masks is None else 'without its'} mask")
    known, leaks = masks.known(update.client, broadcast.round), masks.leaks and context.carry_momentum
    stays = masks.settings.is_shared and masks.settings.refresh == "once"  # nobody ever moved what it freezes
    may_have_more = (context.mixing is not None or leaks) and not stays
    if known is not None and mask is not known and not (known <= mask if may_have_more else known == mask):
        raise RunError("its update changes other weights than its mask leaves active")
    if known is not None and not may_have_more:
        return
    least, most = masks.active_range
    if masks.settings.refresh == "epoch":
        most *= number_of_epochs(samples, context.local)  # each has a mask of its own
    if leaks:
        most *= broadcast.round
    if context.mixing is not None:
        most = mask.size  # whatever other clients changed may be mixed
    if not least <= mask.active <= most:
        allowed = f"{least}" if least == most else f"{least} to {min(most, mask.size)}"
        raise RunError(f"its update changes {mask.active} weights, and its mask leaves {allowed} active")
