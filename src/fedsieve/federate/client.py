"""What one client does in one round: a pure function of what it is sent, its own data and its own state."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedsieve.config import LocalSettings
from fedsieve.errors import RunError
from fedsieve.federate.schedule import SCHEDULES
from fedsieve.model.flat import Scope
from fedsieve.randomness import seed_at, torch_generator

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
    network: Callable[[Tensor], Tensor]  # inputs to class scores: the whole model, or its head on features
    local: LocalSettings
    carry_momentum: bool
    seed: int


@dataclass(frozen=True)
class Update:
    """What a client sends back: named vectors over the scope, and what the server needs to weigh them."""

    client: int
    samples: int
    vectors: dict[str, Tensor]
    metrics: dict[str, float] = field(default_factory=dict)


def train_client(
    broadcast: Broadcast, data: ClientData, state: ClientState, context: Context
) -> tuple[Update, ClientState]:
    """Local SGD from the broadcast weights; the update is the difference it made."""
    scope, local = context.scope, context.local
    address = (broadcast.phase, broadcast.round, data.client)
    scope.write(broadcast.weights)
    torch.manual_seed(seed_at(context.seed, "dropout", *address))  # layers draw from torch's global generator
    optimizer = torch.optim.SGD(
        scope.parameters,
        lr=local.lr,
        momentum=local.momentum,
        weight_decay=local.weight_decay,
        nesterov=local.nesterov,
    )
    if "momentum" in state:
        _set_momentum(optimizer, scope, state["momentum"])
    total, seen = torch.zeros((), device=broadcast.weights.device), 0
    steps = number_of_steps(len(data), local)
    for step, positions in enumerate(batches(len(data), local, context.seed, *address)):
        done = (broadcast.round - 1 + step / steps) / broadcast.rounds
        optimizer.param_groups[0]["lr"] = local.lr * SCHEDULES[local.schedule](done)
        inputs = data.inputs(positions, torch_generator(context.seed, "augment", *address, step))
        loss = nn.functional.cross_entropy(_scores(context, inputs, address), data.labels[positions])
        optimizer.zero_grad()
        loss.backward()
        if local.clip_norm is not None:
            nn.utils.clip_grad_norm_(scope.parameters, local.clip_norm)
        optimizer.step()
        total += loss.detach() * len(positions)
        seen += len(positions)
    delta = scope.read().sub_(broadcast.weights)
    drift = float(torch.linalg.vector_norm(delta))
    train_loss = float(total) / seen
    if not (math.isfinite(train_loss) and math.isfinite(drift)):
        what = (
            f"the change of the weights became {drift}"
            if math.isfinite(train_loss)
            else f"the loss became {train_loss}"
        )
        raise RunError(f"{_place(address)}: {what}; lower phases.*.local.lr or set clip_norm")
    state = {"momentum": _momentum(optimizer, scope)} if context.carry_momentum and local.momentum else {}
    return Update(data.client, len(data), {"delta": delta}, {"train_loss": train_loss, "drift": drift}), state


def _scores(context: Context, inputs: Tensor, address: tuple[str, int, int]) -> Tensor:
    try:
        return context.network(inputs)
    except ValueError as error:  # BatchNorm cannot learn from a batch of one
        raise RunError(f"{_place(address)}: {error}; another phases.*.local.batch_size may help") from None


def _place(address: tuple[str, int, int]) -> str:
    return "phase {}, round {}, client {}".format(*address)


def number_of_steps(samples: int, local: LocalSettings) -> int:
    per_epoch = -(-samples // local.batch_size)
    return local.steps if local.steps is not None else (local.epochs or 1) * per_epoch


def batches(samples: int, local: LocalSettings, seed: int, *address: int | str) -> Iterator[Tensor]:
    """Positions of each batch: epochs in an order of their own, cut into batches, the last may be smaller."""
    left, epoch = number_of_steps(samples, local), 0
    while left:
        order = torch.randperm(samples, generator=torch_generator(seed, "batches", *address, epoch))
        for positions in order.split(local.batch_size)[:left]:
            yield positions
            left -= 1
        epoch += 1


def _momentum(optimizer: torch.optim.SGD, scope: Scope) -> Tensor:
    """The momentum of all parameters in scope, as one vector (zero where there was no gradient yet)."""
    buffers = [optimizer.state[one].get("momentum_buffer") for one in scope.parameters]
    return torch.cat(
        [
            (torch.zeros_like(one) if buffer is None else buffer).flatten()
            for one, buffer in zip(scope.parameters, buffers, strict=True)
        ]
    )


def _set_momentum(optimizer: torch.optim.SGD, scope: Scope, momentum: Tensor) -> None:
    parts = momentum.split([parameter.numel() for parameter in scope.parameters])
    for parameter, part in zip(scope.parameters, parts, strict=True):
        optimizer.state[parameter]["momentum_buffer"] = part.view_as(parameter).to(parameter.device, copy=True)
