"""Clients run at their own nodes: the server sends each of them the messages that it lacks, and the job.

Nothing but messages and numbers goes either way. What needs no client, such as the scores on the server's validation
set, is done by the server itself.
"""

import re
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fedsieve.config.plugins import active
from fedsieve.data.pictures import shown
from fedsieve.engine.client_runtime import ClientRuntime
from fedsieve.engine.node_facts import Facts, facts
from fedsieve.errors import InputError, RunError
from fedsieve.federate.blame import reason_of
from fedsieve.federate.checks import check_number
from fedsieve.federate.secure_round import KEYS
from fedsieve.federate.traffic import Traffic
from fedsieve.federate.transport import ACTIVE, ALL, WEIGHTS, Transport
from fedsieve.federate.types import Answer, Courier, Job
from fedsieve.federation.gathering import Gathering
from fedsieve.federation.links import LinkError
from fedsieve.federation.node import start_of
from fedsieve.federation.socket_frames import Blob, Frame
from fedsieve.observe.profile import section
from fedsieve.privacy.zero_sum import Participant, Roster, SecureError

AT_SERVER = ("outputs", "score")  # jobs for which no client is needed
AHEAD = 4  # replies that are taken before it is their turn
FAREWELL = 10.0  # seconds
TRIES = 3  # to bring a node that lacks something up to date
DIGEST = re.compile(r"[0-9a-f]{32}")
ENCODING = re.compile(r"[a-z0-9_]{1,20} [a-z0-9_]{1,20}")
LONGEST_REASON = 300


@dataclass
class Message:
    topic: str
    data: Blob
    since: int | None = None


@dataclass
class Ticket:
    """A job that a node was asked to do."""

    job: Job
    client: int
    messages: list[Message]
    until: float  # when the server stops to wait
    request: str | None = None  # its number; None: the node is not there
    joining: str | None = None  # the node's address, if the request is to take part in the run, before the job
    reply: Frame | LinkError | None = None
    tries: int = 1


class FederationEngine:
    """Asks nodes to do jobs, all at once, and takes their answers in the order of the jobs."""

    def __init__(self, runtime: ClientRuntime, gathering: Gathering) -> None:
        self.runtime, self.context, self.gathering = runtime, runtime.context, gathering
        self.link, self.settings = gathering.link, gathering.settings
        self.seconds: dict[str, float] = defaultdict(float)
        self.courier: Courier | None = self
        self._names = {number: name for name, number in gathering.numbers.items()}
        self._pending: dict[int, list[Message]] = defaultdict(list)  # for the client's next job
        self._joined: set[str] = set()  # addresses
        self._invited: dict[str, tuple[str, float]] = {}  # by address of a newcomer: the request, and until when
        self._transport: Transport | None = None  # of the current phase
        self._start = start_of(self.context.model.vector) if self.context.experiment.clients.have_backbone else None
        self._compared: set[str] = set()  # addresses of nodes that were said to compute other bits
        self._told: dict[str, str] = {}  # why a node is not used, as it was said last, by address
        self._keys: set[bytes] = set()  # all public keys so far; each serves once

    @property
    def size(self) -> int:
        return max(1, len(self.gathering.addresses))

    # Nodes.

    def join(self) -> None:
        """Let all nodes that are there take part; InputError if one of them cannot."""
        problems = dict[str, str]()
        for address in self.gathering.facts:
            self._invite(address)
        while self._invited:
            problems |= self._hear()
        for address, reason in problems.items():
            raise InputError(f"node {self._called(address)}: {reason}")

    def _invite(self, address: str) -> None:
        """Ask a node to take part; its reply is heard later."""
        seconds = self.settings.timeout
        request = self.link.push(address, Frame(self._invitation(address)), seconds)
        self._invited[address] = request, time.monotonic() + seconds

    def _hear(self) -> dict[str, str]:
        """Replies to invitations, as far as they are there; why some nodes do not take part."""
        if not self._invited:
            return {}
        problems = dict[str, str | None]()
        replies = self.link.pull([request for request, _ in self._invited.values()])
        for address, (request, until) in self._invited.items():
            if (reply := replies.get(request)) is not None:
                problems[address] = self._enter(address, reply)
            elif time.monotonic() > until:
                self.link.drop([request])
                problems[address] = f"it said nothing for {self.settings.timeout:g} s"
        for address in problems:
            del self._invited[address]
        return {address: problem for address, problem in problems.items() if problem is not None}

    def _enter(self, address: str, reply: Frame | LinkError) -> str | None:
        """A node takes part from now on, or why it does not."""
        if isinstance(reply, LinkError):
            return str(reply)
        if (problem := _refusal_in(reply)) is None:
            self._joined.add(address)
            self._compare(address, reply.header.get("facts"))
        return problem

    def _invitation(self, address: str) -> dict[str, Any]:
        experiment, gathering = self.context.experiment, self.gathering
        assert gathering.federation is not None
        client = gathering.numbers[gathering.facts[address].name]
        return {
            "do": "join",
            "run": gathering.run,
            "client": client,
            "experiment": experiment.model_copy(update={"engine": "local"}).to_yaml(),
            "federation": gathering.federation.told_to(client).model_dump_json(),
            "plugins": {plugin.name: plugin.digest for plugin in active(experiment.plugins)},
            "start": self._start,
        }

    @cached_property
    def _facts(self) -> Facts:
        """Of this machine."""
        return facts(self.context.experiment)

    def _compare(self, address: str, theirs: Any) -> None:
        """Warn if a node computes other bits than this machine."""
        mine = self._facts
        canary = theirs.get("canary") if isinstance(theirs, dict) else None
        if canary != mine["canary"] and address not in self._compared:
            self._compared.add(address)
            told = theirs if isinstance(theirs, dict) else {}
            described = {key: shown(str(told.get(key))[:60]) for key in ("cpu", "torch")}
            self.context.callback.warning(
                f"node {self._called(address)} computes other last bits than the server (there {described.get('cpu')}, "
                f"torch {described.get('torch')}; here {mine['cpu']}, torch {mine['torch']}); the model will not have "
                "the hash of a simulation"
            )

    def _called(self, address: str) -> str:
        facts = self.gathering.facts.get(address)
        return facts.name if facts is not None else address

    def _welcome(self) -> None:
        """Nodes that came since the last job are asked to take part. Those that have agreed do so from now on."""
        gathering = self.gathering
        if came := gathering.look():
            self._names |= {gathering.numbers[name]: name for name in came}
            gathering.save()
            self._forget_old_addresses()
            for name in came:
                self._invite(gathering.addresses[name])
        for address, reason in self._hear().items():
            self._warn(address, f"node {self._called(address)} cannot take part", reason)
            gathering.refuse(address, reason)
        for address, reason in gathering.refused.items():
            self._warn(address, f"node {address} is not used", reason)

    def _forget_old_addresses(self) -> None:
        """Of nodes that have come back at another one."""
        self._joined &= self.gathering.facts.keys()
        for address in self._invited.keys() - self.gathering.facts.keys():
            request, _ = self._invited.pop(address)
            self.link.drop([request])

    def _warn(self, address: str, what: str, reason: str) -> None:
        """Say once why a node is not used, and again if it is for another reason."""
        if self._told.get(address) != reason:
            self._told[address] = reason
            self.context.callback.warning(f"{what}: {reason}")

    # What nodes are sent.

    def publish(self, vectors: Mapping[str, Tensor]) -> None:
        """For the server's own jobs; nodes are sent messages."""
        self.runtime.take(vectors)

    def begin(self, transport: Transport) -> None:
        """From now on messages are those of this transport's phase; it may have begun with another transport."""
        if self._transport is None or transport.phase != self._transport.phase:
            self._pending.clear()
        self._transport = transport
        self.link.largest = transport.longest

    def post(self, client: int, topic: str, message: bytes | bytearray, since: int | None = None) -> None:
        self._pending[client].append(Message(topic, message, since))

    def map(self, jobs: Iterable[Job]) -> Generator[Answer]:
        """The answers, in the order of the jobs."""
        jobs = iter(jobs)
        if (first := next(jobs, None)) is None:
            return
        if first.do in AT_SERVER:
            for job in chain([first], jobs):
                yield self.runtime.do(job)
            return
        self._welcome()
        tickets = [self._ticket(job) for job in chain([first], jobs)]
        try:
            for number, ticket in enumerate(tickets):
                with section("idle"):
                    while ticket.reply is None:
                        self._listen(tickets[number : number + AHEAD])
                answer, ticket.reply = self._answer(ticket), None
                ticket.messages.clear()
                if ticket.job.do == "evaluate" and "failed" in answer.about:
                    reason = answer.about["failed"]
                    self.context.callback.warning(f"client {ticket.client} was not evaluated: {reason}")
                yield answer
        finally:
            self.link.drop([ticket.request for ticket in tickets if ticket.request is not None])

    def _ticket(self, job: Job) -> Ticket:
        client = int(job.about["client"])
        if job.do == "evaluate":  # of the newest weights; this is not counted, as a simulation sends nothing for it
            assert self._transport is not None
            self._transport.bring_up_to_date([client], self.runtime.vectors[WEIGHTS], Traffic())
        ticket = Ticket(job, client, self._pending.pop(client, []), time.monotonic() + self.settings.timeout)
        self._ask(ticket)
        return ticket

    def _ask(self, ticket: Ticket) -> None:
        address = self._address(ticket.client)
        if address is None:
            ticket.reply = LinkError(self._absence(ticket.client))
            return
        assert self._transport is not None
        about = dict(ticket.job.about)
        if (secret := about.get("secret")) is not None:
            about["secret"] = {"place": secret["place"], "participants": len(secret["keys"])}
        header = {
            "do": ticket.job.do,
            "run": self.gathering.run,
            "about": about,
            "version": self._transport.versions.last_seen(ticket.client),
            "messages": [{"topic": one.topic, "since": one.since} for one in ticket.messages],
        }
        self._push(ticket, address, Frame(header, [one.data for one in ticket.messages]))

    def _push(self, ticket: Ticket, address: str, request: Frame) -> None:
        ticket.request = self.link.push(address, request, max(1.0, ticket.until - time.monotonic()))

    def _address(self, client: int) -> str | None:
        """Where a client's node is, if it takes part. Whether it still does shows when it is asked to do something."""
        address = self._place(client)
        return address if address in self.gathering.facts and address not in self._invited else None

    def _place(self, client: int) -> str | None:
        """Where a client's node is, or was."""
        name = self._names.get(client)
        return self.gathering.addresses.get(name) if name is not None else None

    def _absence(self, client: int) -> str:
        """Why a client's node cannot be asked."""
        address = self._place(client)
        if address is None:
            return "its node is not there"
        if address in self._invited:
            return "its node does not take part yet"
        return self.gathering.refused.get(address, "its node is not there")

    # What they reply.

    def _listen(self, tickets: list[Ticket]) -> None:
        """Take replies to the first of these tickets, and give up those whose time is over."""
        waiting = {ticket.request: ticket for ticket in tickets if ticket.reply is None and ticket.request is not None}
        for request, reply in self.link.pull(list(waiting)).items():
            self._take(waiting[request], reply)
        for ticket in tickets:
            if ticket.reply is None and time.monotonic() > ticket.until:
                ticket.reply = LinkError(f"it did not reply within {self.settings.timeout:g} s")
                if ticket.request is not None:
                    self.link.drop([ticket.request])

    def _take(self, ticket: Ticket, reply: Frame | LinkError) -> None:
        """What a node replied to the job, or to being asked to take part before it."""
        if ticket.joining is not None:
            problem, ticket.joining = self._enter(ticket.joining, reply), None
            if problem is None:
                self._ask_again(ticket)
            else:
                ticket.reply = LinkError(problem)
        elif isinstance(reply, Frame) and "lacks" in reply.header and ticket.tries < TRIES:
            ticket.tries += 1
            if str(reply.header["lacks"]) == "run":
                self._ask_to_join(ticket)
            else:
                self._ask_again(ticket)
        else:
            ticket.reply = reply

    def _ask_to_join(self, ticket: Ticket) -> None:
        """A node that was started again, or was left behind by a server that was, has to take part first."""
        if (address := self._address(ticket.client)) is None:
            ticket.reply = LinkError(self._absence(ticket.client))
            return
        self._joined.discard(address)
        ticket.joining = address
        self._push(ticket, address, Frame(self._invitation(address)))

    def _ask_again(self, ticket: Ticket) -> None:
        """With everything that a node needs that has nothing."""
        assert self._transport is not None
        kept = [one for one in ticket.messages if one.topic in (ACTIVE, KEYS)]
        everything = self._transport.everything(self.runtime.vectors)
        ticket.messages = [*(Message(topic, data) for topic, data in everything), *kept]
        if ticket.job.do == "scores" and not kept:
            mask = self._transport.mask_message(torch.frombuffer(bytearray(ticket.job.data), dtype=torch.uint8))
            ticket.messages.append(Message(ACTIVE, mask))
        self._ask(ticket)

    def _answer(self, ticket: Ticket) -> Answer:
        """A reply as the rest of the program knows answers; whatever is wrong with it is the client's fault."""
        reply, job = ticket.reply, ticket.job
        if isinstance(reply, LinkError):
            return Answer({"failed": str(reply)})
        assert reply is not None
        try:
            if (problem := _refusal_in(reply)) is not None:
                raise RunError(problem)
            about, data = reply.header["about"], reply.blobs[0]
            if "failed" in about:
                raise RunError(_one_line(about["failed"]))
            return self._read(job, ticket.client, about, data)
        except Exception as error:
            return Answer({"failed": reason_of(error)})

    def _read(self, job: Job, client: int, about: dict[str, Any], data: Blob) -> Answer:
        transport = self._transport
        assert transport is not None
        remembers = about.get("remembers")
        if remembers is not None and not (isinstance(remembers, str) and DIGEST.fullmatch(remembers)):
            raise RunError("it does not say what it remembers")
        if job.do == "loss":
            return Answer({"loss": transport.decode_loss(data, client)})
        if job.do in ("scores", "contribute"):
            name = "scores" if job.do == "scores" else "fisher"
            scores = transport.decode_scores(data, client, name).float().contiguous()
            return Answer({"remembers": remembers}, scores.numpy())
        if job.do == "evaluate":
            return self._score(client, about)
        if job.do == "key":
            self._check_key(client, bytes(data))
            return Answer({}, data)
        encodings = about["encodings"]
        is_list = isinstance(encodings, list) and len(encodings) <= len(transport.replies)
        if not is_list or not all(isinstance(one, str) and ENCODING.fullmatch(one) for one in encodings):
            raise RunError("it does not say how its update is encoded")
        return Answer({"encodings": encodings, "remembers": remembers}, data)

    def _score(self, client: int, about: dict[str, Any]) -> Answer:
        """What a client says of the model on its held-out samples, if it can be true."""
        samples, correct, loss = (about[key] for key in ("samples", "correct", "loss"))
        assert self.gathering.federation is not None
        held = int(self.gathering.federation.samples[client] - self.context.sizes[client])
        if type(samples) is not int or samples != held:
            raise RunError(f"it was evaluated on other samples than the {held} that it holds out")
        if type(correct) is not int or not 0 <= correct <= samples:
            raise RunError(f"it does not say how many of its {samples} samples are right")
        check_number("loss", float(loss))
        return Answer({"samples": samples, "correct": correct, "loss": float(loss)})

    def _check_key(self, client: int, key: bytes) -> None:
        """RunError for a public key that would make the others refuse to take part: invalid, or another client's."""
        probe = Participant(ALL)
        try:
            probe.stream_key(client, Roster("", {ALL: probe.public_key, client: key}))
        except SecureError:
            raise RunError("its public key is not valid") from None
        if key in self._keys:
            raise RunError("its public key was used before")
        self._keys.add(key)

    def end(self) -> None:
        """Tell nodes that the run is finished: they need to remember nothing of it any more."""
        self.link.drop([request for request, _ in self._invited.values()])
        requests = [
            self.link.push(one, Frame({"do": "end", "run": self.gathering.run}), FAREWELL) for one in self._joined
        ]
        until = time.monotonic() + FAREWELL
        while requests and time.monotonic() < until:
            done = self.link.pull(requests)
            requests = [one for one in requests if one not in done]
        self.link.drop(requests)


def _refusal_in(reply: Frame) -> str | None:
    """Why a node did not do what it was asked to."""
    for key in ("refused", "failed"):
        if key in reply.header:
            return _one_line(reply.header[key])
    return f"it lacks the {_one_line(reply.header['lacks'])}" if "lacks" in reply.header else None


def _one_line(reason: Any) -> str:
    """What a node gives as a reason, so that it can be printed."""
    return shown(" ".join(str(reason)[:LONGEST_REASON].split()))
