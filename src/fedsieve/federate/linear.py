"""Local training of a linear head on features that do not change, without autograd.

A head of a few thousand weights on a dozen samples is trained in less time than autograd and an optimizer take to
look around. So the same operations that they would call are called here one after another, on the same numbers:
`train_linear` gives the bits of `train_client`, which is its slow twin in the tests.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from fedsieve.config import LocalSettings
from fedsieve.federate.client import (
    Broadcast,
    ClientData,
    ClientState,
    Context,
    Update,
    batches,
    must_be_finite,
    number_of_steps,
)
from fedsieve.federate.schedule import SCHEDULES
from fedsieve.profile import section

MEAN, NO_CLASS_IGNORED = 1, -100  # what torch's operations call the usual cross-entropy


def is_linear(context: Context) -> bool:
    """Whether a phase trains nothing but one linear layer, in no special way."""
    plain = context.masks is None and context.mixing is None and context.precision == "float32"
    layer = context.network
    if not (plain and not context.carry_momentum and type(layer) is nn.Linear and layer.bias is not None):
        return False
    return [id(one) for one in context.scope.parameters] == [id(layer.weight), id(layer.bias)]


def train_linear(
    broadcast: Broadcast, data: ClientData, state: ClientState, context: Context
) -> tuple[Update, ClientState]:
    """What `train_client` does, where `is_linear`; no tensor here asks for a gradient."""
    local, received, nobody = context.local, broadcast.weights, torch.Generator()
    bias_at = len(received) - context.scope.entries[-1].shape[0]
    trained = received.clone()
    weight, bias = trained[:bias_at].view(context.scope.entries[0].shape), trained[bias_at:]
    momenta: list[Tensor] = []
    total, seen, step = torch.zeros((), device=received.device), 0, 0
    steps = number_of_steps(len(data), local)
    for epoch in batches(len(data), local, context.seed, broadcast.phase, broadcast.round, data.client):
        for positions in epoch:
            done = (broadcast.round - 1 + step / steps) / broadcast.rounds
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
                _descend((weight, bias), gradients, momenta, local, local.lr * SCHEDULES[local.schedule](done))
            total += loss * len(positions)
            seen += len(positions)
            step += 1
    delta = trained - received
    metrics = {"train_loss": float(total) / seen, "drift": float(torch.linalg.vector_norm(delta))}
    must_be_finite(metrics)
    return Update(data.client, len(data), {"delta": delta}, metrics), {}


def _descend(
    weights: tuple[Tensor, Tensor], gradients: list[Tensor], momenta: list[Tensor], local: LocalSettings, rate: float
) -> None:
    """A step of torch.optim.SGD, operation by operation; `momenta` are empty before the first."""
    if local.clip_norm is not None:
        shrink = (local.clip_norm / (get_total_norm(gradients) + 1e-6)).clamp(max=1.0)
        gradients = [one.mul(shrink) for one in gradients]
    if local.weight_decay != 0:
        gradients = [one.add(own, alpha=local.weight_decay) for one, own in zip(gradients, weights, strict=True)]
    if local.momentum != 0:
        if momenta:
            for momentum, gradient in zip(momenta, gradients, strict=True):
                momentum.mul_(local.momentum).add_(gradient)
        else:
            momenta += [one.clone() for one in gradients]
        if local.nesterov:
            pairs = zip(gradients, momenta, strict=True)
            gradients = [one.add(momentum, alpha=local.momentum) for one, momentum in pairs]
        else:
            gradients = momenta
    for own, step in zip(weights, gradients, strict=True):
        own.add_(step, alpha=-rate)
