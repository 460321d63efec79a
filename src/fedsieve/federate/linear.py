"""Local training of a linear head on features that do not change, without autograd.

For a head of a few thousand weights and a dozen samples, the overhead of autograd and an optimizer takes longer than
the training itself. So the operations that they would call are called here directly, on the same numbers:
`train_linear` gives the same bits as the general loop in `local.py`, which is its reference in the tests.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from fedsieve.config.local_settings import LocalSettings
from fedsieve.config.settings import option
from fedsieve.federate.batches import batches, learning_rate, number_of_steps
from fedsieve.federate.local_optimizers import LOCAL_OPTIMIZERS
from fedsieve.federate.types import LocalSetup, State, Task
from fedsieve.observe.profile import section
from fedsieve.sieve.masked_optimizer import Correction, Penalty

MEAN, NO_CLASS_IGNORED = 1, -100  # arguments of torch's operations for the usual cross-entropy


def is_linear(setup: LocalSetup) -> bool:
    """Whether a phase trains only one linear layer, in float32, without masks or carried momentum."""
    plain = setup.masks is None and setup.precision == "float32" and not setup.carry_momentum
    layer = setup.network
    if not (plain and type(layer) is nn.Linear and layer.bias is not None):
        return False
    return [id(one) for one in setup.scope.parameters] == [id(layer.weight), id(layer.bias)]


def train_linear(
    task: Task, start: Tensor, penalty: Penalty | None = None, correction: Correction | None = None
) -> tuple[Tensor, float, float]:
    """What `sgd` does, if `is_linear`: the trained weights, the mean loss, and the sum of learning rates.

    No tensor here requires a gradient.
    """
    setup, data, broadcast, nobody = task.setup, task.data, task.broadcast, torch.Generator()
    local, names = setup.local, list(setup.scope.named)
    bias_at = len(start) - setup.scope.entries[-1].shape[0]
    trained = start.clone()
    weight, bias = trained[:bias_at].view(setup.scope.entries[0].shape), trained[bias_at:]
    advance, group = LOCAL_OPTIMIZERS[option(local.optimizer)].advance, local.optimizer_arguments
    states: tuple[State, State] = ({}, {})
    total, seen, step, rates = torch.zeros((), device=start.device), 0, 0, 0.0
    steps = number_of_steps(len(data), local)
    for epoch in batches(len(data), local, setup.seed, broadcast.phase, broadcast.round, data.client):
        for positions in epoch:
            with section("transform"):
                inputs, labels = data.inputs(positions, nobody), data.labels[positions]
            with section("forward"):
                log_shares = torch.log_softmax(nn.functional.linear(inputs, weight, bias), 1)
                loss, count = torch.ops.aten.nll_loss_forward(log_shares, labels, None, MEAN, NO_CLASS_IGNORED)
            with section("backward"):
                one = torch.ones_like(loss)
                of_shares = torch.ops.aten.nll_loss_backward(
                    one, log_shares, labels, None, MEAN, NO_CLASS_IGNORED, count
                )
                of_scores = torch.ops.aten._log_softmax_backward_data(of_shares, log_shares, 1, log_shares.dtype)
                gradients = [of_scores.t().mm(inputs), of_scores.sum(0)]
            with section("optimizer"):
                if penalty is not None:
                    pulls = (penalty(name, own, _all) for name, own in zip(names, (weight, bias), strict=True))
                    gradients = [one.add(pull) for one, pull in zip(gradients, pulls, strict=True)]
                gradients = _clipped(gradients, local)
                if correction is not None:
                    gradients = [one.add(correction(name, _all)) for name, one in zip(names, gradients, strict=True)]
                group["lr"] = learning_rate(local, broadcast.round, broadcast.rounds, step / steps)
                for own, gradient, state in zip((weight, bias), gradients, states, strict=True):
                    advance(own, gradient, state, group, _all)
            total += loss * len(positions)
            seen += len(positions)
            step += 1
            rates += group["lr"]
    return trained, float(total) / seen, rates


def _all(tensor: Tensor) -> Tensor:
    """Every weight is trained."""
    return tensor


def _clipped(gradients: list[Tensor], local: LocalSettings) -> list[Tensor]:
    if local.clip_norm is None:
        return gradients
    shrink = (local.clip_norm / (get_total_norm(gradients) + 1e-6)).clamp(max=1.0)
    return [one.mul(shrink) for one in gradients]
