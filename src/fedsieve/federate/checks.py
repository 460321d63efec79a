"""What the server checks in a client's reply before it uses it: a client may send anything.

`Transport.decode_update` has checked the form. Here the content is compared with what the server knows itself. The
message of the error is the reason that the run gives for leaving out a client.
"""

import torch
from torch import Tensor

from fedsieve.errors import RunError
from fedsieve.federate.batches import number_of_epochs
from fedsieve.federate.norm_limit import all_finite, norm_of
from fedsieve.federate.types import Answer, Broadcast, LocalSetup, Update
from fedsieve.sieve.rules import LooksAt

LARGEST = torch.finfo(torch.float32).max  # that clients compute, and small enough to be summed in float64
HARMLESS = 1e30  # less than half a unit in the last place of LARGEST: added to a weight, it cannot overflow


def check_report(update: Update, samples: int, expected: set[str]) -> None:
    """RunError unless the update reports this many samples and exactly the expected metrics."""
    if update.samples != samples:
        raise RunError(f"it reports {update.samples} samples but has {samples}")
    if update.metrics.keys() != expected:
        wanted = ", ".join(sorted(expected)) or "nothing"
        raise RunError(f"it reports {', '.join(sorted(update.metrics)) or 'nothing'} instead of {wanted}")


def check_update(
    update: Update,
    broadcast: Broadcast,
    samples: int,
    setup: LocalSetup,
    reports: frozenset[str] = frozenset(),
    changes_frozen: bool = False,
) -> float:
    """RunError unless a client with this many samples could have sent this update in this round.

    `reports` are the method's own metrics, and `changes_frozen` says whether the method also changes weights that the
    client's mask freezes. Returns the norm by which the update is compared with others: that of the change of the
    weights or, if larger, the drift that the client reports.
    """
    own = {"train_loss", "drift"} | ({"density"} if setup.masks is not None else set())
    check_report(update, samples, own | reports)
    for name in own:
        check_number(name, update.metrics[name])
    _check_mask(update, broadcast, samples, setup, changes_frozen)
    if update.mask is not None and update.metrics["density"] != update.mask.density:
        raise RunError(f"it reports a density of {update.metrics['density']}, but its mask's is {update.mask.density}")
    delta = update.vectors["delta"]
    if (norm := norm_of(delta)) > HARMLESS:  # the average of finite weights is finite
        where = update.positions(len(broadcast.weights))
        weights = broadcast.weights if where is None else broadcast.weights[where.to(delta.device)]
        if not all_finite(weights + delta):
            raise RunError("its weights are not finite")
    return max(norm, update.metrics["drift"])


def check_reply(answer: Answer, client: int) -> None:
    """RunError if a client without which it cannot go on has failed."""
    if "failed" in answer.about:
        raise RunError(f"client {client}: {answer.about['failed']}; all clients are needed at this point")


def check_number(name: str, number: float) -> None:
    """RunError if no loss, drift or density can be this number."""
    if not 0 <= number <= LARGEST:
        raise RunError(f"its {name} is {number:g}")


def check_scores(scores: Tensor, size: int, client: int, clients: int, what: LooksAt = "sensitivity") -> None:
    """RunError unless a client's sensitivities, which are sums of squares, or gradients can be summed over clients."""
    if what == "gradients":
        if len(scores) != size:
            raise RunError(f"client {client} sent {len(scores)} gradients instead of {size}")
        if size and not scores.abs().max() <= HARMLESS / clients:
            raise RunError(f"client {client} sent gradients that are not finite or too large to sum")
        return
    if len(scores) != size:
        raise RunError(f"client {client} sent {len(scores)} sensitivity scores instead of {size}")
    if size and not (scores.min() >= 0 and scores.max() <= HARMLESS / clients):
        raise RunError(f"client {client} sent sensitivity scores that are negative, not finite or too large to sum")


def _check_mask(update: Update, broadcast: Broadcast, samples: int, setup: LocalSetup, changes_frozen: bool) -> None:
    """RunError if the update does not fit the client's mask, as far as the server can tell."""
    masks, mask = setup.masks, update.mask
    if masks is None and mask is None:
        return
    if masks is None or mask is None:
        raise RunError(f"its update is {'under a' if masks is None else 'without its'} mask")
    known, leaks = masks.known(update.client, broadcast.round), masks.leaks and setup.carry_momentum
    stays = masks.settings.is_shared and masks.settings.refresh == "once"  # no client ever moved what it freezes
    may_have_more = (changes_frozen or leaks) and not stays
    if known is not None and mask is not known and not (known <= mask if may_have_more else known == mask):
        raise RunError("its update changes other weights than its mask leaves active")
    if known is not None and not may_have_more:
        return
    least, most = masks.active_range
    if masks.settings.refresh == "epoch":
        most *= number_of_epochs(samples, setup.local)  # each epoch has its own mask
    if leaks:
        most *= broadcast.round
    if changes_frozen:
        most = mask.size  # weights that other clients changed may be mixed in
    if not least <= mask.active <= most:
        allowed = f"{least}" if least == most else f"{least} to {min(most, mask.size)}"
        raise RunError(f"its update changes {mask.active} weights, and its mask leaves {allowed} active")
