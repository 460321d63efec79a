"""A step of the server optimizer, for the weights that clients trained."""

from torch import Tensor

from fedsieve.federate.server_optimizers.sgd import Sgd
from fedsieve.federate.types import ServerOptimizer, State, touched_positions
from fedsieve.sieve.mask import Mask

PLAIN = Sgd(Sgd.Settings())
MOMENTS = "optimizer."  # before the names of what the optimizer remembers: a method may use the same ones


def moments_at_start(optimizer: ServerOptimizer, weights: Tensor) -> State:
    """What a server optimizer remembers at first, as part of the server's state."""
    return {f"{MOMENTS}{name}": one for name, one in optimizer.start(weights).items()}


def either(one: Mask | None, other: Mask | None) -> Mask | None:
    """The weights that are active in one of two masks; None: all."""
    return None if one is None or other is None else one if one is other else one | other


def server_step(
    optimizer: ServerOptimizer,
    weights: Tensor,
    direction: Tensor,
    server: State,
    trained: Mask | None,
    parameters: int,
) -> tuple[Tensor, State]:
    """The new weights and the server's new state.

    The first `parameters` of the weights take a step if a client trained them, and else keep value and moments, to the
    bit. What follows are buffers, to which the direction is added as it is.
    """
    if getattr(optimizer, "is_plain", False):  # adds the direction anyway, which is 0 for all that nobody trained
        return optimizer.step(weights, direction, server)[0], server
    own = {name.removeprefix(MOMENTS): one for name, one in server.items() if name.startswith(MOMENTS)}
    after = weights.clone()
    after[parameters:] = PLAIN.step(weights[parameters:], direction[parameters:].clone(), {})[0]
    if trained is None:
        after[:parameters], own = optimizer.step(weights[:parameters], direction[:parameters], own)
    else:
        where = touched_positions(trained, parameters).to(weights.device)
        moments = {name: one[where] for name, one in own.items()}
        after[where], moments = optimizer.step(weights[where], direction[where], moments)
        for name, one in moments.items():
            own[name][where] = one
    return after, {**server, **{f"{MOMENTS}{name}": one for name, one in own.items()}}
