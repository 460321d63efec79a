"""A client's side of one run at its node: applies the server's messages, and does its jobs."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128

from fedsieve.context import RunContext
from fedsieve.data.pictures import shown
from fedsieve.engine.client_runtime import ClientRuntime
from fedsieve.errors import RunError
from fedsieve.federate.checks import check_number
from fedsieve.federate.receiver import Receiver
from fedsieve.federate.secure_round import KEYS, SecureUpdates, keys_in
from fedsieve.federate.transport import ACTIVE, MASK, START, WEIGHTS, Transport
from fedsieve.federate.types import EXTRA, Answer, Broadcast, Job, State, Task, Update
from fedsieve.federate.versions import NOTHING, Versions
from fedsieve.federation.node_memory import KeptAtNode, NodeStates
from fedsieve.federation.owner import Owner
from fedsieve.federation.socket_frames import Blob, Frame
from fedsieve.model.evaluate import BATCH, joined
from fedsieve.phase import ClientSide, mask_source, plan
from fedsieve.privacy.zero_sum import Participant, Roster
from fedsieve.sieve.mask import Mask

HELD = 3  # versions of the weights that a node keeps, in case the server goes on from an older one
JOBS = ("loss", "scores", "contribute", "key", "train", "evaluate")


class LacksError(Exception):
    """The node does not hold what a request builds on; the server has to send everything."""


@dataclass(frozen=True)
class Sent:
    """A message of the server: what it is about, and the version of the weights that it adds to."""

    topic: str
    since: int | None
    data: Blob


class NodeRuntime(ClientRuntime):
    """Does the jobs of one client. What it trained last is kept, in case the server asks for it again."""

    def __init__(self, context: RunContext, folder: Path, owner: Owner, told: int) -> None:
        super().__init__(context, plan(context.experiment, context), KeptAtNode(folder))
        self.owner, self.told = owner, told
        self.participants: OrderedDict[str, Participant] = OrderedDict()  # with unused keys, by the place of use
        self._last: tuple[str, Update, State] | None = None
        self._handlers = {name: self._handlers[name] for name in JOBS if name in self._handlers}
        self._handlers["evaluate"] = self._evaluate

    def _key(self, job: Job) -> Answer:
        """A new public key; the private one stays here, and serves once."""
        one = Participant(job.about["client"])
        self.participants[str(job.about["place"])] = one
        while len(self.participants) > 2:
            self.participants.popitem(last=False)
        return Answer({}, one.public_key)

    def _evaluate(self, job: Job) -> Answer:
        """How many of its held-out samples the client gets right, and the sum of their losses."""
        self._load(job)
        context, held = self.context, self.context.held_out
        positions = context.training[held[job.about["client"]]] if held is not None else np.empty(0, np.int64)
        if not len(positions):
            return Answer({"samples": 0, "correct": 0, "loss": 0.0})
        depth = self._side_of(job).frozen
        batches = (positions[first : first + BATCH] for first in range(0, len(positions), BATCH))
        scores = (context.score("train", batch, depth) for batch in batches)
        score = joined((correct.numpy(), loss) for correct, loss in scores)
        check_number("loss", score.loss)
        correct = int(score.correct.count_nonzero())
        return Answer({"samples": len(positions), "correct": correct, "loss": float(score.loss)})

    def _trained(self, side: ClientSide, task: Task, remembered: State) -> tuple[Update, State]:
        digest = xxh3_128(f"{task.broadcast.phase} {task.broadcast.round}".encode())
        for name, tensor in (*sorted(self.vectors.items()), *sorted(remembered.items())):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        key = digest.hexdigest()
        if self._last is None or self._last[0] != key:
            self._last = None  # before the next one takes memory
            self._last = key, *super()._trained(side, task, remembered)
        _, update, state = self._last
        vectors = {name: vector.clone() for name, vector in update.vectors.items()}
        return replace(update, vectors=vectors, metrics=dict(update.metrics), samples=self.told), state

    def _encoded(
        self, side: ClientSide, update: Update, broadcast: Broadcast, remembered: State, secret: dict[str, Any] | None
    ) -> tuple[bytearray, list[str], State]:
        if secret is None:
            return super()._encoded(side, update, broadcast, remembered, secret)
        place, keys = str(secret["place"]), secret["keys"]
        if (participant := self.participants.pop(place, None)) is None:
            raise RunError("its key for this round was used already, or never made")
        self.owner.check_participants(len(keys))
        secure = SecureUpdates(Roster(place, keys), broadcast, self.context.experiment.clients, side.transport)
        return secure.encode(update, participant), [], {}


class NodeRun:
    """One run, as a node takes part in it."""

    def __init__(self, context: RunContext, folder: Path, client: int, owner: Owner, told: int) -> None:
        """`told` is the number of samples that the server knows of."""
        self.context, self.client, self.owner = context, client, owner
        self.runtime = NodeRuntime(context, folder, owner, told)
        self._held: OrderedDict[int, Tensor] = OrderedDict({NOTHING: context.model.vector.clone()})
        self._version = NOTHING
        self._phase: int | None = None
        self._receiver: Receiver | None = None

    def do(self, request: Frame) -> Frame:
        """The reply to a request. LacksError if it builds on something that is not here."""
        header = request.header
        job = self._job(header)
        self.owner.check_job(job.do, job.about)
        job = self._taken(job, list(_messages(request)), int(header["version"]))
        if job.about.get("version") is not None:
            self._tidy(job)
        answer = self.runtime.do(job)
        about, data = self._reply(job, answer)
        return Frame({"about": about}, [data])

    def _job(self, header: Mapping[str, Any]) -> Job:
        about = dict(header["about"])
        if about.get("client") != self.client:
            raise RunError(f"the request is for another client; this is client {self.client}")
        if header["do"] not in JOBS:
            raise RunError(f"it does not do '{shown(str(header['do'])[:40])}'; it does {', '.join(JOBS)}")
        if not _is_number(about.get("phase"), 0, len(self.runtime.phases) - 1):
            raise RunError("there is no such phase")
        if header["do"] == "train":
            rounds = [phase.settings.rounds for phase in self.runtime.phases[: about["phase"] + 1]]
            if not _is_number(about.get("round"), 1, rounds[-1]):
                raise RunError(f"there is no such round; the phase has {rounds[-1]}")
            if not _is_number(about.get("version"), about["round"], sum(rounds[:-1]) + about["round"]):
                raise RunError("the number of rounds so far cannot be true")
        return Job(header["do"], about)

    # What the server sends.

    def _taken(self, job: Job, messages: list[Sent], version: int) -> Job:
        """Apply the messages; the job, with what belongs to it alone."""
        number = int(job.about["phase"])
        is_new = number != self._phase
        if is_new:
            self._receiver, self._phase = self._receiver_of(number), None
        assert self._receiver is not None
        receiver, new = self._receiver, dict[str, Tensor]()
        masks = receiver.transport.masks
        if job.do == "scores" and masks is not None:  # until a message says which weights are left
            job = replace(job, data=Mask.full(masks.shapes).bits.numpy())
        late: Blob | None = None
        for message in messages:
            topic, data = message.topic, message.data
            if topic == MASK:
                mask = receiver.mask(data)
                receiver.share(mask)
                new["mask"] = mask.bits
            elif topic == ACTIVE:
                job = replace(job, data=receiver.mask(data).bits.numpy())
            elif topic == KEYS:
                secret = job.about["secret"]
                keys = keys_in(data, int(secret["participants"]), receiver.transport)
                job = replace(job, about={**job.about, "secret": {**secret, "keys": keys}})
            elif topic == START:
                late = data
            elif topic == WEIGHTS:
                self._bring(receiver, message)
            elif topic.startswith(EXTRA):
                new[topic] = receiver.extra(topic.removeprefix(EXTRA), data)
            else:
                raise RunError(f"a message is about '{shown(topic[:40])}', which this version does not know")
        if self._version != version:
            raise LacksError
        self._publish(number, is_new, new, late)
        return job

    def _receiver_of(self, number: int) -> Receiver:
        """For the messages of a phase; it knows no mask yet."""
        phase, experiment = self.runtime.phases[number], self.context.experiment
        masks = mask_source(self.context, phase, None, None)
        name, wire, nobody = phase.settings.name, experiment.wire, Versions.of_nobody()
        return Receiver(Transport(phase.scope, name, wire, nobody, experiment.seed, masks, phase.method))

    def _bring(self, receiver: Receiver, message: Sent) -> None:
        """Apply a broadcast to the version of the weights that it adds to."""
        since = NOTHING if message.since is None else message.since
        if since == NOTHING:
            base = self._held[self._version]
        elif since in self._held:
            base = self._held[since]
        else:
            raise LacksError
        vector, version = receiver.weights(message.data, base)
        for later in [one for one in self._held if one >= version]:
            del self._held[later]
        self._held[version], self._version = vector, version
        while len(self._held) > HELD:
            self._held.popitem(last=False)

    def _publish(self, number: int, is_new: bool, new: dict[str, Tensor], late: Blob | None) -> None:
        """Give the runtime what changed, as the engines of a simulation do."""
        phase, vector, device = self.runtime.phases[number], self._held[self._version], self.context.device
        weights = phase.scope.of(vector)
        vectors = {"weights": weights, **new}
        if is_new:
            part = phase.altered
            vectors |= {"model": vector[part], "model_at": torch.tensor([part.start])}
        mask = phase.settings.mask
        if mask is not None and mask.needs_start and (is_new or late is not None):
            assert self._receiver is not None
            vectors["start"] = weights if late is None else self._receiver.start(late, weights).to(device)
        self.runtime.take(vectors)
        self._phase = number

    def _tidy(self, job: Job) -> None:
        known = {int(round): str(digest) for round, digest in (job.about.get("known") or {}).items()}
        states = self.runtime.states_of(job)
        assert isinstance(states, NodeStates)
        states.tidy(known, int(job.about["version"]))

    # What the server gets.

    def _reply(self, job: Job, answer: Answer) -> tuple[dict[str, Any], Blob]:
        """Numbers and scores go as messages, like updates."""
        if "failed" in answer.about or job.do in ("train", "key", "evaluate"):
            return answer.about, memoryview(answer.data).cast("B") if len(answer.data) else b""
        transport = self._receiver.transport  # type: ignore[union-attr]
        if job.do == "loss":
            return {}, transport.encode_loss(self.client, answer.about["loss"])
        name = "scores" if job.do == "scores" else "fisher"
        return answer.about, transport.encode_scores(self.client, answer.numbers(torch.float32), name)


def _is_number(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _messages(request: Frame) -> Iterator[Sent]:
    for about, data in zip(request.header["messages"], request.blobs, strict=True):
        yield Sent(str(about["topic"]), about.get("since"), data)
