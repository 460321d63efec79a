"""Requests and replies between the server and a node: a header in JSON, and blobs of bytes. Needs neither torch nor
numpy, since the relay at a node has none of them.

    magic "SIEF", length of the header (4 bytes), number of blobs (4), length of each blob (8 each), header, blobs
"""

import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAGIC = b"SIEF"
START, LENGTH = struct.Struct("<4sII"), struct.Struct("<Q")
LARGEST_HEADER, MOST_BLOBS = 1 << 24, 1 << 12
LARGEST = 1 << 34  # bytes of all blobs of a frame, unless the receiver says less
PIECE = 1 << 20

Blob = bytes | bytearray | memoryview


class FrameError(Exception):
    """Bytes that are no frame, or too many of them."""


@dataclass(frozen=True)
class Frame:
    header: dict[str, Any]
    blobs: Sequence[Blob] = field(default_factory=tuple)

    @property
    def size(self) -> int:
        """Bytes of all blobs."""
        return sum(len(blob) for blob in self.blobs)

    def opening(self) -> bytes:
        """All that comes before the blobs."""
        header = json.dumps(self.header, allow_nan=False).encode()
        lengths = b"".join(LENGTH.pack(len(blob)) for blob in self.blobs)
        return START.pack(MAGIC, len(header), len(self.blobs)) + lengths + header


def header_of(text: bytes | bytearray) -> dict[str, Any]:
    """A header that came from elsewhere."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise FrameError("the header is no JSON") from None
    if not isinstance(header, dict):
        raise FrameError("the header is no JSON object")
    return header


def send(connection: socket.socket, frame: Frame) -> None:
    connection.sendall(frame.opening())
    for blob in frame.blobs:
        connection.sendall(blob)


def receive(connection: socket.socket, largest: int = LARGEST) -> Frame:
    """The next frame; FrameError if it is none, or if its blobs are larger than `largest` together."""
    magic, header, blobs = START.unpack(_exactly(connection, START.size))
    if magic != MAGIC or header > LARGEST_HEADER or blobs > MOST_BLOBS:
        raise FrameError("this is no frame")
    lengths = [LENGTH.unpack(_exactly(connection, LENGTH.size))[0] for _ in range(blobs)]
    if sum(lengths) > largest:
        raise FrameError(f"the message has {sum(lengths):,} bytes, and {largest:,} are allowed")
    about = header_of(_exactly(connection, header))
    return Frame(about, [_exactly(connection, length) for length in lengths])


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data, filled = bytearray(min(count, PIECE)), 0
    while filled < count:
        if filled == len(data):  # grown as it comes, so that a length alone takes no memory
            data += bytes(min(count - filled, len(data)))
        with memoryview(data) as view, view[filled:] as rest:
            got = connection.recv_into(rest)
        if not got:
            raise FrameError("the connection was closed in the midst of a message")
        filled += got
    return data
