"""Frames over a socket: what was sent arrives, and anything else is refused without taking memory for it."""

import json
import resource
import socket
import threading
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.federation.socket_frames import (
    LARGEST_HEADER,
    LENGTH,
    MAGIC,
    MOST_BLOBS,
    PIECE,
    START,
    Frame,
    FrameError,
    header_of,
    receive,
    send,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FRAMES = st.builds(Frame, st.dictionaries(st.text(), JSON, max_size=5), st.lists(st.binary(max_size=200), max_size=5))


def written(frame: Frame) -> bytes:
    return b"".join((frame.opening(), *frame.blobs))


def read(data: bytes, largest: int = 1 << 30) -> Frame:
    """The frame in some bytes, after which the connection is closed."""
    here, there = socket.socketpair()

    def push() -> None:
        with there, suppress(OSError):
            there.sendall(data)

    sender = threading.Thread(target=push)
    sender.start()
    try:
        with here:
            here.settimeout(20)
            return receive(here, largest)
    finally:
        sender.join()


def fields(frame: Frame) -> tuple[dict[str, Any], list[bytes]]:
    return frame.header, [bytes(blob) for blob in frame.blobs]


@given(FRAMES)
def test_what_was_sent_arrives(frame: Frame) -> None:
    found = read(written(frame))
    assert fields(found) == fields(frame) and found.size == frame.size


@given(st.lists(FRAMES, min_size=2, max_size=4))
def test_several_on_one_connection(frames: list[Frame]) -> None:
    here, there = socket.socketpair()
    with here, there:
        for frame in frames:
            send(there, frame)
        assert [fields(receive(here)) for _ in frames] == [fields(frame) for frame in frames]


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 7])
def test_long_blobs(size: int) -> None:
    blob = bytes(range(251)) * (size // 251 + 1)
    frame = Frame({}, [memoryview(blob)[:size], b"", bytearray(b"end")])
    assert fields(read(written(frame))) == fields(frame)


@given(FRAMES, st.data())
def test_a_frame_that_is_cut(frame: Frame, data: st.DataObject) -> None:
    whole = written(frame)
    place = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(FrameError, match="the connection was closed in the midst of a message"):
        read(whole[:place])


@given(FRAMES, st.data())
def test_any_changed_byte_is_read_or_refused(frame: Frame, data: st.DataObject) -> None:
    whole = bytearray(written(frame))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read(bytes(whole), largest=10**6)
    except FrameError as error:
        assert str(error).isprintable()
    else:
        assert isinstance(found.header, dict)


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(FrameError):
        read(noise)


LIMITS = {
    "header": START.pack(MAGIC, LARGEST_HEADER + 1, 0),
    "blobs": START.pack(MAGIC, 2, MOST_BLOBS + 1),
    "one blob": START.pack(MAGIC, 2, 1) + LENGTH.pack(1001) + b"{}",
    "all blobs": START.pack(MAGIC, 2, 2) + LENGTH.pack(600) + LENGTH.pack(600) + b"{}",
    "more than a number holds": START.pack(MAGIC, 2, 3) + 3 * LENGTH.pack(2**64 - 1) + b"{}",
}


@pytest.mark.parametrize("opening", LIMITS.values(), ids=LIMITS.keys())
def test_limits(opening: bytes) -> None:
    with pytest.raises(FrameError, match=r"this is no frame|bytes, and 1,000 are allowed"):
        read(opening + bytes(2000), largest=1000)


def test_a_frame_as_large_as_allowed() -> None:
    frame = Frame({"a": 1}, [bytes(400), bytes(600)])
    assert fields(read(written(frame), largest=1000)) == fields(frame)


def test_a_length_alone_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for opening in (
        START.pack(MAGIC, LARGEST_HEADER, 0) + b"{",
        START.pack(MAGIC, 2, 1) + LENGTH.pack(2**40) + b"{}" + bytes(PIECE),
    ):
        with pytest.raises(FrameError, match="in the midst"):
            read(opening, largest=2**41)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # KiB


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff", b"[" * 10**5, b"9" * 10**5, b'{"a":}']
)
def test_a_header_that_is_none(text: bytes) -> None:
    with pytest.raises(FrameError, match="the header is no JSON"):
        header_of(text)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_does_not_have_are_not_sent(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Frame({"loss": number}).opening()
    assert json.loads(Frame({"loss": 1.5}).opening()[START.size :]) == {"loss": 1.5}
