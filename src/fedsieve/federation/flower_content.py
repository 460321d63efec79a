"""Requests and replies as Flower's messages: their header and small blobs in a ConfigRecord, large blobs as arrays.

Flower stores arrays in pieces, each under a hash of its content, so a blob that goes to all nodes is uploaded once.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.serde import message_to_proto
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    add_header_to_object_body,
    get_all_nested_objects,
    get_object_body,
    get_object_head_values_from_object_content,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedsieve.federation.socket_frames import LARGEST_HEADER, Blob, Frame, FrameError, header_of

ABOUT, LARGE = "frame", "blobs"
TYPE = "query.fedsieve"
SMALL = 1 << 16  # bytes of a blob that needs no object of its own
PIECE = 5 << 20  # of an array, and some more for its head
MOST = 16  # objects of a message besides the pieces of its arrays


class Piece(ArrayChunk):
    """A piece of a blob, which is neither copied nor hashed more than once."""

    @cached_property
    def _head(self) -> bytes:
        return add_header_to_object_body(b"", ArrayChunk(self.data[:0])).replace(b"0", str(len(self.data)).encode())

    @cached_property
    def object_id(self) -> str:
        digest = hashlib.sha256(self._head)
        digest.update(self.data)
        return digest.hexdigest()

    def deflate(self) -> bytes:
        return b"".join((self._head, self.data))


class Arrays:
    """Blobs as Flower's arrays. A blob that goes to many nodes is made into one once."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Blob, Array]] = {}

    def of(self, blob: Blob) -> Array:
        known = self._made.get(id(blob))
        if known is None or known[0] is not blob:
            array, view = Array(dtype="uint8", shape=(len(blob),), stype="bytes", data=b""), memoryview(blob)
            pieces = [Piece(view[first : first + PIECE]) for first in range(0, len(blob), PIECE)]
            array.__dict__["_chunks"] = [(one.object_id, one) for one in pieces]  # Flower would copy them
            known = self._made[id(blob)] = blob, array
        return known[1]

    def clear(self) -> None:
        self._made.clear()


def content_of(frame: Frame, arrays: Arrays) -> RecordDict:
    """A frame as the content of a message."""
    small = [bytes(blob) if len(blob) <= SMALL else b"" for blob in frame.blobs]
    header = json.dumps(frame.header, allow_nan=False).encode()
    content, large = RecordDict({ABOUT: ConfigRecord({"header": header, "small": small})}), ArrayRecord()
    for place, blob in enumerate(frame.blobs):
        if len(blob) > SMALL:
            large[str(place)] = arrays.of(blob)  # one by one: else the record would copy them
    if large:
        content[LARGE] = large
    return content


def frame_in(content: RecordDict) -> Frame:
    """The frame in a message; FrameError if there is none."""
    try:
        header, small = (content.config_records[ABOUT][name] for name in ("header", "small"))
        if not (isinstance(header, bytes) and isinstance(small, list)):
            raise FrameError("the message is no frame")
        blobs: list[Blob] = [bytes(one) for one in small]
        for place, array in content.array_records.get(LARGE, {}).items():
            blobs[int(place)] = array.data
        return Frame(header_of(header), blobs)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise FrameError("the message is no frame") from None


@dataclass
class Outgoing:
    """Messages as they are pushed: themselves without their content, their objects' trees, and the objects by hash."""

    messages: list[Any]
    trees: list[Any]
    objects: dict[str, Any]

    def content(self, object_id: str) -> bytes:
        with no_object_id_recompute():
            return bytes(self.objects[object_id].deflate())


def outgoing(messages: Iterable[Message]) -> Outgoing:
    """Each message gets its id, the hash of all that it holds. What several of them hold is hashed once."""
    found = Outgoing([], [], {})
    with no_object_id_recompute():
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            found.objects |= get_all_nested_objects(message)
            found.trees.append(get_object_tree(message))
            found.messages.append(message_to_proto(remove_content_from_message(message)))
    return found


class Incoming:
    """A message that comes object by object; FrameError if it is damaged, or its blobs have more bytes than allowed."""

    def __init__(self, tree: Any, largest: int) -> None:
        self.id, self.largest = str(tree.object_id), largest
        self._ids = list(dict.fromkeys(one.object_id for one in iterate_object_tree(tree)))
        self._contents: dict[str, bytes] = {}
        self._size = 0
        if len(self._ids) > MOST + 2 * (largest // PIECE + 1):
            what = f"the message has {len(self._ids):,} parts, which is more than {largest:,} bytes would need"
            raise FrameError(what)

    def missing(self) -> list[str]:
        """The objects that are not here yet."""
        return [one for one in self._ids if one not in self._contents]

    def put(self, object_id: str, content: bytes) -> None:
        self._contents[object_id] = bytes(content)
        self._size += len(content)
        if self._size > self.largest + LARGEST_HEADER:
            raise FrameError(f"the message has more than the {self.largest:,} bytes that are allowed")

    def message(self) -> Message:
        """The whole message; to be called once, when nothing is missing."""
        with damage_named():
            arrays = _arrays_in(self._contents, self.largest)
            message = inflate_object_from_contents(self.id, self._contents, objects=arrays)
            if not isinstance(message, Message) or not message.has_content():
                raise FrameError("the message is damaged")
            return message


def _arrays_in(contents: Mapping[str, bytes], largest: int) -> dict[str, Any]:
    """All arrays, made of their pieces, of which one may stand in many places; Flower would copy them twice."""
    found, size = dict[str, Any](), 0
    for object_id, content in contents.items():
        kind, pieces, _ = get_object_head_values_from_object_content(content)
        if kind != Array.__qualname__:
            continue
        places = json.loads(get_object_body(content, Array))["arraychunk_ids"]
        size += sum(len(contents[pieces[place]]) for place in places)
        if size > largest:
            raise FrameError(f"the message has more than the {largest:,} bytes that are allowed")
        bodies = [_body(contents[pieces[place]]) for place in places]
        data = b"".join(bodies)
        found[object_id] = Array(dtype="uint8", shape=(len(data),), stype="bytes", data=data)
    return found


def _body(content: bytes) -> memoryview:
    if not content.startswith(ArrayChunk.__qualname__.encode()):
        raise FrameError("the message is damaged")
    return memoryview(content)[content.index(HEAD_BODY_DIVIDER) + len(HEAD_BODY_DIVIDER) :]


@contextmanager
def damage_named() -> Iterator[None]:
    """Whatever Flower says of bytes that are no message."""
    try:
        yield
    except FrameError:
        raise
    except Exception as error:
        raise FrameError(f"the message is damaged ({type(error).__name__})") from None
