"""What the server checks of a client's reply before it uses any of it: a client may send whatever it likes.

`Exchange.decode_update` has checked the form. Here the content is compared with what the server knows by itself. The
reason in the error is what the run says of a client that it leaves out.
"""

from fedsieve.errors import RunError
from fedsieve.federate.client import Broadcast, Context, Update, number_of_epochs


def check_update(update: Update, broadcast: Broadcast, samples: int, context: Context) -> None:
    """RunError unless a client with so many samples could have sent this update in this round."""
    if update.samples != samples:
        raise RunError(f"it tells of {update.samples} samples, and it has {samples}")
    if "delta" in update.vectors:
        _check_mask(update, broadcast, samples, context)


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
