"""`fedsieve superlink start`: Flower's SuperLink at two ports, so that nodes reach only what is meant for nodes.

Flower's own command serves everything at one port, and whoever reaches it may start runs, whose apps the SuperLink
executes, and register keys. Here one port, with TLS, has the API for nodes alone. The other, on the loopback interface,
has all of it, and asks for the secret in the SuperLink's folder. Apps are not executed.
"""

import asyncio
import hmac
import logging
import os
import signal
import socket
import time
from base64 import b64encode
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fedsieve.errors import InputError
from fedsieve.federation.superlink_folder import TOKEN_HEADER, SuperLinkFolder

LOOPBACK = "127.0.0.1"
FOR_NODES = "/v1/fleet/"
PUSH = f"{FOR_NODES}push-messages"
DEEPEST, LARGEST_TREE = 8, 20_000  # a message, its content, a record, an array, a piece of it
LARGEST_BODY = 16 << 20  # bytes of a request; objects come in pieces of 5 MB
MINUTE = 60.0
KEEP_ALIVE = 75  # seconds
OFTEN = 1.0  # seconds between two looks for new keys
HEARTBEAT = 30  # seconds; nodes say their own when they come

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass
class ForNodes:
    """The API for nodes with a registered key, without the rest; a node that sends too much has to wait."""

    app: App
    megabytes: int  # that a node may send in a minute
    names: Mapping[str, str] | None  # of the nodes, by public key as headers have it; None: all may come
    note: Callable[[str], None]
    _sent: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # bytes in this minute, by public key
    _since: float = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        key, size = headers.get(b"flwr-public-key", b"").decode("latin-1"), headers.get(b"content-length", b"")
        if scope["type"] != "http" or not scope["path"].startswith(FOR_NODES):
            return await _refuse(send, 404)
        if self.names is not None and key not in self.names:
            return await _refuse(send, 403)
        if not size.isdigit() or int(size) > LARGEST_BODY:
            return await _refuse(send, 413)
        if time.monotonic() - self._since > MINUTE:
            self._sent.clear()
            self._since = time.monotonic()
        if self._sent[key] > self.megabytes * 1_000_000:
            return await _refuse(send, 429)

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:  # it is that node
                before, limit = self._sent[key], self.megabytes * 1_000_000
                self._sent[key] += int(size) + len(headers) * 64
                if before <= limit < self._sent[key]:
                    name = "a node" if self.names is None else self.names.get(key, "a node")
                    self.note(
                        f"{name} sends more than {self.megabytes} MB in a minute, and is refused until it is over"
                    )
            await send(message)

        body = await _body(receive)
        if scope["path"] == PUSH and not is_reply(body["body"]):
            return await _refuse(send, 403)
        await self.app(scope, _again(body, receive), counted)


@dataclass
class ForServer:
    """Everything, for those who know the secret."""

    app: App
    token: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        told = dict(scope.get("headers", ())).get(TOKEN_HEADER.encode(), b"")
        if scope["type"] != "http" or not hmac.compare_digest(told, self.token.encode()):
            return await _refuse(send, 403)
        await self.app(scope, _again(await _body(receive), receive), send)


async def _body(receive: Receive) -> dict[str, Any]:
    """The body of a request in one piece: each piece would go through a dozen layers of Flower's."""
    pieces, more = list[bytes](), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break  # the connection is closed
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return {"type": "http.request", "body": b"".join(pieces), "more_body": False}


def _again(body: dict[str, Any], receive: Receive) -> Receive:
    """Gives the body, then whatever comes."""
    waiting = [body]

    async def received() -> Any:
        return waiting.pop() if waiting else await receive()

    return received


def is_reply(body: bytes) -> bool:
    """Whether messages that a node pushes are its own, and replies: Flower also takes requests to other nodes."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from google.protobuf.message import DecodeError

    try:
        pushed = PushMessagesRequest.FromString(body)
    except DecodeError:
        return False
    about = [message.metadata for message in pushed.messages_list]
    return all(one.src_node_id == pushed.node.node_id and one.reply_to_message_id for one in about)


def bound_trees(store: Any) -> None:
    """Make Flower treat a message as missing whose tree of objects is deeper or larger than any honest one.

    Nodes may name objects in place of others, and a few kilobytes could unfold to more than fits into memory.
    """
    from flwr.supercore.object_store import NoObjectInStoreError

    unbounded = store.get_object_tree

    def bounded(object_id: str) -> Any:
        ahead, count = [(object_id, 1)], 0
        while ahead:
            one, depth = ahead.pop()
            entry, count = store.store.get(one), count + 1
            if entry is None or depth > DEEPEST or count > LARGEST_TREE:
                raise NoObjectInStoreError(f"the tree of {object_id} is broken, too deep or too large")
            ahead += [(child, depth + 1) for child in entry.child_object_ids]
        return unbounded(object_id)

    store.get_object_tree = bounded


async def _refuse(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": b""})


class SuperLink:
    """Flower's SuperLink, with the keys in a folder registered."""

    def __init__(self, folder: SuperLinkFolder, insecure: bool, megabytes: int, note: Callable[[str], None]) -> None:
        os.environ["FLWR_HOME"] = str((folder.path / "flower").absolute())
        from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, TRANSPORT_TYPE_GRPC_RERE
        from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
        from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
        from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
        from flwr.superlink.config_loader import SuperLinkLifespanConfig
        from flwr.superlink.main import create_app

        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        self.folder, self.insecure, self.note = folder, insecure, note
        self._owner = NOOP_FLWR_AID, NOOP_ACCOUNT_NAME
        self._names: dict[str, str] = {}  # of the nodes that may come, by key as headers have it
        self._numbers: dict[str, int] = {}  # Flower's, of all nodes that ever might, by key
        config = SuperLinkLifespanConfig(
            control_address="",
            health_server_address=None,
            host=LOOPBACK,
            port=0,
            insecure=insecure,
            certificates=None,
            superexec_auth_secret=None,
            authn_plugin=NoOpControlAuthnPlugin(),
            event_log_plugin=None,
            fleet_event_log_plugin=None,
            enable_event_log=False,
            artifact_provider=None,
            enable_supernode_auth=not insecure,
            fleet_api_type=TRANSPORT_TYPE_GRPC_RERE,
            fleet_api_address=None,
            simulation=False,
            ssl_ca_certfile=None,
            ssl_certfile=None,
            ssl_keyfile=None,
            database=FLWR_IN_MEMORY_DB_NAME,
            isolation="process",  # no ServerApp is executed
            runtime_dependency_install=False,
        )
        app = create_app(config, SuperLinkLifespan)
        self._state = app.state.linkstate_factory.state()
        bound_trees(self._state.object_store)
        self.for_nodes = ForNodes(app, megabytes, None if insecure else self._names, note)
        self.for_server = ForServer(app, folder.token)

    def register(self) -> None:
        """Bring Flower's list of nodes in line with the keys in the folder."""
        if self.insecure:  # nodes register themselves
            return
        keys = {b64encode(key).decode(): (name, key) for name, key in self.folder.nodes().items()}
        for key in self._names.keys() - keys.keys():
            self._state.deactivate_node(self._numbers[key])
            self.note(f"{self._names.pop(key)} is not registered any more")
        for key in keys.keys() - self._names.keys():
            name, public = keys[key]
            if key not in self._numbers:  # Flower does not take a key twice
                self._numbers[key] = self._state.create_node(*self._owner, public, HEARTBEAT, name=name)
            self._names[key] = name


def serve(
    folder: SuperLinkFolder,
    nodes: tuple[str, int],
    server: int,
    insecure: bool,
    megabytes: int,
    note: Callable[[str], None],
) -> None:
    """Serve nodes at an address, and the server at a port on the loopback interface, until a signal comes."""
    sockets = [_bound(*nodes), _bound(LOOPBACK, server)]
    superlink = SuperLink(folder, insecure, megabytes, note)
    superlink.register()
    asyncio.run(_serve(superlink, sockets, note))


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens; InputError if it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio: no delay, if it says TCP
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(512)
    except OSError as error:
        what = f"cannot listen at {host}:{port} ({error.strerror or error})"
        raise InputError(f"{what}; end what listens there, or use another --host or --port") from None
    return listener


async def _serve(superlink: SuperLink, sockets: list[socket.socket], note: Callable[[str], None]) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # there are two servers, and one handler for both

    common: dict[str, Any] = {"log_config": None, "access_log": False, "timeout_keep_alive": KEEP_ALIVE, "ws": "none"}
    _, certificate, key = superlink.folder.files
    tls = {} if superlink.insecure else {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    servers = [
        Server(uvicorn.Config(superlink.for_nodes, lifespan="off", **tls, **common)),
        Server(uvicorn.Config(superlink.for_server, lifespan="on", **common)),
    ]

    def stop() -> None:
        for one in servers:
            one.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    tasks = [asyncio.create_task(one.serve([listener])) for one, listener in zip(servers, sockets, strict=True)]
    places = [f"{host}:{port}" for host, port, *_ in (one.getsockname() for one in sockets)]
    how = "WITHOUT ENCRYPTION AND AUTHENTICATION" if superlink.insecure else "with TLS"
    note(f"nodes at {places[0]}, {how}; the server at {places[1]}")
    while not any(task.done() for task in tasks):
        superlink.register()
        await asyncio.wait(tasks, timeout=OFTEN, return_when=asyncio.FIRST_COMPLETED)
    stop()
    await asyncio.gather(*tasks)
