"""A federation in this process: real nodes at real sockets, whose jobs are done by whoever waits for their replies."""

import json
import queue
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedsieve.config.schema import Experiment
from fedsieve.engine import node_facts
from fedsieve.experiment import run
from fedsieve.experiment.export_split import export_split
from fedsieve.federation import gathering
from fedsieve.federation.links import LinkError, SocketLink
from fedsieve.federation.node import Node, NodeSetup, Visit
from fedsieve.federation.socket_frames import LENGTH, MAGIC, START, Frame
from fedsieve.observe.callbacks import Callback
from listeners import Listener

Maker = Callable[..., Experiment]
CANARY = cache(node_facts.canary)  # all nodes are on this machine
PHASES = {"head": 0, "all": 1, "edit": 1}
Lie = Callable[[Frame, Frame], Frame | None]


HEADS = [
    "clients.count=4",
    "clients.fraction=1.0",
    "phases=[{name: head, train: head, rounds: 2, local: {steps: 2, lr: 0.05}}]",
]
ESCAPES = "\x1b[31m\nred" + "x" * 10**6


class Closing(tuple[bytes, ...]):
    """What is sent before the connection is closed."""

    def __iter__(self) -> Iterator[bytes]:
        yield from super().__iter__()
        raise ConnectionError


class Bytes(Frame):
    """A reply that is sent as it is: damaged, say. Then the connection is closed."""

    def __init__(self, data: bytes) -> None:
        super().__init__({}, Closing([data]))

    def opening(self) -> bytes:
        return b""


def whole(frame: Frame) -> bytes:
    with suppress(ConnectionError):
        parts = [frame.opening()]
        for blob in frame.blobs:
            parts.append(bytes(blob))
    return b"".join(parts)


def flipped(frame: Frame, place: float) -> Bytes:
    data = bytearray(whole(frame))
    data[int(place * (len(data) - 1))] ^= 0x10
    return Bytes(bytes(data))


def raw(header: bytes, *blobs: bytes) -> Bytes:
    lengths = b"".join(LENGTH.pack(len(blob)) for blob in blobs)
    return Bytes(b"".join((START.pack(MAGIC, len(header), len(blobs)), lengths, header, *blobs)))


def about(**changes: Any) -> Lie:
    return lambda request, reply: Frame({"about": {**reply.header["about"], **changes}}, reply.blobs)


def header(content: Any) -> Lie:
    return lambda request, reply: raw(
        content if isinstance(content, bytes) else json.dumps(content).encode(), *reply.blobs
    )


def no_reply(request: Frame, reply: Frame) -> None:
    """The connection is closed."""


def only(phase: str, round: int, lie: Lie, *, do: str = "train") -> Lie:
    """A lie in one round; the truth in others."""

    def told(request: Frame, reply: Frame) -> Frame | None:
        about = request.header.get("about", {})
        is_it = request.header["do"] == do and (about["phase"], about.get("round", round)) == (PHASES[phase], round)
        return lie(request, reply) if is_it else reply

    return told


class Acting(Listener):
    """Does something after some rounds, counted over all phases."""

    def __init__(self, acts: Mapping[int, Callable[[], object]]) -> None:
        super().__init__()
        self.acts, self.rounds, self.lines = acts, 0, list[dict[str, Any]]()

    def round(self, line: dict) -> None:
        self.rounds += 1
        self.lines.append(line)
        if self.rounds in self.acts:
            self.acts[self.rounds]()


class Bell(queue.Queue[Visit | None]):
    """Requests at a node; whoever waits for replies hears of them."""

    def __init__(self, link: "LinkHere") -> None:
        super().__init__()
        self.link = link

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        with self.link._changed:
            self.link._changed.notify_all()


class LocalNode(Node):
    """A node that counts what it was asked, and may be made to lie: `lie` sees what it would have replied.

    A lie that is None closes the connection.
    """

    lie: Lie | None = None
    is_stuck = False  # takes no request

    def __init__(self, setup: NodeSetup, link: "LinkHere") -> None:
        self.said: list[str] = []
        super().__init__(setup, self.said.append)
        self._visits = Bell(link)
        self.asked: list[Frame] = []
        self.replied: list[Frame] = []

    def _answered(self, request: Frame) -> Frame:
        self.asked.append(request)
        reply = super()._answered(request)
        self.replied.append(reply)
        return reply

    def work(self) -> bool:
        """Answer one request that is there."""
        if self.is_stuck:
            return False
        with suppress(queue.Empty):
            visit = self._visits.get_nowait()
            if visit is not None:
                if not visit.is_given_up:
                    reply = self._answered(visit.request)
                    visit.reply = self.lie(visit.request, reply) if self.lie is not None else reply
                visit.done.set()
            return True
        return False

    def reply_like(self, request: Frame) -> Frame:
        """Its own reply to the same job, once it was asked to do it."""
        while True:
            for asked, reply in zip(reversed(self.asked), reversed(self.replied), strict=True):
                if _job(asked) == _job(request):
                    return reply
            self.work()

    def jobs(self, *names: str) -> list[dict[str, Any]]:
        """What it was asked to do, other than joining."""
        return [one.header["about"] for one in self.asked if one.header.get("do") in names]


def _job(request: Frame) -> list[Any]:
    """What is asked for, whoever is asked."""
    about = request.header.get("about", {})
    return [request.header["do"], *(about.get(key) for key in ("phase", "round", "place"))]


class LinkHere(SocketLink):
    """Nodes in this process. `pull` does their jobs, since torch's settings are those of a thread."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.here: dict[str, LocalNode] = {}
        self._listeners: dict[str, socket.socket] = {}

    def start(self, name: str, data: Path, called: str | None = None, **setup: Any) -> LocalNode:
        """A node in the folder `name`, which calls itself so."""
        node = LocalNode(NodeSetup(called or name, data, self.folder / name, **setup), self)
        listener = self._listeners[name] = socket.socket(socket.AF_UNIX)
        node.listen(listener)
        self.here[name] = node
        return node

    def stop(self, name: str) -> None:
        """As if its process were killed."""
        node, listener = self.here.pop(name), self._listeners.pop(name)
        node.is_stuck, node.lie = False, no_reply
        with listener:
            listener.shutdown(socket.SHUT_RDWR)
        node.setup.socket.unlink()
        while node.work():
            pass
        node.close()

    def pull(self, requests: Iterable[str]) -> Mapping[str, Frame | LinkError]:
        wanted, until = list(requests), time.monotonic() + 0.2
        while time.monotonic() < until:
            while sum(node.work() for node in list(self.here.values())):  # all of them in turn
                until = time.monotonic() + 0.2  # for the replies to arrive
            with self._changed:
                if found := {one: self._replies.pop(one) for one in wanted if one in self._replies}:
                    return found
                waiting = any(not (node.is_stuck or node._visits.empty()) for node in self.here.values())
                if not waiting:
                    self._changed.wait(timeout=max(0.0, until - time.monotonic()))
        return {}


class FederationHere:
    """The data of an experiment at nodes, and runs of it as a simulation and as a federation."""

    def __init__(self, experiment: Maker, place: Path, sockets: Path, backbone: Path) -> None:
        self.experiment, self.place, self.backbone = experiment, place, backbone
        self.link = LinkHere(sockets)

    def export(self, *changes: str) -> Path:
        """Each client's data; the manifest."""
        self.shards = self.place / "shards"
        export_split(self.experiment(*changes), self.shards)
        return self.shards / "federation.json"

    def begin(self, *changes: str, **setup: Any) -> None:
        """Export the data and start all nodes."""
        self.export(*changes)
        for path in sorted(self.shards.glob("client-*.npz")):
            self.start(path.stem, **setup)

    def start(self, name: str, **setup: Any) -> LocalNode:
        return self.link.start(name, self.shards / f"{name}.npz", **{"backbone": str(self.backbone), **setup})

    def again(self, name: str, **setup: Any) -> LocalNode:
        """Kill a node and start it again."""
        self.link.stop(name)
        return self.start(name, **setup)

    def node(self, client: int) -> LocalNode:
        return self.link.here[f"client-{client}"]

    def settings(self, *changes: str, manifest: bool = True, wait: float = 20, timeout: float = 60) -> Experiment:
        where = f"manifest: {self.shards / 'federation.json'}, " if manifest else ""
        engine = f"engine={{sockets: {{folder: {self.link.folder}, {where}wait: {wait}, timeout: {timeout}}}}}"
        return self.experiment(*changes, engine)

    def run(
        self,
        *changes: str,
        out: str = "federated",
        resume: bool = False,
        callback: Callback | None = None,
        **engine: Any,
    ) -> dict[str, Any]:
        return run(self.settings(*changes, **engine), self.place / out, resume, callback or Listener())

    def simulate(self, *changes: str, callback: Callback | None = None) -> dict[str, Any]:
        return run(self.experiment(*changes), self.place / "simulated", callback=callback or Listener())

    def stop(self) -> None:
        for name in list(self.link.here):
            self.link.stop(name)
        self.link.close()


@contextmanager
def federation_here(
    experiment: Maker, place: Path, backbone: Path, patch: pytest.MonkeyPatch
) -> Iterator[FederationHere]:
    """Sockets' names must be short, so they lie in a folder of their own."""
    with ExitStack() as stack:
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nodes")))
        federation = FederationHere(experiment, place, sockets, backbone)
        stack.callback(federation.stop)
        patch.setattr(gathering, "link_for", lambda settings, note: federation.link)
        patch.setattr(node_facts, "canary", CANARY)
        yield federation


def told_by(federation: FederationHere, *changes: str) -> Acting:
    """A run of heads; its lines and warnings."""
    listener, began = Acting({}), time.monotonic()
    federation.run(*HEADS, *changes, callback=listener)
    assert time.monotonic() - began < 20
    return listener
