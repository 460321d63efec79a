"""The server's side of a phase: choose clients, send them the weights, gather their replies, combine them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedsieve.config import ClientSettings, HighLoss, PhaseSettings
from fedsieve.errors import InputError, RunError
from fedsieve.federate.client import Broadcast, ClientData, ClientState, Context, Update
from fedsieve.federate.drift import Interference
from fedsieve.federate.exchange import ALL, Exchange
from fedsieve.federate.hidden import HiddenRound
from fedsieve.federate.select import by_size, highest, uniform
from fedsieve.federate.traffic import Traffic
from fedsieve.randomness import numpy_generator
from fedsieve.wire import WireError

OURS = (OSError, MemoryError, torch.OutOfMemoryError)  # these are no client's fault, and another run may not have them
RAISES, GARBLES, SENDS_NAN = INJECTED = ("raises", "garbles its message", "sends what is not a number")


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
class Round:
    """A round under way, and what is known of its replies, none of which is kept."""

    broadcast: Broadcast
    of_all: int  # its number among the rounds of all phases
    interference: Interference | None  # None: nobody asks how clients disagree
    traffic: Traffic = field(default_factory=Traffic)
    chosen: list[int] = field(default_factory=list)
    selection: dict[str, Any] = field(default_factory=dict)  # what there is to say about the choice
    samples: dict[int, int] = field(default_factory=dict)  # by client
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # why a client was left out

    @property
    def place(self) -> str:
        return f"phase {self.broadcast.phase}, round {self.broadcast.round}"

    def mean(self, name: str, by_samples: bool = False) -> float | None:
        known = {client: metrics[name] for client, metrics in self.metrics.items() if name in metrics}
        weights = {client: self.samples[client] if by_samples else 1 for client in known}
        total = sum(weights.values())
        return sum(weights[client] * value for client, value in known.items()) / total if known else None

    def line(self) -> dict[str, Any]:
        """The round's line of metrics."""
        line = {
            "phase": self.broadcast.phase,
            "round": self.broadcast.round,
            "clients": self.chosen,
            "failed": self.failed,
            **self.selection,
            "train_loss": self.mean("train_loss", by_samples=True),
            "val_accuracy": None,
            "val_loss": None,
            "drift_mean": self.mean("drift"),
            "bytes_up": self.traffic.up,
            "bytes_down": self.traffic.down,
            "encodings": dict(self.traffic.encodings),
            "density": self.mean("density") or 1.0,
        }
        if self.interference is not None:
            drifts = {client: metrics["drift"] for client, metrics in self.metrics.items()}
            line |= {"drift_max": max(drifts.values()), "drift": drifts}
            found = self.interference.finish().items()
            line |= {name: value for name, value in found if not name.startswith("drift")}
        return line


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
    interference: Callable[[], Interference | None]  # made anew each round
    warn: Callable[[str], None]

    def round(self, number: int, rounds_before: int) -> dict[str, Any]:
        """One exchange with clients; `rounds_before` were done in all phases. The round's line of metrics.

        The new weights are in the model. Whatever goes wrong leaves them as they were, and all else, too.
        """
        scope, versions = self.context.scope, self.exchange.versions
        before, seen = scope.read(), dict(versions.seen)
        broadcast = Broadcast(self.settings.name, number, self.settings.rounds, before)
        round = Round(broadcast, rounds_before + 1, self.interference())
        try:
            self._make_masks(round)
            self._choose(round)
            after = self._gather_hidden(round) if self.clients.zero_sum else self._gather(round)
            if not torch.isfinite(after).all():
                raise RunError(f"{round.place}: the server's new weights are not finite")
        except BaseException:
            scope.write(before)
            versions.seen = seen
            self.memory.rewind(rounds_before)
            raise
        scope.write(after)
        versions.record(scope, before, after)
        self.memory.commit()
        return round.line()

    def _make_masks(self, round: Round) -> None:
        """A mask for the round if it needs a new one; what making masks cost is part of the round that begins so."""
        masks, mixing = self.context.masks, self.context.mixing
        if masks is not None:
            masks.begin_round(round.broadcast)
            if round.broadcast.round == 1 or masks.settings.refresh == "round":
                round.traffic += masks.traffic
        if mixing is not None and round.broadcast.round == 1:
            round.traffic += mixing.traffic

    # Who takes part.

    def _choose(self, round: Round) -> None:
        """Choose the round's clients, and send them the weights."""
        generator = numpy_generator(self.seed, "clients", self.settings.name, round.broadcast.round)
        count, select = self.clients.count, self.clients.select
        if isinstance(select, HighLoss) and self.per_round < count:
            candidates = uniform(count, select.high_loss.candidates, generator)
            self._send(candidates, round)
            round.chosen = highest(self._losses(candidates, round), self.per_round)
            return
        if select == "by_size":
            round.chosen = by_size(self.sizes, self.per_round, generator)
        else:
            round.chosen = uniform(count, self.per_round, generator)
        self._send(round.chosen, round)

    def _losses(self, candidates: list[int], round: Round) -> dict[int, float]:
        """What each candidate tells of the weights on its own samples; who tells no number is left out."""
        losses = {client: self.loss_of(client) for client in candidates}
        round.traffic.up += sum(self.exchange.loss(client, loss) for client, loss in losses.items())
        scored = sum(self.sizes[client] for client in candidates)  # each in one forward pass
        for client in candidates:
            if not math.isfinite(losses[client]):
                round.failed[client] = f"its loss is {losses.pop(client)}"
        round.selection = {"candidates": losses, "samples_scored": scored}
        return losses

    def _send(self, clients: list[int], round: Round) -> None:
        """The weights, and before them a mask that all share to those who do not have it yet."""
        masks, versions = self.context.masks, self.exchange.versions
        if masks is not None and masks.shared is not None and not masks.needs_everybody:
            is_new = masks.settings.refresh == "round"
            lacking = [one for one in clients if is_new or versions.last_seen(one) < self.exchange.started]
            if lacking:
                round.traffic.down += len(lacking) * self.exchange.shared_mask(round.broadcast.round)
        self.exchange.bring_up_to_date(clients, round.broadcast.weights, round.traffic)

    # What they reply.

    def _gather(self, round: Round) -> Tensor:
        """The new weights from the replies that can be used, at least `clients.minimum` of them."""
        aggregator = self.aggregator(round.broadcast.weights)
        for client in round.chosen:
            data, remembered = self.data_of(client), self.memory.read(client)
            try:
                update, state = self._reply(data, remembered, round)
            except OURS:
                raise
            except Exception as error:  # whatever goes wrong at a client, the others go on
                round.failed[client] = _reason(error)
                self.exchange.versions.seen.pop(client, None)  # it may hold anything now
                continue
            aggregator.add(update)
            if round.interference is not None:
                positions = update.positions(len(round.broadcast.weights))
                round.interference.add(client, update.vectors["delta"], positions, update.mask)
            round.samples[client], round.metrics[client] = update.samples, update.metrics
            if state:
                self.memory.write(client, round.of_all, state)
        self._must_be_enough(round)
        return aggregator.finish()

    def _reply(self, data: ClientData, remembered: ClientState, round: Round) -> tuple[Update, ClientState]:
        """A client's update as it arrives at the server, and what the client remembers."""
        number, failure = round.broadcast.round, self._injected_failure(data.client, round)
        update, state = self._updated(data, remembered, round, failure)
        encoded, late = self.exchange.encode_update(update, number, remembered)
        if failure == GARBLES:
            encoded.data[len(encoded.data) // 2] ^= 1
        round.traffic.up += len(encoded.data)
        round.traffic.encodings.update(encoded.encodings.values())
        return self.exchange.decode_update(encoded.data, data.client, number), {**state, **late}

    def _updated(
        self, data: ClientData, remembered: ClientState, round: Round, failure: str | None
    ) -> tuple[Update, ClientState]:
        """What a client does by itself: its update, and what it remembers."""
        if failure == RAISES:
            raise RunError("it raised, as clients.fail_rate asks")
        self.context.scope.prepare_training()
        update, state = self.update(round.broadcast, data, remembered, self.context)
        if failure == SENDS_NAN:
            next(iter(update.vectors.values()))[0] = torch.nan
        return update, state

    def _gather_hidden(self, round: Round) -> Tensor:
        """The new weights from the sum of all replies, none of which the server can read by itself."""
        self._must_be_enough(round)  # of those who told their losses
        hidden = HiddenRound(round.chosen, round.broadcast, self.clients, self.exchange, round.place)
        round.traffic += hidden.traffic
        for client in round.chosen:
            data, remembered = self.data_of(client), self.memory.read(client)
            failure = self._injected_failure(client, round)
            try:
                update, state = self._updated(data, remembered, round, failure)
                message = hidden.encode(update)
                if failure == GARBLES:
                    message[len(message) // 2] ^= 1
                round.traffic.up += len(message)
                hidden.add(client, message)
            except OURS:
                raise
            except Exception as error:
                raise RunError(
                    f"{round.place}: client {client} left ({_reason(error)}), and clients.secure: zero_sum needs every "
                    f"client of a round; nothing was aggregated"
                ) from error
            if state:
                self.memory.write(client, round.of_all, state)
        after, round.metrics[ALL] = hidden.finish()
        round.samples[ALL] = 1
        return after

    def _must_be_enough(self, round: Round) -> None:
        for client, reason in round.failed.items():
            self.warn(f"{round.place}: client {client} was left out: {reason}")
        left = sum(client not in round.failed for client in round.chosen)
        if left < self.clients.minimum:
            client, reason = next(iter(round.failed.items()))
            raise RunError(
                f"{round.place}: {left} of {self.per_round} clients replied, fewer than "
                f"clients.minimum {self.clients.minimum}; client {client}: {reason}"
            )

    def _injected_failure(self, client: int, round: Round) -> str | None:
        """One of three failures, for a share `clients.fail_rate` of all replies."""
        generator = numpy_generator(self.seed, "fail", self.settings.name, round.broadcast.round, client)
        return INJECTED[generator.integers(3)] if generator.random() < self.clients.fail_rate else None


def _reason(error: Exception) -> str:
    is_ours = isinstance(error, RunError | InputError | WireError)
    return str(error) if is_ours else f"{type(error).__name__}: {error}"
