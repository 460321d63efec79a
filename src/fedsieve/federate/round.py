"""One round of federated learning, as the server sees it."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from fedsieve.config.client_settings import FEWEST_SECURE, ClientSettings
from fedsieve.errors import RunError
from fedsieve.federate.blame import raise_if_ours, reason_of
from fedsieve.federate.checks import check_number
from fedsieve.federate.diagnostics import Interference
from fedsieve.federate.linear import is_linear
from fedsieve.federate.methods.fedavg import FedAvg
from fedsieve.federate.norm_limit import NormLimit, Reply, all_finite
from fedsieve.federate.record import RoundRecord
from fedsieve.federate.secure_round import DepartedError, SecureRound
from fedsieve.federate.selection.uniform import Uniform
from fedsieve.federate.shared_mask import SharedMasks
from fedsieve.federate.traffic import Traffic
from fedsieve.federate.transport import Transport
from fedsieve.federate.types import EXTRA, Answer, Broadcast, Engine, Job, LocalSetup, State, Store, Update
from fedsieve.federate.weighting import WEIGHTINGS
from fedsieve.model.flat import Scope
from fedsieve.observe.profile import section
from fedsieve.privacy.zero_sum import Roster
from fedsieve.randomness import numpy_generator
from fedsieve.sieve.density import MeanDensity


@dataclass
class Server:
    """The server's side of a phase: its clients, its transport, and its state."""

    phase: int  # its index among the phases
    name: str
    rounds: int
    seed: int
    scope: Scope
    method: FedAvg
    select: Uniform
    clients: ClientSettings
    setup: LocalSetup  # of the clients, for checks
    shared_masks: SharedMasks | None
    transport: Transport
    engine: Engine
    memory: Store
    sizes: np.ndarray  # samples of each client
    vector: Tensor  # all weights, of which those in scope change
    state: State  # of the method
    prepared: Traffic  # before the first round
    norms: list[float]  # of the phase's last updates; each round adds its own
    interference: Callable[[], Interference | None]  # made anew each round
    warn: Callable[[str], None]
    replied: Callable[[int, int], None]  # hears how many clients of a round have replied
    private_keys: dict[int, str] = field(default_factory=dict)  # of a simulated secure round

    def round(self, number: int, rounds_before: int) -> dict[str, Any]:
        """Do a round, after `rounds_before` in all phases, and return its line of metrics.

        Updates the server's weights and state. A round that fails leaves them, and what clients hold and remember, as
        they were.
        """
        weights = self.scope.of(self.vector)
        broadcast = Broadcast(self.name, number, self.rounds, weights, self.method.send(self.state))
        record = RoundRecord(broadcast, rounds_before + 1, self.interference(), self._density(number))
        with self._transaction(rounds_before):
            # A new mask for all clients, if this round needs one.
            if self.shared_masks is not None:
                self.shared_masks.begin_round(broadcast)
                record.traffic += self.shared_masks.traffic_of(number)
            self._publish(broadcast)
            if number == 1:
                record.traffic += self.prepared
            # Choose clients: candidates get the weights, and may have to report their losses first.
            candidates = self.select.candidates(numpy_generator(self.seed, "clients", self.name, number))
            self._send(candidates, record)
            losses = self._losses(candidates, record) if self.select.needs_losses else dict.fromkeys(candidates, 0.0)
            record.chosen = self.select.among(losses)
            if not record.chosen:
                self._must_be_enough(record)
            new_weights, new_state = self._new_weights(record)
            if not all_finite(new_weights):
                raise RunError(f"{record.place}: the server's new weights are not finite")
        with section("aggregate"):
            self.transport.versions.record(self.scope, weights, new_weights)
            self.scope.put(self.vector, new_weights)
            self.state = new_state
            self.memory.commit()
            self.engine.publish({"weights": self.scope.of(self.vector)})
            return record.line()

    def _new_weights(self, record: RoundRecord) -> tuple[Tensor, State]:
        """The chosen clients train; their updates become new weights, and a new state of the method."""
        if self.clients.zero_sum is None:
            return self._folded(record, None)
        while True:  # each time with fewer clients, and with fresh keys
            secure = self._secure_round(record)
            try:
                return self._folded(record, secure)
            except DepartedError as departed:
                for client, reason in departed.reasons.items():
                    self._leave_out(client, reason, record)

    def _folded(self, record: RoundRecord, secure: SecureRound | None) -> tuple[Tensor, State]:
        # Those with most samples train first, so that no worker waits for a long job at the end.
        clients = sorted(record.left, key=lambda client: -self.sizes[client])
        is_light = is_linear(self.setup)  # then a job takes less time than sending it
        jobs = (self._job(client, record, secure, is_light) for client in clients)
        answers = self.engine.map(jobs)
        # Their updates become new weights, one at a time: none is kept unless the method keeps it.
        replies = self._counted(clients, answers)
        updates = self._summed(replies, secure, record) if secure else self._accepted(replies, record)
        with closing(answers), closing(updates):
            state = {name: one.clone() for name, one in self.state.items()}  # `fold` may change it in place
            return self.method.fold(record.broadcast.weights, updates, state)

    @contextmanager
    def _transaction(self, rounds_before: int) -> Iterator[None]:
        """If a round fails, undo what it changed: versions that clients saw, norms, and clients' states."""
        seen, norms = self.transport.versions.seen.clone(), list(self.norms)
        try:
            yield
        except BaseException:
            self.transport.versions.seen, self.norms[:] = seen, norms
            self.memory.rewind(rounds_before)
            raise

    def _density(self, number: int) -> MeanDensity | None:
        """Collects the clients' masks in the first and the last round of a phase, which is enough to describe them."""
        masks = self.setup.masks
        return MeanDensity(masks.shapes) if masks is not None and number in (1, self.rounds) else None

    # Down: the weights.

    def _publish(self, broadcast: Broadcast) -> None:
        """Publish what is new in this round besides the weights."""
        new = {f"{EXTRA}{name}": one for name, one in broadcast.extras.items() if name not in self.method.sends_once}
        masks = self.setup.masks
        if masks is not None and masks.shared is not None and masks.settings.refresh == "round":
            new["mask"] = masks.shared.bits
        if new:
            self.engine.publish(new)

    def _send(self, clients: list[int], record: RoundRecord) -> None:
        """Send each client what it lacks of the weights, the shared mask and the broadcast extras."""
        transport, extras, traffic, masks = self.transport, record.broadcast.extras, record.traffic, self.setup.masks
        newcomers = [client for client in clients if transport.versions.last_seen(client) < transport.started]
        with section("encode"):
            if self.shared_masks is not None and (lacking := self.shared_masks.lacking(clients, newcomers)):
                transport.send_shared_mask(lacking, record.broadcast.round, traffic)
            for name, values in extras.items():
                transport.send_extra(newcomers if name in self.method.sends_once else clients, name, values, traffic)
            transport.bring_up_to_date(clients, record.broadcast.weights, traffic)
            if masks is not None and masks.keeps_own and masks.start is not None and record.broadcast.round > 1:
                transport.send_start(newcomers, masks.start, traffic)

    def _losses(self, candidates: list[int], record: RoundRecord) -> dict[int, float]:
        """Each candidate's loss on its own samples; a candidate with an impossible loss is left out."""
        jobs = (Job("loss", {"phase": self.phase, "client": client}) for client in candidates)
        losses: dict[int, float] = {}
        for client, answer in zip(candidates, self.engine.map(jobs), strict=True):
            try:
                if "failed" in answer.about:
                    raise RunError(answer.about["failed"])
                loss = float(answer.about["loss"])
                record.traffic.up += self.transport.loss(client, loss)
                check_number("loss", loss)
                losses[client] = loss
            except RunError as error:
                self._leave_out(client, str(error), record)
        scored = int(self.sizes[candidates].sum())  # each in one forward pass
        record.selection = {"candidates": losses, "samples_scored": scored}
        return losses

    # Up: the updates.

    def _job(self, client: int, record: RoundRecord, secure: SecureRound | None, is_light: bool) -> Job:
        """A job that trains a client. Its state is read under version `memory`, and written under `version`."""
        about = {
            "phase": self.phase,
            "round": record.broadcast.round,
            "client": client,
            "memory": self.memory.newest(client),
            "version": record.version,
            "known": self.memory.known(client),
            "secret": self._secret_of(client, secure) if secure is not None else None,
        }
        return Job("train", about, is_light=is_light)

    def _counted(self, clients: list[int], answers: Iterable[Answer]) -> Iterator[tuple[int, Answer]]:
        """Each client with its answer; `replied` hears of every one."""
        self.replied(0, len(clients))
        for done, reply in enumerate(zip(clients, answers, strict=True), start=1):
            self.replied(done, len(clients))
            yield reply

    def _accepted(self, replies: Iterable[tuple[int, Answer]], record: RoundRecord) -> Generator[Update]:
        """The updates that can be used; a client with a bad one is left out.

        RunError at the end if fewer than `clients.minimum` are left.
        """
        limit = NormLimit(self.clients.norm_limit if self.clients.count > 1 else None, self.norms)
        for reply, reason in limit.judged(self._readable(replies, record)):
            if reason is not None:
                self._leave_out(reply.update.client, reason, record)
                continue
            with section("aggregate"):
                record.add(reply.update)
            if reply.remembers is not None:
                self.memory.keep(reply.update.client, record.version, reply.remembers)
            yield reply.update
        self.norms[:] = limit.norms
        self._must_be_enough(record)

    def _readable(self, replies: Iterable[tuple[int, Answer]], record: RoundRecord) -> Iterator[Reply]:
        for client, answer in replies:
            try:
                yield self._reply_in(answer, client, record)
            except Exception as error:
                raise_if_ours(error)
                self._leave_out(client, reason_of(error), record)

    def _reply_in(self, answer: Answer, client: int, record: RoundRecord) -> Reply:
        """A client's reply as it arrives at the server, checked on its own."""
        if "failed" in answer.about:
            raise RunError(answer.about["failed"])
        record.traffic.up += len(answer.data)
        record.traffic.encodings.update(answer.about["encodings"])
        with section("decode"):
            samples = int(self.sizes[client])
            weight = WEIGHTINGS[self.clients.weighting](samples)
            update = self.transport.decode_update(answer.data, client, record.broadcast.round, weight)
            norm = self.method.check(update, record.broadcast, samples, self.setup)
            return Reply(update, norm, answer.about["remembers"])

    def _secure_round(self, record: RoundRecord) -> SecureRound:
        """Ask all clients of the round for new keys, so that the server reads only the sum of their updates."""
        self.private_keys.clear()
        place = record.place if not record.redone else f"{record.place}, attempt {record.redone + 1}"
        keys: dict[int, bytes] = {}
        self._must_be_enough(record)  # of those that reported their losses
        clients = record.left
        jobs = (Job("key", {"phase": self.phase, "client": one, "place": place}, is_light=True) for one in clients)
        for client, answer in zip(clients, self.engine.map(jobs), strict=True):
            if "failed" in answer.about:
                self._leave_out(client, answer.about["failed"], record)
                continue
            keys[client] = bytes(answer.data)
            if "private" in answer.about:
                self.private_keys[client] = answer.about["private"]
        self._must_be_enough(record)
        if len(keys) < FEWEST_SECURE:
            whys = [f"client {client}: {reason}" for client, reason in record.failed.items()]
            left = f"{len(keys)} clients are left, and clients.secure: zero_sum needs {FEWEST_SECURE}"
            why = f" ({'; '.join(whys)})" if whys else ""
            raise RunError(f"{record.place}: {left}{why}; the sum over fewer would show single updates")
        samples = int(self.sizes[list(keys)].sum())
        secure = SecureRound(Roster(place, keys), samples, record.broadcast, self.clients, self.transport)
        record.traffic += secure.traffic
        record.redone += 1
        return secure

    def _secret_of(self, client: int, secure: SecureRound) -> dict[str, Any]:
        """What a client needs to hide its update; in a simulation also its private key: any process may train it."""
        return {"place": secure.roster.context, "keys": secure.public, "private": self.private_keys.get(client)}

    def _summed(
        self, replies: Iterable[tuple[int, Answer]], secure: SecureRound, record: RoundRecord
    ) -> Generator[Update]:
        """One update: the average of all, since the server cannot read single ones. DepartedError if one is missing."""
        departed: dict[int, str] = {}
        remembers: dict[int, str] = {}
        for client, answer in replies:
            try:
                if "failed" in answer.about:
                    raise RunError(answer.about["failed"])
                record.traffic.up += len(answer.data)
                with section("aggregate"):
                    secure.add(client, answer.data)
            except Exception as error:
                raise_if_ours(error)
                departed[client] = reason_of(error)
            else:
                remembers[client] = answer.about["remembers"]
        if departed:
            raise DepartedError(record.place, departed)
        update = secure.finish()
        for client, digest in remembers.items():
            if digest:
                self.memory.keep(client, record.version, digest)
        record.add(update)
        yield update

    def _leave_out(self, client: int, reason: str, record: RoundRecord) -> None:
        record.failed[client] = reason
        self.transport.versions.forget(client)  # its weights are unknown now
        self.memory.drop(client, record.version)

    def _must_be_enough(self, record: RoundRecord) -> None:
        for client, reason in record.failed.items():
            if client not in record.warned:
                self.warn(f"{record.place}: client {client} was left out: {reason}")
                record.warned.add(client)
        left = len(record.left)
        if left < self.clients.minimum:
            whys = [f"client {client}: {reason}" for client, reason in record.failed.items()]
            raise RunError(
                f"{record.place}: {left} of {self.select.per_round} clients replied, fewer than "
                f"clients.minimum {self.clients.minimum}; {whys[0] if whys else 'no others were selected'}"
            )
