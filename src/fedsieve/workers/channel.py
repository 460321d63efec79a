"""How processes of one run talk: small messages through a socket, large arrays through memory that both see."""

import json
import mmap
import os
import socket
import struct
import tempfile
from typing import Any

LENGTHS = struct.Struct("<QQ")  # of the text and of the bytes behind it
INLINE = 1 << 16  # longer data goes through shared memory, where it is copied once instead of four times


class SharedBuffer:
    """Bytes that grow as needed, in memory without a name: nothing is left of them when the processes are gone."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _anonymous_file() if fd is None else fd
        self._map: mmap.mmap | None = None

    def view(self, length: int) -> memoryview:
        """The first `length` bytes. A view outlives growth: what it shows is then no longer what others write."""
        if self._map is None or len(self._map) < length:
            if os.fstat(self.fd).st_size < length:
                os.ftruncate(self.fd, length)
            self._map = mmap.mmap(self.fd, length)
        return memoryview(self._map)[:length]

    def close(self) -> None:
        """Views that someone has stay as they are."""
        os.close(self.fd)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedsieve")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def send(to: socket.socket, about: dict[str, Any], data: Any = b"", shared: SharedBuffer | None = None) -> None:
    """A message; its data goes through `shared` if there is one and there is much of it."""
    payload = memoryview(data).cast("B")
    if shared is not None and len(payload) > INLINE:
        shared.view(len(payload))[:] = payload
        about, payload = {**about, "shared": len(payload)}, memoryview(b"")
    text = json.dumps(about).encode()
    to.sendall(LENGTHS.pack(len(text), len(payload)) + text)
    if payload:
        to.sendall(payload)


def receive(source: socket.socket, shared: SharedBuffer | None = None) -> tuple[dict[str, Any], Any]:
    """The next message and its data; EOFError if the other side is gone."""
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
