"""What one client does in one round: a pure function of what it is sent, its own data and its own state."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedsieve.config import LocalSettings
from fedsieve.errors import RunError
from fedsieve.federate.schedule import SCHEDULES
from fedsieve.model.flat import Scope
from fedsieve.precision import Precision, forward
from fedsieve.profile import section
from fedsieve.randomness import seed_layers, torch_generator
from fedsieve.sieve.mask import Mask, unpacked
from fedsieve.sieve.rows import only_active
from fedsieve.sieve.sgdm import SparseSGDM

if TYPE_CHECKING:
    from fedsieve.federate.masks import Masks
    from fedsieve.federate.mixing import Mixing

ClientState = dict[str, Tensor]  # what a client remembers between its rounds; empty for most methods


@dataclass(frozen=True)
class Broadcast:
    """What the server sends: where the phase stands, and the weights in scope."""

    phase: str
    round: int
    rounds: int
    weights: Tensor


@dataclass(frozen=True)
class ClientData:
    """One client's own samples: `inputs(positions, generator)` gives a batch of what the network takes."""

    client: int
    inputs: Callable[[Tensor, torch.Generator], Tensor]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Context:
    """The place where clients are trained: a network to work in, and the settings of the phase."""

    scope: Scope
    network: nn.Module  # inputs to class scores: the whole model, or what follows its frozen part
    local: LocalSettings
    carry_momentum: bool
    seed: int
    masks: "Masks | None" = None  # None: all weights in scope may change
    mixing: "Mixing | None" = None  # None: clients start from the weights that they receive
    precision: Precision = "float32"


@dataclass(frozen=True)
class Update:
    """What a client sends back, and what the server needs to weigh it.

    `vectors` are over the scope. With a mask, "delta" has only the weights that the mask leaves active, then whatever
    the mask does not cover (dense layers and buffers); the others did not change.
    """

    client: int
    samples: int
    vectors: dict[str, Tensor]
    metrics: dict[str, float] = field(default_factory=dict)
    mask: Mask | None = None
    mask_seed: int | None = None  # that the mask can be drawn from

    def positions(self, size: int) -> Tensor | None:
        """Where in the scope's vector the values of "delta" belong; None: everywhere."""
        return None if self.mask is None else touched_positions(self.mask, size)


def train_client(
    broadcast: Broadcast, data: ClientData, state: ClientState, context: Context
) -> tuple[Update, ClientState]:
    """Local SGD from the broadcast weights; the update is the difference from them."""
    scope, local, masks, mixing = context.scope, context.local, context.masks, context.mixing
    address = (broadcast.phase, broadcast.round, data.client)
    scope.prepare_training()
    mask = touched = masks.mask(data, broadcast) if masks is not None else None
    start = broadcast.weights if mixing is None else mixing.receive(data.client, broadcast.weights, state)
    scope.write(start)
    seed_layers(context.seed, "dropout", *address)
    optimizer = SparseSGDM(
        scope.named.items(),
        mask,
        lr=local.lr,
        momentum=local.momentum,
        weight_decay=local.weight_decay,
        nesterov=local.nesterov,
        clip_norm=local.clip_norm,
        rescale=masks is not None and masks.settings.rescale,
        dense=scope.dense,
    )
    handover = masks.settings.handover if masks is not None else "carry"
    momentum = {name: one for name, one in state.items() if name in ("momentum", "mask")}
    if momentum:
        optimizer.import_momentum(momentum, handover)
        if touched is not None and handover == "leak":
            touched = touched | Mask.pack(touched.shapes, unpacked(state["mask"].cpu(), touched.size))
    total, seen, step = torch.zeros((), device=broadcast.weights.device), 0, 0
    steps = number_of_steps(len(data), local)
    for epoch, epoch_batches in enumerate(batches(len(data), local, context.seed, *address)):
        if epoch and masks is not None and touched is not None and masks.settings.refresh == "epoch":
            mask = masks.mask(data, broadcast, epoch)
            optimizer.set_mask(mask, handover)
            touched = touched | mask
        with only_active(context.network, scope.sieved, mask) if mask is not None else nullcontext():
            for positions in epoch_batches:
                done = (broadcast.round - 1 + step / steps) / broadcast.rounds
                optimizer.param_groups[0]["lr"] = local.lr * SCHEDULES[local.schedule](done)
                with section("transform"):
                    inputs = data.inputs(positions, torch_generator(context.seed, "augment", *address, step))
                with section("forward"):
                    loss = nn.functional.cross_entropy(_scores(context, inputs), data.labels[positions])
                optimizer.zero_grad()
                with section("backward"):
                    loss.backward()
                with section("optimizer"):
                    optimizer.descend()
                total += loss.detach() * len(positions)
                seen += len(positions)
                step += 1
    trained = scope.read()
    delta = trained - broadcast.weights if mixing is not None else trained.sub_(broadcast.weights)
    drift = float(torch.linalg.vector_norm(delta[: scope.weights]))
    metrics = {"train_loss": float(total) / seen, "drift": drift}
    must_be_finite(metrics)
    new_state = optimizer.export_momentum() if context.carry_momentum else {}
    if mixing is not None:
        new_state |= mixing.remember(trained)
        moved = mixing.moved(broadcast.weights, start)
        touched = touched | moved if touched is not None and not moved <= touched else touched
    if touched is None:
        return Update(data.client, len(data), {"delta": delta}, metrics), new_state
    seed = masks.seed_of(data.client, broadcast.round) if masks is not None and touched is mask else None
    metrics["density"] = touched.density
    delta = delta[touched_positions(touched, len(delta))]
    return Update(data.client, len(data), {"delta": delta}, metrics, touched, seed), new_state


def must_be_finite(metrics: dict[str, float]) -> None:
    for name, what in (("train_loss", "the loss"), ("drift", "the change of the weights")):
        if not math.isfinite(metrics[name]):
            raise RunError(f"{what} became {metrics[name]}; lower phases.*.local.lr or set clip_norm")


def touched_positions(mask: Mask, size: int) -> Tensor:
    """Where in the scope's vector the values of a masked update belong: active weights, and what no mask covers."""
    return torch.cat((mask.positions, torch.arange(mask.size, size))) if size > mask.size else mask.positions


def _scores(context: Context, inputs: Tensor) -> Tensor:
    try:
        return forward(context.network, inputs, context.precision)
    except ValueError as error:  # BatchNorm cannot learn from a batch of one
        raise RunError(f"{error}; another phases.*.local.batch_size may help") from None


def number_of_steps(samples: int, local: LocalSettings) -> int:
    per_epoch = -(-samples // local.batch_size)
    return local.steps if local.steps is not None else (local.epochs or 1) * per_epoch


def number_of_epochs(samples: int, local: LocalSettings) -> int:
    """How many orders of its samples a client goes through, the last one maybe in part."""
    return -(-number_of_steps(samples, local) // -(-samples // local.batch_size))


def batches(samples: int, local: LocalSettings, seed: int, *address: int | str) -> Iterator[list[Tensor]]:
    """The positions of each batch, epoch by epoch, each in an order of its own; the last batch may be smaller."""
    left, epoch = number_of_steps(samples, local), 0
    while left:
        order = torch.randperm(samples, generator=torch_generator(seed, "batches", *address, epoch))
        yield (parts := list(order[: left * local.batch_size].split(local.batch_size)))
        left -= len(parts)
        epoch += 1
