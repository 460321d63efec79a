"""The server's way to nodes over Flower: requests are pushed to the SuperLink, and replies pulled as they arrive."""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import httpx
from flwr.app import Message, Metadata
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest

from fedsieve.errors import RunError
from fedsieve.federation.flower_content import TYPE, Arrays, Incoming, Outgoing, content_of, frame_in, outgoing
from fedsieve.federation.flower_run import FlowerRun
from fedsieve.federation.links import LinkError
from fedsieve.federation.socket_frames import Frame, FrameError
from fedsieve.federation.superlink_folder import SuperLinkFolder

PATIENCE = 20.0  # seconds without a SuperLink
SOONEST, LATEST = 0.02, 0.25  # seconds between two looks for replies
SMALL_REPLY = 1 << 22  # bytes; what is longer has to be expected
LONGER = 60.0  # seconds that Flower keeps replies beyond their time: they may wait until earlier ones are given up
AWAY = ""  # instead of a message's id: the node is not there
SAYS = {
    ErrorCode.NODE_UNAVAILABLE: "its relay is gone",
    ErrorCode.MESSAGE_UNAVAILABLE: "there was no reply in time",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "there was no reply in time",
}
T = TypeVar("T")


@dataclass
class Request:
    """A request that a node was sent, or will be."""

    node: str
    frame: Frame
    until: float  # by this machine's clock, which is the SuperLink's
    message_id: str | None = None  # Flower's; None: not pushed yet


class FlowerLink:
    """A node's address is the name under which its key is registered, or Flower's number where there are no keys."""

    def __init__(self, folder: SuperLinkFolder, place: str, note: Callable[[str], None]) -> None:
        """InputError unless the SuperLink answers at this place."""
        self.run, self.note = FlowerRun(folder, place), note
        self.largest, self.binds_names = SMALL_REPLY, True
        self._requests: dict[str, Request] = {}  # that wait for a reply
        self._arriving: dict[str, Incoming] = {}  # replies of which some objects are here, by the request's number
        self._found: dict[str, Frame | LinkError] = {}  # replies, by the request's number
        self._dropped = set[str]()  # Flower's ids of messages whose replies nobody wants
        self._unneeded = set[str]()  # objects that the SuperLink may forget
        self._arrays = Arrays()
        self._numbers: dict[str, int] = {}  # Flower's, by address, of the nodes that were there at the last look
        self._pause = SOONEST

    def nodes(self) -> list[str]:
        self._numbers = found = self._trying(self.run.online)
        if self.binds_names and any(address == f"{number:x}" for address, number in found.items()):
            self.binds_names = False
            self.note("nodes are not authenticated, and messages not encrypted: the SuperLink runs with --insecure")
        return sorted(found)

    def push(self, node: str, request: Frame, seconds: float) -> str:
        number = uuid.uuid4().hex
        self._requests[number] = Request(node, request, time.time() + seconds)
        return number

    def pull(self, requests: Iterable[str]) -> Mapping[str, Frame | LinkError]:
        wanted = [number for number in requests if number in self._requests]
        self._flush()
        self._trying(partial(self._look, wanted))
        replies = {number: self._found.pop(number) for number in wanted if number in self._found}
        for number in replies:
            del self._requests[number]
        self._pause = SOONEST if replies else min(LATEST, 1.5 * self._pause)
        if not replies:
            time.sleep(self._pause)
        return replies

    def drop(self, requests: Iterable[str]) -> None:
        for number in requests:
            self._found.pop(number, None)
            if (arriving := self._arriving.pop(number, None)) is not None:
                self._unneeded.add(arriving.id)
            if (one := self._requests.pop(number, None)) is not None and one.message_id:
                self._dropped.add(one.message_id)
                self._unneeded.add(one.message_id)  # else it would wait there for a node that is gone

    def close(self) -> None:
        self.run.close()

    # A SuperLink that is started again.

    def _trying(self, call: Callable[[], T]) -> T:
        """What a call returns; it is tried again while the SuperLink is away. RunError if it stays away."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return call()
            except httpx.HTTPError as error:
                is_unknown = self.run.is_unknown(error)
                if time.monotonic() > until:
                    raise RunError(self.run.trouble(error)) from None
                time.sleep(0.2)
                if is_unknown:
                    with suppress(httpx.HTTPError):
                        self._begin_again()

    def _begin_again(self) -> None:
        """All that waits for a reply is pushed again, once those nodes are back that were there."""
        self.run.begin_again()
        for forgotten in (self._arriving, self._dropped, self._unneeded):
            forgotten.clear()
        for number, request in self._requests.items():
            if number not in self._found:
                request.message_id = None
        before, until = self._numbers.keys(), time.monotonic() + PATIENCE
        while before - (found := self.run.online()).keys() and time.monotonic() < until:
            time.sleep(0.1)
        self._numbers = found

    # Requests.

    def _flush(self) -> None:
        """Push what was not pushed yet, all at once, so that what several nodes get is sent to the SuperLink once."""
        for number, one in self._requests.items():
            if one.message_id is None and one.node not in self._numbers:
                one.message_id, self._found[number] = AWAY, LinkError("its relay is not there")
        while new := {number: one for number, one in self._requests.items() if one.message_id is None}:
            run, batch = self.run.id, outgoing(self._message(number, one) for number, one in new.items())
            ids = self._trying(partial(self._pushed, run, batch))  # the same messages, if it is tried again
            for (number, one), message_id in zip(new.items(), ids, strict=True):
                one.message_id = message_id
                if message_id == AWAY:
                    self._found[number] = LinkError("its relay is not there")
        self._arrays.clear()

    def _pushed(self, run: int, batch: Outgoing) -> list[str | None]:
        """The ids of messages that were pushed, AWAY for those that cannot be; None if there is another run now."""
        if run != self.run.id:
            return [None] * len(batch.messages)
        reply = self.run.client.PushMessages(
            PushAppMessagesRequest(messages_list=batch.messages, message_object_trees=batch.trees)
        )
        for object_id in dict.fromkeys(reply.objects_to_push):
            self.run.client.PushObject(
                PushObjectRequest(
                    node=self.run.node,
                    run_id=run,
                    object_id=object_id,
                    object_content=batch.content(object_id),
                    session_id=reply.session_id,
                )
            )
        return list(reply.message_ids)

    def _message(self, number: str, request: Request) -> Message:
        about = Metadata(
            run_id=self.run.id,
            message_id="",
            src_node_id=SUPERLINK_NODE_ID,
            dst_node_id=self._numbers.get(request.node, SUPERLINK_NODE_ID),
            reply_to_message_id="",
            group_id=number,  # nobody but the node gets to know it, and its reply has it too
            created_at=time.time(),
            ttl=2 * max(1.0, request.until - time.time()) + LONGER,
            message_type=TYPE,
        )
        return make_message(about, content_of(request.frame, self._arrays))

    # Replies.

    def _look(self, wanted: list[str]) -> None:
        """Take what has arrived of the replies to these requests, without waiting for the rest."""
        waiting = {
            one.message_id: number
            for number in wanted
            if (one := self._requests[number]).message_id and number not in (*self._arriving, *self._found)
        }
        if waiting or self._dropped:
            reply = self.run.client.PullMessages(PullAppMessagesRequest(message_ids=[*waiting, *self._dropped]))
            for proto, tree in zip(reply.messages_list, reply.message_object_trees, strict=True):
                self._announced(waiting.get(proto.metadata.reply_to_message_id), proto, tree)
        for number in wanted:
            if number in self._arriving:
                self._fetch(number)
        while self._unneeded:
            forgotten = next(iter(self._unneeded))
            self.run.client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=self.run.node, run_id=self.run.id, message_object_id=forgotten)
            )
            self._unneeded.discard(forgotten)

    def _announced(self, number: str | None, proto: Any, tree: Any) -> None:
        """A reply, whose objects may be here later, to the request with this number; None: nobody wants it."""
        message = message_from_proto(proto)
        self._dropped.discard(message.metadata.reply_to_message_id)
        if number is None:
            self._unneeded.add(message.metadata.message_id)
        elif message.has_error():
            self._unneeded |= {message.metadata.message_id, message.metadata.reply_to_message_id}
            self._found[number] = LinkError(SAYS.get(message.error.code, "Flower could not deliver its reply"))
        elif message.metadata.group_id != number:
            self._unneeded.add(message.metadata.message_id)
            self._found[number] = LinkError("it sent a damaged reply: it replies to another request")
        else:
            try:
                self._arriving[number] = Incoming(tree, self.largest)
            except FrameError as error:
                self._unneeded.add(message.metadata.message_id)
                self._found[number] = LinkError(f"it sent a damaged reply: {error}")

    def _fetch(self, number: str) -> None:
        """Those objects of a reply that are at the SuperLink; with the last one it is found."""
        arriving = self._arriving[number]
        try:
            for object_id in arriving.missing():
                reply = self.run.client.PullObject(
                    PullObjectRequest(node=self.run.node, run_id=self.run.id, object_id=object_id)
                )
                if not reply.object_found:
                    raise FrameError("its relay did not send all of it")
                if not reply.object_available:
                    return
                arriving.put(object_id, reply.object_content)
            self._found[number] = frame_in(arriving.message().content)
        except FrameError as error:
            self._found[number] = LinkError(f"it sent a damaged reply: {error}")
        del self._arriving[number]
        self._unneeded.add(arriving.id)
