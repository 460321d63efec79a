"""The server's side of a phase: choose clients, send them the weights, gather their replies, combine them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fedsieve.config import ClientSettings, HighLoss, PhaseSettings
from fedsieve.errors import InputError, RunError
from fedsieve.federate.client import Broadcast, ClientData, ClientState, Context, Update
from fedsieve.federate.drift import Interference
from fedsieve.federate.exchange import Exchange
from fedsieve.federate.hidden import HiddenRound
from fedsieve.federate.select import by_size, highest, uniform
from fedsieve.federate.traffic import Traffic
from fedsieve.randomness import numpy_generator
from fedsieve.wire import WireError

ALL = -1  # in the place of a client's number
OURS = (OSError, MemoryError, torch.OutOfMemoryError)  # these are no client's fault, and another run may not have them
INJECTED = ("raises", "garbles its message", "sends numbers that are not finite")  # the failures that fail_rate makes


class Aggregator(Protocol):
    def add(self, update: Update) -> None: ...
    def finish(self) -> Tensor: ...


class Memory(Protocol):
    """Where clients keep what they remember between rounds."""

    def read(self, client: int) -> ClientState: ...
    def write(self, client: int, round: int, state: ClientState) -> None: ...
    def commit(self) -> None: ...
    def rewind(self, round: int) -> None: ...


@dataclass
class Replies:
    """What is known of a round's replies once they were combined: nothing that is as long as the weights."""

    samples: dict[int, int] = field(default_factory=dict)  # by client
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # why a client was left out

    def mean(self, name: str, by_samples: bool = False) -> float | None:
        known = {client: metrics[name] for client, metrics in self.metrics.items() if name in metrics}
        weights = {client: self.samples[client] if by_samples else 1 for client in known}
        total = sum(weights.values())
        return sum(weights[client] * value for client, value in known.items()) / total if known else None


@dataclass
class Server:
    settings: PhaseSettings
    clients: ClientSettings
    per_round: int
    seed: int
    update: Callable[[Broadcast, ClientData, ClientState, Context], tuple[Update, ClientState]]
    aggregator: Callable[[Tensor], Aggregator]  # made anew each round, from the weights before it
    context: Context
    exchange: Exchange
    memory: Memory
    data_of: Callable[[int], ClientData]
    loss_of: Callable[[int], float]  # of the model as it stands on a client's own samples
    sizes: Sequence[int]  # samples of each client
    interference: Callable[[], Interference | None]  # made anew each round; None: nobody asks
    warn: Callable[[str], None]

    def round(self, number: int, rounds_before: int) -> dict[str, Any]:
        """One exchange with clients. The new weights are in the model, what it was like in a line of metrics.

        Whatever goes wrong leaves the weights as they were.
        """
        scope, versions = self.context.scope, self.exchange.versions
        before, seen = scope.read(), dict(versions.seen)
        broadcast = Broadcast(self.settings.name, number, self.settings.rounds, before)
        interference = self.interference()
        remember = partial(self.memory.write, round=rounds_before + 1)
        try:
            traffic, replies = self._prepare(broadcast), Replies()
            chosen, selection = self._choose(broadcast, traffic, replies)
            gather = self._gather_hidden if self.clients.zero_sum else self._gather
            after = gather(broadcast, chosen, traffic, replies, remember, interference)
            if not torch.isfinite(after).all():
                raise RunError(f"{self._place(number)}: the server's new weights are not finite")
        except BaseException:
            scope.write(before)
            versions.seen = seen
            self.memory.rewind(rounds_before)
            raise
        scope.write(after)
        versions.record(scope, before, after)
        self.memory.commit()
        drifts = {client: metrics["drift"] for client, metrics in replies.metrics.items() if "drift" in metrics}
        line = {
            "phase": self.settings.name,
            "round": number,
            "clients": chosen,
            "failed": replies.failed,
            **selection,
            "train_loss": replies.mean("train_loss", by_samples=True),
            "val_accuracy": None,
            "val_loss": None,
            "drift_mean": replies.mean("drift"),
            "bytes_up": traffic.up,
            "bytes_down": traffic.down,
            "encodings": dict(traffic.encodings),
            "density": replies.mean("density") or 1.0,
        }
        if interference is not None:
            found = {name: value for name, value in interference.finish().items() if not name.startswith("drift")}
            line |= {"drift_max": max(drifts.values(), default=None), "drift": drifts, **found}
        return line

    def _prepare(self, broadcast: Broadcast) -> Traffic:
        """A mask for the round if it needs a new one; what making masks cost is part of the round that begins so."""
        traffic, masks, mixing = Traffic(), self.context.masks, self.context.mixing
        if masks is not None:
            masks.begin_round(broadcast)
            if broadcast.round == 1 or masks.settings.refresh == "round":
                traffic += masks.traffic
        if mixing is not None and broadcast.round == 1:
            traffic += mixing.traffic
        return traffic

    # Who takes part.

    def _choose(self, broadcast: Broadcast, traffic: Traffic, replies: Replies) -> tuple[list[int], dict[str, Any]]:
        """The round's clients, all of whom now have the weights; and what there is to say about the choice."""
        address = ("clients", self.settings.name, broadcast.round)
        generator, count, select = numpy_generator(self.seed, *address), self.clients.count, self.clients.select
        if isinstance(select, HighLoss) and self.per_round < count:
            candidates = uniform(count, select.high_loss.candidates, generator)
            self._send(candidates, broadcast, traffic)
            losses = {client: self.loss_of(client) for client in candidates}
            traffic.up += sum(self.exchange.loss(client, loss) for client, loss in losses.items())
            scored = sum(self.sizes[client] for client in candidates)  # each in one forward pass
            for client in candidates:
                if not math.isfinite(losses[client]):
                    replies.failed[client] = f"its loss is {losses.pop(client)}"
            return highest(losses, self.per_round), {"candidates": losses, "samples_scored": scored}
        is_by_size = select == "by_size"
        chosen = (
            by_size(self.sizes, self.per_round, generator) if is_by_size else uniform(count, self.per_round, generator)
        )
        self._send(chosen, broadcast, traffic)
        return chosen, {}

    def _send(self, clients: list[int], broadcast: Broadcast, traffic: Traffic) -> None:
        """The weights, and before them a mask that all share to those who do not have it yet."""
        masks, versions = self.context.masks, self.exchange.versions
        if masks is not None and masks.shared is not None and not masks.needs_everybody:
            is_new = masks.settings.refresh == "round"
            lacking = [one for one in clients if is_new or versions.last_seen(one) < self.exchange.started]
            if lacking:
                traffic.down += len(lacking) * self.exchange.mask(masks.shared, masks.seed_of(-1, broadcast.round))
        self.exchange.bring_up_to_date(clients, broadcast.weights, traffic)

    # What they reply.

    def _gather(
        self,
        broadcast: Broadcast,
        chosen: list[int],
        traffic: Traffic,
        replies: Replies,
        remember: Callable[..., None],
        interference: Interference | None,
    ) -> Tensor:
        """The new weights from the replies that can be used, at least `clients.minimum` of them."""
        aggregator = self.aggregator(broadcast.weights)
        for client in chosen:
            data, state = self.data_of(client), self.memory.read(client)
            try:
                update, state = self._reply(data, broadcast, state, traffic)
            except OURS:
                raise
            except Exception as error:  # whatever goes wrong at a client, the others go on
                replies.failed[client] = _reason(error)
                self.exchange.versions.seen.pop(client, None)  # it may hold anything now
                continue
            aggregator.add(update)
            if interference is not None and "delta" in update.vectors:
                positions = update.positions(len(broadcast.weights))
                interference.add(client, update.vectors["delta"], positions, update.mask)
            replies.samples[client], replies.metrics[client] = update.samples, update.metrics
            if state:
                remember(client, state=state)
        self._must_be_enough(broadcast.round, chosen, replies)
        return aggregator.finish()

    def _reply(
        self, data: ClientData, broadcast: Broadcast, before: ClientState, traffic: Traffic
    ) -> tuple[Update, ClientState]:
        """A client's update as it arrives at the server, and what the client remembers."""
        client, failure = data.client, self._injected_failure(data.client, broadcast.round)
        update, state = self._updated(data, broadcast, before, failure)
        encoded, late = self.exchange.encode_update(update, broadcast.round, before)
        if failure == INJECTED[1]:
            encoded.data[len(encoded.data) // 2] ^= 1
        traffic.up += len(encoded.data)
        traffic.encodings.update(encoded.encodings.values())
        return self.exchange.decode_update(encoded.data, client, broadcast.round), {**state, **late}

    def _updated(
        self, data: ClientData, broadcast: Broadcast, before: ClientState, failure: str | None
    ) -> tuple[Update, ClientState]:
        """What a client does by itself: its update, and what it remembers."""
        if failure == INJECTED[0]:
            raise RunError("it raised, as clients.fail_rate asks")
        self.context.scope.prepare_training()
        update, state = self.update(broadcast, data, before, self.context)
        if failure == INJECTED[2]:
            next(iter(update.vectors.values()))[0] = torch.nan
        return update, state

    def _gather_hidden(
        self,
        broadcast: Broadcast,
        chosen: list[int],
        traffic: Traffic,
        replies: Replies,
        remember: Callable[..., None],
        interference: Interference | None,
    ) -> Tensor:
        """The new weights from the sum of all replies, none of which the server can read by itself."""
        self._must_be_enough(broadcast.round, chosen, replies)  # of those who told their losses
        place = self._place(broadcast.round)
        hidden = HiddenRound(chosen, broadcast, self.clients, self.exchange, place)
        traffic += hidden.traffic
        for client in chosen:
            data, state = self.data_of(client), self.memory.read(client)
            failure = self._injected_failure(client, broadcast.round)
            try:
                update, state = self._updated(data, broadcast, state, failure)
                message = hidden.encode(update)
                if failure == INJECTED[1]:
                    message[len(message) // 2] ^= 1
                traffic.up += len(message)
                hidden.add(client, message)
            except OURS:
                raise
            except Exception as error:
                raise RunError(
                    f"{place}: client {client} left ({_reason(error)}), and clients.secure: zero_sum needs every "
                    f"client of a round; nothing was aggregated"
                ) from error
            if state:
                remember(client, state=state)
        after, sums = hidden.finish()
        density = hidden.mask.density if hidden.mask is not None else 1.0
        loss, drift = sums["loss"] / sums["samples"], sums["drift"] / len(chosen)
        replies.samples[ALL], replies.metrics[ALL] = 1, {"train_loss": loss, "drift": drift, "density": density}
        return after

    def _must_be_enough(self, number: int, chosen: list[int], replies: Replies) -> None:
        for client, reason in replies.failed.items():
            self.warn(f"{self._place(number)}: client {client} was left out: {reason}")
        left = sum(client not in replies.failed for client in chosen)
        if left < self.clients.minimum:
            client, reason = next(iter(replies.failed.items()))
            raise RunError(
                f"{self._place(number)}: {left} of {self.per_round} clients replied, fewer than "
                f"clients.minimum {self.clients.minimum}; client {client}: {reason}"
            )

    def _injected_failure(self, client: int, number: int) -> str | None:
        generator = numpy_generator(self.seed, "fail", self.settings.name, number, client)
        fails = generator.random() < self.clients.fail_rate
        return INJECTED[generator.integers(len(INJECTED))] if fails else None

    def _place(self, number: int) -> str:
        return f"phase {self.settings.name}, round {number}"


def _reason(error: Exception) -> str:
    is_ours = isinstance(error, RunError | InputError | WireError)
    return str(error) if is_ours else f"{type(error).__name__}: {error}"
