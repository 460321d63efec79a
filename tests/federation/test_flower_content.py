"""Frames as Flower's messages: they come back as they were, and what is no message is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.federation.socket_frames import Frame, FrameError

flwr = pytest.importorskip("flwr", reason="needs Flower: pip install 'fedsieve[flower]'")

from flwr.app import Message, Metadata, RecordDict  # noqa: E402
from flwr.app.message import make_message  # noqa: E402

from fedsieve.federation.flower_content import (  # noqa: E402
    PIECE,
    SMALL,
    TYPE,
    Arrays,
    Incoming,
    content_of,
    frame_in,
    outgoing,
)

HEADERS = st.dictionaries(st.text(), st.none() | st.integers(-(2**53), 2**53) | st.text() | st.lists(st.booleans()))
BLOBS = st.lists(st.one_of(st.binary(max_size=50), st.sampled_from([b"\1" * SMALL, b"\2" * (SMALL + 1)])), max_size=4)


def message_of(content: RecordDict) -> Message:
    about = Metadata(1, "", 2, 3, "", "", 100.0, 10.0, TYPE)
    return make_message(about, content)


def pulled(tree: Any, get: Callable[[str], bytes | None], largest: int) -> Message | None:
    """As relay and server do; None if an object is not there."""
    incoming = Incoming(tree, largest)
    for one in incoming.missing():
        if (content := get(one)) is None:
            return None
        incoming.put(one, content)
    return incoming.message()


def stored(message: Message) -> tuple[Any, dict[str, bytes]]:
    """The tree of a message, and its objects as the SuperLink stores them."""
    batch = outgoing([message])
    return batch.trees[0], {one: batch.content(one) for one in batch.objects}


@given(HEADERS, BLOBS)
def test_a_frame_comes_back_as_it_was(header: dict, blobs: list[bytes]) -> None:
    tree, objects = stored(message_of(content_of(Frame(header, blobs), Arrays())))
    message = pulled(tree, objects.get, 1 << 30)
    assert message is not None
    frame = frame_in(message.content)
    assert (frame.header, [bytes(one) for one in frame.blobs]) == (header, blobs)


def test_large_blobs_are_stored_once_for_all_nodes() -> None:
    blob, arrays = bytes(2 * PIECE), Arrays()
    batch = outgoing([message_of(content_of(Frame({"node": node}, [blob]), arrays)) for node in range(3)])
    assert sum(len(batch.content(one)) for one in batch.objects) < 2 * PIECE  # the two pieces are equal, too
    assert len(batch.messages) == len({message.metadata.message_id for message in batch.messages}) == 3
    assert not any(message.content.items for message in batch.messages)


def test_a_small_message_that_would_become_a_large_one_is_refused() -> None:
    """One piece may stand in an array any number of times."""
    tree, objects = stored(message_of(content_of(Frame({}, [bytes(50 * PIECE)]), Arrays())))
    assert sum(map(len, objects.values())) < 2 * PIECE
    with pytest.raises(FrameError, match="more than the 1,000,000 bytes that are allowed"):
        pulled(tree, objects.get, 1_000_000)


def test_what_is_longer_than_allowed_is_not_fetched() -> None:
    blob = b"".join(bytes([number]) * PIECE for number in range(40))
    tree, objects = stored(message_of(content_of(Frame({}, [blob]), Arrays())))
    fetched = list[str]()

    def get(one: str) -> bytes:
        fetched.append(one)
        return objects[one]

    with pytest.raises(FrameError, match="parts, which is more than"):
        pulled(tree, get, 1_000_000)
    assert not fetched
    with pytest.raises(FrameError, match="more than the 130,000,000 bytes"):
        pulled(tree, get, 130_000_000)
    assert len(fetched) < 35


def test_an_object_that_is_not_there() -> None:
    tree, objects = stored(message_of(content_of(Frame({}, [b"1" * (SMALL + 1)]), Arrays())))
    for missing in objects:
        assert pulled(tree, {name: one for name, one in objects.items() if name != missing}.get, 1 << 30) is None


@given(st.data())
def test_damaged_objects_are_refused(data: st.DataObject) -> None:
    """Or they are read as another frame: whether it is the right one is not known here."""
    tree, objects = stored(message_of(content_of(Frame({"a": 1}, [b"1" * 9, b"2" * (SMALL + 1)]), Arrays())))
    victim = data.draw(st.sampled_from(sorted(objects)))
    damaged = bytearray(objects[victim])
    how = data.draw(st.sampled_from(["flip", "cut", "other"]))
    if how == "flip":
        damaged[data.draw(st.integers(0, min(300, len(damaged) - 1)))] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
    else:
        damaged = bytearray(objects[data.draw(st.sampled_from(sorted(objects)))])
    try:
        message = pulled(tree, {**objects, victim: bytes(damaged)}.get, 1 << 30)
        assert message is not None
        frame = frame_in(message.content)
        assert json.dumps(frame.header) and all(len(one) < 10**6 for one in frame.blobs)
    except FrameError:
        pass
