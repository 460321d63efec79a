"""`fedsieve relay`: fetches requests from the SuperLink, and hands them to the node's socket on the same machine.

It takes the place of Flower's SuperNode: it uses the same API and the same keys, but nothing that is sent is executed.
It needs neither torch nor the data, so it may run as another user than the node.
"""

import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict
from flwr.common.serde import message_from_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedsieve.errors import InputError
from fedsieve.federation.flower_content import Arrays, Incoming, content_of, frame_in, outgoing
from fedsieve.federation.keys import CURVE, public_bytes
from fedsieve.federation.socket_frames import Frame, FrameError, receive, send
from fedsieve.files.memory import keep_freed_memory

ALIVE = 10.0  # seconds, in which the SuperLink expects to hear of a relay; the least that Flower allows
FORGOTTEN = 30.0  # seconds, after which the SuperLink knows that a relay is gone that has not said so
SOONEST, LATEST = 0.1, 1.0  # seconds between two looks for requests
HELLO = 5.0  # seconds that a node has to say who it is
TIMEOUTS = 30.0, 300.0  # seconds for a short call, and for an object of 5 MB
TROUBLE = 2.0  # seconds between two tries to reach a SuperLink that does not answer
T = TypeVar("T")


class UnknownKeyError(Exception):
    """The SuperLink does not know this key, or has forgotten that the relay is there."""


class StillThereError(Exception):
    """The SuperLink believes that an earlier relay with this key is there."""


@dataclass
class FleetConnection:
    """Flower's API for nodes, with this node's key."""

    place: str
    authority: Path | None  # None: neither encryption nor authentication
    public_key: bytes
    client: FleetHttpClient  # for short calls
    transfers: FleetHttpClient  # for objects, which take long on a slow line
    node: Node = field(default_factory=Node)  # its number, once it is known

    @staticmethod
    def at(place: str, authority: Path | None, key: ec.EllipticCurvePrivateKey) -> "FleetConnection":
        """InputError if the authority's file is no certificate."""
        interceptors = [NodeAuthHttpInterceptor(key, key.public_key())]
        try:
            verify = ssl.create_default_context(cafile=str(authority)) if authority is not None else False
            url = f"{'http' if authority is None else 'https'}://{place}"
            clients = [FleetHttpClient(url, interceptors=interceptors, verify=verify, timeout=one) for one in TIMEOUTS]
        except (OSError, ValueError) as error:  # of ssl, too
            raise InputError(
                f"--ca {authority} is no certificate ({type(error).__name__}); get the server's ca.crt"
            ) from None
        return FleetConnection(place, authority, public_bytes(key.public_key()), *clients)

    def activate(self) -> None:
        """Say that the relay is there."""
        public = self.public_key
        try:
            if self.authority is None:
                with suppress(httpx.HTTPStatusError):  # it did so before
                    self.client.RegisterNode(RegisterNodeFleetRequest(public_key=public))
            request = ActivateNodeRequest(public_key=public, heartbeat_interval=ALIVE)
            self.node = Node(node_id=self.client.ActivateNode(request).node_id)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.PRECONDITION_FAILED:
                raise StillThereError from None
            raise UnknownKeyError(f"HTTP {error.response.status_code}") from None

    def beat(self) -> None:
        request = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=ALIVE)
        if not self.client.SendNodeHeartbeat(request).success:
            raise UnknownKeyError

    def leave(self) -> None:
        with suppress(httpx.HTTPError):
            self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))
        self.client.close()
        self.transfers.close()

    def next(self) -> tuple[Message, Any] | None:
        """The next request, without its content, and the tree of its objects."""
        reply = self.client.PullMessages(PullMessagesRequest(node=self.node))
        if not reply.messages_list:
            return None
        return message_from_proto(reply.messages_list[0]), reply.message_object_trees[0]

    def content(self, message: Message, tree: Any, largest: int) -> Frame:
        """What a request says, once the server has uploaded all of it; FrameError if that is damaged or too large."""
        incoming, run, pause = Incoming(tree, largest), message.metadata.run_id, SOONEST / 2
        while missing := incoming.missing():
            request = PullObjectRequest(node=self.node, run_id=run, object_id=missing[0])
            got = self._insisting(partial(self.transfers.PullObject, request), message)
            if not got.object_found:
                raise FrameError("the server has not uploaded all of it")
            if got.object_available:
                incoming.put(missing[0], got.object_content)
                continue
            if time.time() > expiry(message):
                raise FrameError("the server has not uploaded all of it in time")
            time.sleep(pause)
            pause = min(LATEST, 1.5 * pause)
        return frame_in(incoming.message().content)

    def confirm(self, message: Message) -> None:
        """The SuperLink may forget a request."""
        self._insisting(
            partial(
                self.client.ConfirmMessageReceived,
                ConfirmMessageReceivedRequest(
                    node=self.node,
                    run_id=message.metadata.run_id,
                    message_object_id=message.metadata.message_id,
                ),
            ),
            message,
        )

    def _insisting(self, call: Callable[[], T], message: Message) -> T:
        """What a call returns; a connection that breaks is no reason to give up a message before its time."""
        while True:
            try:
                return call()
            except httpx.TransportError:
                if time.time() > expiry(message):
                    raise
                time.sleep(TROUBLE)

    def reply(self, request: Message, frame: Frame) -> None:
        self.reply_with(request, content_of(frame, Arrays()))

    def reply_with(self, request: Message, content: RecordDict) -> None:
        batch, run = outgoing([Message(content, reply_to=request)]), request.metadata.run_id
        announce = PushMessagesRequest(node=self.node, messages_list=batch.messages, message_object_trees=batch.trees)
        answer = self._insisting(partial(self.client.PushMessages, announce), request)
        for object_id in dict.fromkeys(answer.objects_to_push):
            content_of_it = PushObjectRequest(
                node=self.node,
                run_id=run,
                object_id=object_id,
                object_content=batch.content(object_id),
                session_id=answer.session_id,
            )
            self._insisting(partial(self.transfers.PushObject, content_of_it), request)


def expiry(message: Message) -> float:
    """Until when the server waits for a reply, by its clock."""
    return float(message.metadata.created_at + message.metadata.ttl)


class Relay:
    """Hands requests to the node at a socket, each in a thread of its own, and its replies to the SuperLink."""

    def __init__(self, superlink: FleetConnection, node: Path, largest: int, note: Callable[[str], None]) -> None:
        self.superlink, self.socket, self.largest, self.note = superlink, node, largest, note
        self._has_ended = False
        self._woken = threading.Event()  # something has changed: look at once
        self._lock = threading.Lock()
        self._open = 0  # requests that were not replied to yet
        self._pause = SOONEST
        self._beaten = 0.0  # when the SuperLink last heard of this relay
        self._is_well = True

    def begin(self) -> None:
        """InputError unless the SuperLink is there and knows the key."""
        place, until = self.superlink.place, time.monotonic() + FORGOTTEN
        try:
            while True:
                try:
                    return self.superlink.activate()
                except StillThereError:
                    if time.monotonic() > until:
                        raise InputError(f"another relay with this key is at the SuperLink {place}; end it") from None
                    if until - time.monotonic() > FORGOTTEN - 1:
                        self.note("waiting until the SuperLink has noticed that an earlier relay with this key is gone")
                    time.sleep(1)
        except UnknownKeyError as error:
            if str(error) == "HTTP 401":
                what = f"the SuperLink at {place} does not believe this relay's signature"
                raise InputError(f"{what}; set the clock of this machine (it may be 5 s ahead at most)") from None
            what = f"the SuperLink at {place} does not know this key ({error})"
            raise InputError(f"{what}; have the public key registered there: fedsieve superlink add") from None
        except httpx.HTTPError as error:
            raise InputError(trouble(error, place, self.superlink.authority)) from None

    def run(self) -> None:
        """Until `stop` is called. A SuperLink that is gone is waited for."""
        keep_freed_memory()  # messages come and go
        while not self._has_ended:
            try:
                self._step()
                if not self._is_well:
                    self._is_well = True
                    self.note("the SuperLink is back")
            except (httpx.HTTPError, UnknownKeyError, StillThereError) as error:
                if self._is_well:
                    self.note(f"{trouble(error, self.superlink.place, self.superlink.authority)}; trying again")
                self._is_well = False
                self._woken.wait(TROUBLE)
                with suppress(httpx.HTTPError, UnknownKeyError, StillThereError):
                    self.superlink.activate()
        self.superlink.leave()

    def stop(self) -> None:
        self._has_ended = True
        self._woken.set()

    def called(self) -> str:
        """Which node is at the socket; InputError if there is none."""
        reply = self._asked(Frame({"do": "hello"}), time.time() + HELLO)
        if "name" not in reply.header:
            raise InputError(f"there is no node at {self.socket}; start it first: fedsieve node --folder")
        return f"{str(reply.header['name'])[:100]}: {self.socket}"

    def _step(self) -> None:
        if time.monotonic() - self._beaten > ALIVE / 3:
            self.superlink.beat()
            self._beaten = time.monotonic()
        if (found := self.superlink.next()) is None:
            self._pause = LATEST if self._open else min(LATEST, 1.15 * self._pause)
            self._woken.wait(self._pause)
            self._woken.clear()
            return
        self._pause = SOONEST
        threading.Thread(target=self._serve, args=found, daemon=True).start()

    def _serve(self, message: Message, tree: Any) -> None:
        """One request: to the node, and its reply back. The relay goes on meanwhile, however long that takes."""
        with self._lock:
            self._open += 1
        try:
            self.superlink.reply(message, self._replied(message, tree))
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.FORBIDDEN:  # else the run is over
                self.note(f"a reply could not be sent (HTTP {error.response.status_code})")
        except httpx.HTTPError as error:
            self.note(f"a reply could not be sent ({type(error).__name__}: {str(error)[:200]})")
        finally:
            with self._lock:
                self._open -= 1
            self._pause = SOONEST
            self._woken.set()

    def _replied(self, message: Message, tree: Any) -> Frame:
        """The node's reply to a request, or why it did not get it."""
        try:
            request = self.superlink.content(message, tree, self.largest)
        except FrameError as error:
            self.note(f"a request was refused: {error}")
            return Frame({"refused": f"its relay refuses the request: {error}"})
        finally:
            self.superlink.confirm(message)
        return self._asked(request, expiry(message))

    def _asked(self, request: Frame, until: float) -> Frame:
        """The node's reply; why there is none, if it is gone."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(max(1.0, until - time.time()))
                connection.connect(str(self.socket))
                send(connection, request)
                return receive(connection, self.largest)
        except (OSError, FrameError) as error:
            reason = getattr(error, "strerror", None) or error
            return Frame({"failed": f"the relay does not reach the node ({reason})"})


def trouble(error: Exception, place: str, authority: Path | None) -> str:
    """What is wrong with a connection, and what would be right."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        if "hostname" in str(cause).lower() or "IP address" in str(cause):
            return f"the certificate of {place} is for another name; use a name of `fedsieve superlink make --host`"
        return f"the certificate of {place} is not of the authority in {authority}; get the ca.crt of that server"
    if "WRONG_VERSION_NUMBER" in str(error):
        return f"the SuperLink at {place} does not speak TLS; start it without --insecure"
    if authority is None and "disconnected" in str(error).lower():
        return f"the SuperLink at {place} does not answer, perhaps because it wants TLS; give --ca and --key"
    if isinstance(error, UnknownKeyError):
        return f"the SuperLink at {place} does not know this relay"
    if isinstance(error, httpx.HTTPStatusError):
        return f"the SuperLink at {place} refuses (HTTP {error.response.status_code})"
    said = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    return f"the SuperLink at {place} does not answer ({said}); see that it runs, and that its port can be reached"


def some_key() -> ec.EllipticCurvePrivateKey:
    """For relays where keys play no role."""
    return ec.generate_private_key(CURVE)
