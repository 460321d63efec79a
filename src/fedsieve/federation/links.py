"""How the server reaches nodes: requests go out, and replies are taken when they are there."""

import os
import socket
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from fedsieve.errors import InputError
from fedsieve.federation.socket_frames import LARGEST, Frame, FrameError, receive, send

SOCKET = "node.sock"  # in a node's folder


class LinkError(Exception):
    """A request that gets no reply; the message says why."""


class Link(Protocol):
    binds_names: bool  # whether a node's address is the name that it has to tell
    largest: int  # bytes of a reply; longer ones are refused

    def nodes(self) -> list[str]:
        """The addresses of all nodes that can be reached now."""

    def push(self, node: str, request: Frame, seconds: float) -> str:
        """Send a request that is worthless after so many seconds; returns its number."""

    def pull(self, requests: Iterable[str]) -> Mapping[str, Frame | LinkError]:
        """Those replies to these requests that are there, each of them once; waits a little if there is none."""

    def drop(self, requests: Iterable[str]) -> None:
        """Nobody waits for these replies any more."""

    def close(self) -> None: ...


@contextmanager
def needs_flower(what: str) -> Iterator[None]:
    """InputError if Flower is not installed, when it is imported; it reports to nobody."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    try:
        yield
    except ImportError as error:
        reason = f"{what} needs Flower 1.41, which is not installed ({error})"
        raise InputError(f"{reason}; pip install 'fedsieve[flower]'") from None


class SocketLink:
    """Nodes on this machine, whose folders lie in one folder. For tests, and to try a federation without Flower."""

    binds_names = False

    def __init__(self, folder: Path) -> None:
        self.folder, self.largest = folder, LARGEST
        self._replies: dict[str, Frame | LinkError] = {}
        self._connections: dict[str, socket.socket] = {}
        self._changed = threading.Condition()

    def nodes(self) -> list[str]:
        return sorted(path.parent.name for path in self.folder.glob(f"*/{SOCKET}") if self._answers(path))

    def _answers(self, path: Path) -> bool:
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
            connection.connect(str(path))
            return True
        return False

    def push(self, node: str, request: Frame, seconds: float) -> str:
        number, connection = uuid.uuid4().hex, socket.socket(socket.AF_UNIX)
        self._connections[number] = connection
        threading.Thread(target=self._ask, args=(number, connection, node, request), daemon=True).start()
        return number

    def _ask(self, number: str, connection: socket.socket, node: str, request: Frame) -> None:
        reply: Frame | LinkError
        try:
            with connection:
                connection.connect(str(self.folder / node / SOCKET))
                send(connection, request)
                reply = receive(connection, self.largest)
        except (OSError, FrameError) as error:
            reply = LinkError(f"it cannot be reached ({getattr(error, 'strerror', None) or error})")
        with self._changed:
            if self._connections.pop(number, None) is not None:
                self._replies[number] = reply
            self._changed.notify_all()

    def pull(self, requests: Iterable[str]) -> Mapping[str, Frame | LinkError]:
        wanted = list(requests)
        with self._changed:
            self._changed.wait_for(lambda: any(number in self._replies for number in wanted), timeout=0.2)
            return {number: self._replies.pop(number) for number in wanted if number in self._replies}

    def drop(self, requests: Iterable[str]) -> None:
        with self._changed:
            for number in requests:
                self._replies.pop(number, None)
                if (connection := self._connections.pop(number, None)) is not None:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.drop([*self._connections])
