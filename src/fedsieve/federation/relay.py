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
from pathlib import Path

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
from fedsieve.federation.flower_content import Arrays, content_of, frame_in, outgoing, pulled
from fedsieve.federation.keys import CURVE, public_bytes
from fedsieve.federation.socket_frames import Frame, FrameError, receive, send
from fedsieve.files.memory import keep_freed_memory

ALIVE = 10.0  # seconds, in which the SuperLink expects to hear of a relay; the least that Flower allows
FORGOTTEN = 30.0  # seconds, after which the SuperLink knows that a relay is gone that has not said so
SOONEST, LATEST = 0.1, 1.0  # seconds between two looks for requests
UPLOAD = 60.0  # seconds that the server has to upload what it has announced
HELLO = 5.0  # seconds that a node has to say who it is
TROUBLE = 2.0  # seconds between two tries to reach a SuperLink that does not answer


class UnknownKeyError(Exception):
    """The SuperLink does not know this key, or has forgotten that the relay is there."""


class StillThereError(Exception):
    """The SuperLink believes that an earlier relay with this key is there."""


@dataclass
class Superlink:
    """Flower's API for nodes, with this node's key."""

    place: str
    authority: Path | None  # None: neither encryption nor authentication
    public_key: bytes
    client: FleetHttpClient
    node: Node = field(default_factory=Node)  # its number, once it is known

    @staticmethod
    def at(place: str, authority: Path | None, key: ec.EllipticCurvePrivateKey) -> "Superlink":
        """InputError if the authority's file is no certificate."""
        interceptors = [NodeAuthHttpInterceptor(key, key.public_key())]
        try:
            certificate = authority.read_bytes() if authority is not None else None
            client = FleetHttpClient.from_server_address(place, authority is None, certificate, interceptors)
        except (OSError, ValueError) as error:  # of ssl, too
            raise InputError(
                f"--ca {authority} is no certificate ({type(error).__name__}); get the server's ca.crt"
            ) from None
        return Superlink(place, authority, public_bytes(key.public_key()), client)

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

    def next(self, largest: int) -> tuple[Message, Frame | FrameError] | None:
        """The next request: the message, whose content may be left out, and the frame in it, or what is wrong."""
        reply = self.client.PullMessages(PullMessagesRequest(node=self.node))
        if not reply.messages_list:
            return None
        proto, tree = reply.messages_list[0], reply.message_object_trees[0]
        message, run, until = message_from_proto(proto), proto.metadata.run_id, time.monotonic() + UPLOAD

        def content(object_id: str) -> bytes | None:
            pause = SOONEST / 2
            while True:
                got = self.client.PullObject(PullObjectRequest(node=self.node, run_id=run, object_id=object_id))
                if got.object_found and got.object_available:
                    return bytes(got.object_content)
                if not got.object_found or time.monotonic() > until:
                    return None
                time.sleep(pause)
                pause = min(LATEST, 1.5 * pause)

        try:
            whole = pulled(tree, content, largest)
            return message, frame_in(whole.content) if whole is not None else FrameError("it was not uploaded")
        except FrameError as error:
            return message, error
        finally:
            self.client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=proto.metadata.message_id)
            )

    def reply(self, request: Message, frame: Frame) -> None:
        self.reply_with(request, content_of(frame, Arrays()))

    def reply_with(self, request: Message, content: RecordDict) -> None:
        message = Message(content, reply_to=request)
        batch = outgoing([message])
        run = request.metadata.run_id
        answer = self.client.PushMessages(
            PushMessagesRequest(node=self.node, messages_list=batch.messages, message_object_trees=batch.trees)
        )
        for object_id in dict.fromkeys(answer.objects_to_push):
            self.client.PushObject(
                PushObjectRequest(
                    node=self.node,
                    run_id=run,
                    object_id=object_id,
                    object_content=batch.content(object_id),
                    session_id=answer.session_id,
                )
            )


class Relay:
    """Hands requests to the node at a socket, each in a thread of its own, and its replies to the SuperLink."""

    def __init__(self, superlink: Superlink, node: Path, largest: int, note: Callable[[str], None]) -> None:
        self.superlink, self.socket, self.largest, self.note = superlink, node, largest, note
        self._has_ended = False
        self._woken = threading.Event()  # something has changed: look at once
        self._open = 0  # requests at the node
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
        if (found := self.superlink.next(self.largest)) is None:
            self._pause = LATEST if self._open else min(LATEST, 1.15 * self._pause)
            self._woken.wait(self._pause)
            self._woken.clear()
            return
        self._pause = SOONEST
        threading.Thread(target=self._serve, args=found, daemon=True).start()

    def _serve(self, message: Message, request: Frame | FrameError) -> None:
        """One request: to the node, and its reply back."""
        self._open += 1
        try:
            until = message.metadata.created_at + message.metadata.ttl
            if isinstance(request, FrameError):
                self.note(f"a request was refused: {request}")
                reply = Frame({"refused": f"its relay refuses the request: {request}"})
            else:
                reply = self._asked(request, until)
            self.superlink.reply(message, reply)
        except Exception as error:  # of Flower: the run may have ended meanwhile
            self.note(f"a reply could not be sent ({type(error).__name__}: {str(error)[:200]})")
        finally:
            self._open -= 1
            self._pause = SOONEST
            self._woken.set()

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
    if cause is not None or (authority is None and "disconnected" in str(error).lower()):
        how = "does not speak TLS" if authority is not None else "wants TLS"
        right = "start it without --insecure" if authority is not None else "give --ca and --key"
        return f"the SuperLink at {place} {how}; {right}"
    if isinstance(error, UnknownKeyError):
        return f"the SuperLink at {place} does not know this relay"
    if isinstance(error, httpx.HTTPStatusError):
        return f"the SuperLink at {place} refuses (HTTP {error.response.status_code})"
    said = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    return f"the SuperLink at {place} does not answer ({said}); see that it runs, and that its port can be reached"


def some_key() -> ec.EllipticCurvePrivateKey:
    """For relays where keys play no role."""
    return ec.generate_private_key(CURVE)
