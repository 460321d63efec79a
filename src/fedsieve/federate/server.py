"""The server's side of a phase: choose clients, send them the weights, gather their replies, combine them."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from fedsieve.config import FEWEST_HIDDEN, ClientSettings, HighLoss, PhaseSettings
from fedsieve.errors import RunError
from fedsieve.federate.aggregate import all_finite
from fedsieve.federate.checks import check_number, check_update
from fedsieve.federate.client import Broadcast, Update
from fedsieve.federate.clients import Clients, raise_if_ours, reason_of
from fedsieve.federate.drift import Interference
from fedsieve.federate.exchange import ALL, Exchange
from fedsieve.federate.hidden import HiddenRound
from fedsieve.federate.jobs import Answer, Ask, Job
from fedsieve.federate.norms import NormLimit, Reply
from fedsieve.federate.select import by_size, highest, uniform
from fedsieve.federate.traffic import Traffic
from fedsieve.layers import MeanDensity
from fedsieve.profile import section
from fedsieve.randomness import numpy_generator


class Aggregator(Protocol):
    def add(self, update: Update) -> None: ...
    def finish(self) -> Tensor: ...


class Memory(Protocol):
    """Where clients keep what they remember between rounds: a file each."""

    def newest(self, client: int) -> Path | None: ...
    def place(self, client: int, round: int) -> Path: ...
    def keep(self, client: int, round: int, digest: str) -> None: ...
    def drop(self, client: int, round: int) -> None: ...
    def commit(self) -> None: ...
    def rewind(self, round: int) -> None: ...


@dataclass
class Round:
    """A round under way, and what is known of its replies, none of which is kept."""

    broadcast: Broadcast
    of_all: int  # its number among the rounds of all phases
    interference: Interference | None  # None: nobody asks how clients disagree
    density: MeanDensity | None  # of the clients' masks; None: there are none, or they are much like the last round's
    traffic: Traffic = field(default_factory=Traffic)
    chosen: list[int] = field(default_factory=list)
    selection: dict[str, Any] = field(default_factory=dict)  # what there is to say about the choice
    samples: dict[int, int] = field(default_factory=dict)  # by client
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # why a client was left out
    norms: list[float] = field(default_factory=list)  # of the phase's last updates, those of this round among them

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
        if self.density is not None and self.density.masks:
            line["layers"] = self.density.layers().rounded()
        return line


@dataclass
class Server:
    settings: PhaseSettings
    clients: ClientSettings
    per_round: int
    seed: int
    aggregator: Callable[[Tensor], Aggregator]  # made anew each round, from the weights before it
    their_side: Clients
    exchange: Exchange
    memory: Memory
    ask: Ask  # this process, or others
    sizes: np.ndarray  # samples of each client
    norms: list[float]  # of the phase's last updates, to which each round adds its own
    interference: Callable[[], Interference | None]  # made anew each round
    warn: Callable[[str], None]

    def round(self, number: int, rounds_before: int) -> dict[str, Any]:
        """One exchange with clients; `rounds_before` were done in all phases. The round's line of metrics.

        The new weights are in the model. Whatever goes wrong leaves them as they were, and all else, too.
        """
        scope, versions = self.exchange.scope, self.exchange.versions
        before, seen = scope.read(), versions.seen.clone()
        broadcast = self.their_side.broadcast = Broadcast(self.settings.name, number, self.settings.rounds, before)
        round = Round(broadcast, rounds_before + 1, self.interference(), self._density(number))
        try:
            self._make_masks(round)
            self._choose(round)
            after = self._gather_hidden(round) if self.clients.zero_sum else self._gather(round)
            if not all_finite(after):
                raise RunError(f"{round.place}: the server's new weights are not finite")
        except BaseException:
            scope.write(before)
            versions.seen = seen
            self.memory.rewind(rounds_before)
            raise
        with section("aggregate"):
            scope.write(after)
            versions.record(scope, before, after)
            self.norms[:] = round.norms
            self.memory.commit()
            return round.line()

    def _density(self, number: int) -> MeanDensity | None:
        """To be told of the clients' masks in the first and the last round of a phase, which is enough to know them."""
        masks = self.their_side.context.masks
        return MeanDensity(masks.shapes) if masks is not None and number in (1, self.settings.rounds) else None

    def _make_masks(self, round: Round) -> None:
        """A mask for the round if it needs a new one; what making masks cost is part of the round that begins so."""
        masks, mixing = self.their_side.context.masks, self.their_side.context.mixing
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
        """Each candidate's loss on its own samples; a candidate with an impossible loss is left out."""
        jobs = [Job("loss", {"client": client}) for client in candidates]
        told = zip(candidates, self.ask(jobs), strict=True)
        losses = {client: float(answer.about["loss"]) for client, answer in told}
        round.traffic.up += sum(self.exchange.loss(client, loss) for client, loss in losses.items())
        scored = int(self.sizes[candidates].sum())  # each in one forward pass
        for client in candidates:
            try:
                check_number("loss", losses[client])
            except RunError as error:
                losses.pop(client)
                self._leave_out(client, str(error), round)
        round.selection = {"candidates": losses, "samples_scored": scored}
        return losses

    def _send(self, clients: list[int], round: Round) -> None:
        """The weights, and before them what all have in a phase to those who do not have it yet, or not any more.

        That is a mask that all share, and the sum of all scores for Fisher mixing.
        """
        context, exchange = self.their_side.context, self.exchange
        masks, mixing = context.masks, context.mixing
        lacking = sum(exchange.versions.last_seen(client) < exchange.started for client in clients)
        with section("encode"):
            if masks is not None and masks.shared is not None:
                if masks.settings.refresh == "round":  # a new one: either all clients made it, or none of these has it
                    without = 0 if masks.needs_everybody else len(clients)
                else:
                    without = lacking
                round.traffic.down += without and without * exchange.shared_mask(round.broadcast.round)
            if mixing is not None:
                round.traffic.down += lacking and lacking * exchange.total_scores(mixing.total)
            self.exchange.bring_up_to_date(clients, round.broadcast.weights, round.traffic)

    # What they reply.

    def _gather(self, round: Round) -> Tensor:
        """The new weights from the replies that can be used, at least `clients.minimum` of them."""
        aggregator = self.aggregator(round.broadcast.weights)
        limit = NormLimit(self.clients.norm_limit if self.clients.count > 1 else None, self.norms)
        with closing(self._replies(round)) as replies:
            for reply, reason in limit.judged(self._readable(replies, round)):
                if reason is not None:
                    self._leave_out(reply.client, reason, round)
                    continue
                client, update = reply.client, reply.update
                with section("aggregate"):
                    aggregator.add(update)
                    if round.interference is not None:
                        positions = update.positions(len(round.broadcast.weights))
                        round.interference.add(client, update.vectors["delta"], positions, update.mask)
                    if round.density is not None and update.mask is not None:
                        round.density.add(update.mask)
                round.samples[client], round.metrics[client] = update.samples, update.metrics
                if reply.remembers is not None:
                    self.memory.keep(client, round.of_all, reply.remembers)
        round.norms = limit.norms
        self._must_be_enough(round)
        with section("aggregate"):
            return aggregator.finish()

    def _readable(self, replies: Iterable[tuple[int, Answer]], round: Round) -> Iterator[Reply]:
        """The replies that can be used; whatever is wrong with a client's, the others go on."""
        for client, answer in replies:
            try:
                reply = self._reply_in(answer, client, round)
            except Exception as error:
                raise_if_ours(error)
                self._leave_out(client, reason_of(error), round)
                continue
            yield reply

    def _leave_out(self, client: int, reason: str, round: Round) -> None:
        round.failed[client] = reason
        self.exchange.versions.forget(client)  # it may hold anything now
        self.memory.drop(client, round.of_all)

    def _replies(self, round: Round, hidden: HiddenRound | None = None) -> Generator[tuple[int, Answer]]:
        """The clients' replies, those with most samples first: so that nobody waits for a long one at the end."""
        order = sorted(round.chosen, key=lambda client: -self.sizes[client])
        answers = self.ask(
            self.their_side.job(
                client,
                self.memory.newest(client),
                self.memory.place(client, round.of_all),
                hidden.secret_of(client) if hidden is not None else None,
            )
            for client in order
        )
        with closing(answers):
            yield from zip(order, answers, strict=True)

    def _reply_in(self, answer: Answer, client: int, round: Round) -> Reply:
        """A client's reply as it arrives at the server, checked by itself."""
        if "failed" in answer.about:
            raise RunError(answer.about["failed"])
        round.traffic.up += len(answer.data)
        round.traffic.encodings.update(answer.about["encodings"])
        with section("decode"):
            update = self.exchange.decode_update(answer.data, client, round.broadcast.round)
            norm = check_update(update, round.broadcast, int(self.sizes[client]), self.their_side.context)
            return Reply(client, update, norm, answer.about["remembers"])

    def _gather_hidden(self, round: Round) -> Tensor:
        """The new weights from the sum of all replies, none of which the server can read by itself."""
        self._must_be_enough(round)  # of those who told their losses
        if len(round.chosen) < FEWEST_HIDDEN:
            left = f"{len(round.chosen)} clients are left, and clients.secure: zero_sum needs {FEWEST_HIDDEN}"
            raise RunError(f"{round.place}: {left}; the sum over fewer would show single updates")
        samples = int(self.sizes[round.chosen].sum())
        hidden = HiddenRound(round.chosen, samples, round.broadcast, self.clients, self.exchange, round.place)
        round.traffic += hidden.traffic
        with closing(self._replies(round, hidden)) as replies:
            for client, answer in replies:
                try:
                    if "failed" in answer.about:
                        raise RunError(answer.about["failed"])
                    round.traffic.up += len(answer.data)
                    with section("aggregate"):
                        hidden.add(client, answer.data)
                except Exception as error:
                    raise_if_ours(error)
                    raise RunError(
                        f"{round.place}: client {client} left ({reason_of(error)}), and clients.secure: zero_sum needs "
                        "every client of a round; nothing was aggregated"
                    ) from error
                if answer.about["remembers"]:
                    self.memory.keep(client, round.of_all, answer.about["remembers"])
        with section("aggregate"):
            after, round.metrics[ALL] = hidden.finish()
            masks = self.their_side.context.masks
            if round.density is not None and masks is not None and masks.shared is not None:
                round.density.add(masks.shared)  # else nobody knows
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
