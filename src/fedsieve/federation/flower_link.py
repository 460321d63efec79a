"""The server's way to nodes over Flower: a run of its own at the SuperLink, whose messages it pushes and pulls."""

import io
import threading
import time
import uuid
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import httpx
from flwr.app import Message, Metadata
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_from_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    GetNodesRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.runtime import RuntimeHttpClient

from fedsieve.errors import InputError, RunError
from fedsieve.federation.flower_content import TYPE, Arrays, Outgoing, content_of, frame_in, outgoing, pulled
from fedsieve.federation.links import LinkError
from fedsieve.federation.socket_frames import Frame, FrameError
from fedsieve.federation.superlink_folder import TOKEN_HEADER, SuperLinkFolder

HEARTBEAT = 10.0  # seconds
PATIENCE = 20.0  # seconds without a SuperLink
SOONEST, LATEST = 0.02, 0.25  # seconds between two looks for replies
REFUSED = ""  # instead of a message's id
SMALL_REPLY = 1 << 22  # bytes; what is longer has to be expected
NOBODY = "the SuperLink at {} does not answer ({}); start it with `fedsieve superlink start {}`"
APP = """
[project]
name = "fedsieve"
version = "1.0.0"
[tool.flwr.app]
publisher = "fedsieve"
[tool.flwr.app.components]
serverapp = "nothing:app"
clientapp = "nothing:app"
"""  # what Flower wants of each run; there is no such module, and nobody executes it


T = TypeVar("T")


class Secret:
    """Adds the secret of the SuperLink's folder to each request."""

    def __init__(self, token: str) -> None:
        self.token = token

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers[TOKEN_HEADER] = self.token
        return call_next(context)


@dataclass
class Request:
    """A request that a node was sent, or will be."""

    node: str
    frame: Frame
    until: float
    message_id: str | None = None  # Flower's; None: not pushed yet


class FlowerLink:
    """A node's address is the name under which its key is registered, or Flower's number where there are no keys."""

    def __init__(self, folder: SuperLinkFolder, place: str, note: Callable[[str], None]) -> None:
        """InputError unless the SuperLink answers at this place."""
        self.folder, self.place, self.note = folder, place, note
        self.largest = SMALL_REPLY
        self.binds_names = True
        self._requests: dict[str, Request] = {}  # that wait for a reply
        self._dropped = set[str]()  # Flower's ids of messages whose replies nobody wants
        self._arrays = Arrays()
        self._numbers: dict[str, int] = {}  # Flower's, by address, of nodes that were there
        self._pause = SOONEST
        self._ended = threading.Event()
        self._secret = Secret(folder.token)
        try:
            self._begin()
        except httpx.HTTPError as error:
            if is_forbidden(error):
                raise InputError(self._other_folder) from None
            raise InputError(NOBODY.format(place, said_of(error), folder.path)) from None
        threading.Thread(target=self._beat, daemon=True).start()

    # A run at the SuperLink.

    def _begin(self) -> None:
        """Start a run, and take over its task, as a ServerApp would."""
        with ControlHttpClient.from_server_address(self.place, True, None, [self._secret]) as control:
            control.StartRun(StartRunRequest(fab=Fab(content=app())))
        with RuntimeHttpClient.from_server_address(self.place, True, None, [self._secret]) as anonymous:
            task = anonymous.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
        interceptors = [self._secret, RuntimeTokenHttpInterceptor(task.token)]
        self.client = RuntimeHttpClient.from_server_address(self.place, True, None, interceptors)
        self.client.PullTaskInput(PullTaskInputRequest())
        self.run_id, self.node = task.task.run_id, Node(node_id=SUPERLINK_NODE_ID)

    @property
    def _other_folder(self) -> str:
        what = f"the SuperLink at {self.place} was started with another folder than {self.folder.path}"
        return f"{what}; give engine.flower.folder the same one"

    def _beat(self) -> None:
        """Tell the SuperLink that this run goes on."""
        while not self._ended.wait(HEARTBEAT):
            with suppress(httpx.HTTPError):
                self.client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def _trying(self, call: Callable[[], T]) -> T:
        """What a call returns. A SuperLink that was started again gets a new run, and all that waits for a reply."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return call()
            except httpx.HTTPError as error:
                if is_forbidden(error):
                    raise RunError(self._other_folder) from None
                if time.monotonic() > until:
                    raise RunError(NOBODY.format(self.place, said_of(error), self.folder.path)) from None
                time.sleep(0.2)
                if isinstance(error, httpx.HTTPStatusError):  # it is there, and does not know this run
                    with suppress(httpx.HTTPError):
                        self._begin_again()

    def _begin_again(self) -> None:
        """At a SuperLink that was started again, once those nodes are back that were there."""
        self._begin()
        self._dropped.clear()
        for request in self._requests.values():
            request.message_id = None
        before, until = self._numbers.keys(), time.monotonic() + PATIENCE
        while before - (found := self._online()).keys() and time.monotonic() < until:
            time.sleep(0.1)
        self._numbers = found

    def _online(self) -> dict[str, int]:
        """Flower's numbers of the nodes that are there, by address."""
        found = self.client.GetNodes(GetNodesRequest()).nodes
        return {one.name or f"{one.node_id:x}": one.node_id for one in found}

    # What engines use.

    def nodes(self) -> list[str]:
        found = self._trying(self._online)
        if self.binds_names and any(address == f"{number:x}" for address, number in found.items()):
            self.binds_names = False
            self.note("nodes are not authenticated, and messages not encrypted: the SuperLink runs with --insecure")
        self._numbers |= found
        return sorted(found)

    def push(self, node: str, request: Frame, seconds: float) -> str:
        number = uuid.uuid4().hex
        self._requests[number] = Request(node, request, time.time() + seconds)
        return number

    def pull(self, requests: Iterable[str]) -> Mapping[str, Frame | LinkError]:
        self._flush()
        wanted = {number: self._requests[number] for number in requests if number in self._requests}
        replies: dict[str, Frame | LinkError] = {
            number: LinkError("its node is not registered at the SuperLink")
            for number, one in wanted.items()
            if one.message_id == REFUSED
        }
        waiting = {one.message_id: number for number, one in wanted.items() if one.message_id}
        if waiting or self._dropped:
            replies |= self._trying(lambda: self._taken(waiting))
        for number in replies:
            self._requests.pop(number, None)
        self._pause = SOONEST if replies else min(LATEST, 1.5 * self._pause)
        if not replies:
            time.sleep(self._pause)
        return replies

    def drop(self, requests: Iterable[str]) -> None:
        for number in requests:
            if (one := self._requests.pop(number, None)) is not None and one.message_id:
                self._dropped.add(one.message_id)

    def close(self) -> None:
        self._ended.set()
        with suppress(httpx.HTTPError):
            self.client.PushTaskOutput(PushTaskOutputRequest(sub_status="completed"))
        self.client.close()

    # Messages.

    def _flush(self) -> None:
        """Push what was not pushed yet, all at once, so that what several nodes get is sent to the SuperLink once."""
        for one in self._requests.values():
            if one.message_id is None and one.node not in self._numbers:
                one.message_id = REFUSED
        while new := {number: one for number, one in self._requests.items() if one.message_id is None}:
            run, batch = self.run_id, outgoing(self._message(number, one) for number, one in new.items())
            ids = self._trying(partial(self._pushed, run, batch))  # the same messages, if it is tried again
            for one, message_id in zip(new.values(), ids, strict=True):
                one.message_id = message_id
        self._arrays.clear()

    def _pushed(self, run: int, batch: Outgoing) -> list[str | None]:
        """The ids of messages that were pushed, REFUSED for those that cannot be; None if the run is over."""
        if run != self.run_id:
            return [None] * len(batch.messages)
        reply = self.client.PushMessages(
            PushAppMessagesRequest(messages_list=batch.messages, message_object_trees=batch.trees)
        )
        for object_id in dict.fromkeys(reply.objects_to_push):
            self.client.PushObject(
                PushObjectRequest(
                    node=self.node,
                    run_id=run,
                    object_id=object_id,
                    object_content=batch.content(object_id),
                    session_id=reply.session_id,
                )
            )
        return list(reply.message_ids)

    def _message(self, number: str, request: Request) -> Message:
        about = Metadata(
            run_id=self.run_id,
            message_id="",
            src_node_id=SUPERLINK_NODE_ID,
            dst_node_id=self._numbers[request.node],
            reply_to_message_id="",
            group_id=number,  # nobody but the node gets to know it, and its reply has it too
            created_at=time.time(),
            ttl=max(1.0, request.until - time.time()),
            message_type=TYPE,
        )
        return make_message(about, content_of(request.frame, self._arrays))

    def _taken(self, waiting: Mapping[str, str]) -> dict[str, Frame | LinkError]:
        """Replies to these messages that are there, by number; those that nobody wants are deleted."""
        found: dict[str, Frame | LinkError] = {}
        reply = self.client.PullMessages(PullAppMessagesRequest(message_ids=[*waiting, *self._dropped]))
        for proto, tree in zip(reply.messages_list, reply.message_object_trees, strict=True):
            asked = proto.metadata.reply_to_message_id
            if asked in waiting:
                found[waiting[asked]] = self._read(proto, tree, waiting[asked])
            self._dropped.discard(asked)
            self.client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(
                    node=self.node, run_id=self.run_id, message_object_id=proto.metadata.message_id
                )
            )
        return found

    def _read(self, proto: Any, tree: Any, number: str) -> Frame | LinkError:
        """The reply to a request."""
        try:
            message = message_from_proto(proto)
            if not message.has_error():
                if message.metadata.group_id != number:
                    raise FrameError("it replies to another request")
                if (whole := pulled(tree, self._object, self.largest)) is None:
                    return LinkError("its relay left while it sent a reply")
                message = whole
            if message.has_error():
                return LinkError(f"its relay is gone ({first_line(message.error.reason)})")
            return frame_in(message.content)
        except FrameError as error:
            return LinkError(f"it sent a damaged reply: {error}")

    def _object(self, object_id: str) -> bytes | None:
        request = PullObjectRequest(node=self.node, run_id=self.run_id, object_id=object_id)
        until = time.monotonic() + PATIENCE
        while True:
            reply = self.client.PullObject(request)
            if reply.object_found and reply.object_available:
                return bytes(reply.object_content)
            if not reply.object_found or time.monotonic() > until:
                return None
            time.sleep(SOONEST)


def app() -> bytes:
    """The app that Flower's runs have: it says nothing but a name."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("pyproject.toml", APP)
    return data.getvalue()


def is_forbidden(error: httpx.HTTPError) -> bool:
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.FORBIDDEN


def said_of(error: Exception) -> str:
    """What an HTTP error says, in one line."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}"
    return first_line(str(error)) or type(error).__name__


def first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:120]
