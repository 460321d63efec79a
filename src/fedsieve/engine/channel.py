"""Messages between processes of one run: small ones through a socket, large arrays through shared memory."""

import json
import mmap
import os
import socket
import struct
import tempfile
from typing import Any

LENGTHS = struct.Struct("<QQ")  # of the text and of the bytes after it
INLINE = 1 << 16  # longer data goes through shared memory, where it is copied once instead of four times


class SharedBuffer:
    """Bytes that grow as needed, in anonymous shared memory: nothing is left of them when the processes end."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _anonymous_file() if fd is None else fd
        self._map: mmap.mmap | None = None

    def view(self, length: int) -> memoryview:
        """The first `length` bytes. Earlier views stay valid when the buffer grows."""
        if self._map is None or len(self._map) < length:
            if os.fstat(self.fd).st_size < length:
                os.ftruncate(self.fd, length)
            self._map = mmap.mmap(self.fd, length)
        return memoryview(self._map)[:length]

    def close(self) -> None:
        """Existing views stay valid."""
        os.close(self.fd)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedsieve")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def send(to: socket.socket, about: dict[str, Any], data: Any = b"", shared: SharedBuffer | None = None) -> None:
    """Send a message; large data goes through `shared`, if it is given."""
    payload = memoryview(data).cast("B")
    if shared is not None and len(payload) > INLINE:
        shared.view(len(payload))[:] = payload
        about, payload = {**about, "shared": len(payload)}, memoryview(b"")
    text = json.dumps(about).encode()
    to.sendall(LENGTHS.pack(len(text), len(payload)) + text)
    if payload:
        to.sendall(payload)


def receive(source: socket.socket, shared: SharedBuffer | None = None) -> tuple[dict[str, Any], Any]:
    """The next message and its data; EOFError if the other process is gone."""
    try:
        text, data = LENGTHS.unpack(_exactly(source, LENGTHS.size))
        about, payload = json.loads(_exactly(source, text)), _exactly(source, data)
    except ConnectionError:
        raise EOFError from None
    if shared is not None and "shared" in about:
        return about, shared.view(about.pop("shared"))
    return about, payload


def _exactly(source: socket.socket, length: int) -> bytearray:
    received = bytearray(length)
    rest = memoryview(received)
    while rest:
        count = source.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return received
