"""Local training: SGD or AdamW at one client in one round, from the weights that it is given.

All methods that train by gradients call `sgd`. What a method adds to it is an argument:

- `penalty(name, weights, select)` is the gradient of a term that is added to the loss (FedProx), for the weights of one
  tensor. It is part of the gradient that is clipped.
- `correction(name, select)` is added to the gradient after clipping (SCAFFOLD).

`select` maps a tensor of the same shape as the named one to the entries that are trained.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedsieve.config.settings import option
from fedsieve.errors import RunError
from fedsieve.federate.batches import batches, learning_rate, number_of_steps
from fedsieve.federate.linear import is_linear, train_linear
from fedsieve.federate.local_optimizers import LOCAL_OPTIMIZERS
from fedsieve.federate.types import LocalSetup, State, Task, Update, touched_positions
from fedsieve.model.precision import forward
from fedsieve.observe.profile import section
from fedsieve.randomness import seed_layers, torch_generator
from fedsieve.sieve.mask import Mask, unpacked
from fedsieve.sieve.masked_optimizer import Correction, MaskedOptimizer, Penalty
from fedsieve.sieve.rows import only_active


@dataclass(frozen=True)
class Trained:
    """The result of local training."""

    weights: Tensor  # over the scope
    loss: float  # the mean over all samples that it saw
    mask: Mask | None = None  # of all weights that it may have changed; None: all
    is_first_mask: bool = False  # whether `mask` is the client's only mask of the round
    momentum: State = field(default_factory=dict)  # for the next round, if momentum is carried
    rates: tuple[tuple[Mask | None, float], ...] = ()  # the masks in order, and the sum of learning rates under each


def sgd(
    task: Task,
    start: Tensor,
    mine: State | None = None,
    *,
    penalty: Penalty | None = None,
    correction: Correction | None = None,
) -> Trained:
    """Train from `start` by the phase's optimizer, with momentum from `mine` if the client has carried any.

    If the phase trains one linear layer on fixed features, `train_linear` gives the same bits faster.
    """
    setup, optimizer_class = task.setup, LOCAL_OPTIMIZERS[option(task.setup.local.optimizer)]
    momentum = {name: one for name, one in (mine or {}).items() if name in (*optimizer_class.remembers, "mask")}
    if is_linear(setup) and not momentum:
        weights, mean_loss, rate = train_linear(task, start, penalty, correction)
        return Trained(weights, mean_loss, rates=((None, rate),))
    scope, local, masks, broadcast, data = setup.scope, setup.local, setup.masks, task.broadcast, task.data
    address = (broadcast.phase, broadcast.round, data.client)
    scope.prepare_training()
    mask = touched = masks.mask(data, broadcast) if masks is not None else None
    scope.write(start)
    seed_layers(setup.seed, "dropout", *address)
    optimizer: MaskedOptimizer = optimizer_class(
        scope.named.items(),
        mask,
        **local.optimizer_arguments,
        clip_norm=local.clip_norm,
        rescale=masks is not None and masks.settings.rescale,
        dense=scope.dense,
        penalty=penalty,
        correction=correction,
    )
    policy = masks.settings.momentum_policy if masks is not None else "carry"
    if momentum:
        optimizer.import_momentum(momentum, policy)
        if touched is not None and policy == "leak":
            touched = touched | Mask.pack(touched.shapes, unpacked(momentum["mask"].cpu(), touched.size))
    total, seen, step = torch.zeros((), device=start.device), 0, 0
    steps = number_of_steps(len(data), local)
    rates: list[tuple[Mask | None, float]] = [(mask, 0.0)]
    for epoch, epoch_batches in enumerate(batches(len(data), local, setup.seed, *address)):
        if epoch and masks is not None and touched is not None and masks.settings.refresh == "epoch":
            mask = masks.mask(data, broadcast, epoch)
            optimizer.set_mask(mask, policy)
            touched = touched | mask
            rates.append((mask, 0.0))
        with only_active(setup.network, scope.sieved, mask) if mask is not None else nullcontext():
            for positions in epoch_batches:
                lr = learning_rate(local, broadcast.round, broadcast.rounds, step / steps)
                optimizer.param_groups[0]["lr"] = lr
                rates[-1] = (mask, rates[-1][1] + lr)
                with section("transform"):
                    inputs = data.inputs(positions, torch_generator(setup.seed, "augment", *address, step))
                with section("forward"):
                    loss = nn.functional.cross_entropy(_scores(setup, inputs), data.labels[positions])
                optimizer.zero_grad()
                with section("backward"):
                    loss.backward()
                with section("optimizer"):
                    optimizer.descend()
                total += loss.detach() * len(positions)
                seen += len(positions)
                step += 1
    momentum = optimizer.export_momentum() if setup.carry_momentum else {}
    return Trained(scope.read(), float(total) / seen, touched, touched is mask, momentum, tuple(rates))


def update_of(task: Task, trained: Trained, also: Mask | None = None) -> Update:
    """The change from the weights that the server sent; it overwrites `trained.weights`, to save memory.

    `also` are more weights, besides those of the mask, that differ from the server's.
    """
    scope, masks, data, broadcast = task.setup.scope, task.setup.masks, task.data, task.broadcast
    is_same = trained.weights.data_ptr() == broadcast.weights.data_ptr()  # then nothing may be overwritten
    delta = (trained.weights.sub if is_same else trained.weights.sub_)(broadcast.weights)
    mask = trained.mask
    metrics = {"train_loss": trained.loss, "drift": float(torch.linalg.vector_norm(delta[: scope.weights]))}
    must_be_finite(metrics)
    if mask is None:
        return Update(data.client, len(data), {"delta": delta}, metrics)
    widened = mask | also if also is not None and not also <= mask else mask
    is_drawn = masks is not None and trained.is_first_mask and widened is mask
    seed = masks.seed_of(data.client, broadcast.round) if masks is not None and is_drawn else None
    metrics["density"] = widened.density
    delta = delta[touched_positions(widened, len(delta))]
    return Update(data.client, len(data), {"delta": delta}, metrics, widened, seed)


def must_be_finite(metrics: dict[str, float]) -> None:
    for name, what in (("train_loss", "the loss"), ("drift", "the change of the weights")):
        if not math.isfinite(metrics[name]):
            raise RunError(f"{what} became {metrics[name]}; lower phases.*.local.lr or set clip_norm")


def _scores(setup: LocalSetup, inputs: Tensor) -> Tensor:
    try:
        return forward(setup.network, inputs, setup.precision)
    except ValueError as error:  # BatchNorm cannot learn from a batch of one
        raise RunError(f"{error}; another phases.*.local.batch_size may help") from None
