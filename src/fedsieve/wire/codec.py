"""encode(message) and decode(bytes): the frame around numbers and vectors."""

import struct
import warnings
from collections.abc import Container, Mapping
from dataclasses import replace

import numpy as np
import torch
import xxhash
from torch import Tensor

from fedsieve.wire.message import KINDS, Encoded, Extent, Layout, Message, Vector, WireError
from fedsieve.wire.positions import ENCODINGS, Redraw, active, decode_positions, encode_positions
from fedsieve.wire.values import TYPES, decode_values, encode_values, type_of

MAGIC, VERSION = b"SIEV", 1
HEADER = struct.Struct("<4sHBB16sQII")  # magic, version, kind, 0, fingerprint, length, numbers, vectors
NUMBER = struct.Struct("<dB")  # value, length of the name
VECTOR = struct.Struct("<BBBBIQQ")  # positions, type, compressed, length of the name, 0, bytes of positions and values
CHECKSUM = struct.Struct("<Q")  # xxh3_64 of all bytes before it


def encode(
    message: Message,
    layout: Layout,
    values: str = "float32",
    compress: bool = False,
    generator: torch.Generator | None = None,
) -> Encoded:
    """Put a message into bytes, its float32 values in the type `values`.

    float16 and bfloat16 round to the nearest; int8 rounds at random, by `generator`, and is right on average.
    `compress` packs values without loss where that makes them smaller. WireError if a value does not fit its type.
    """
    pieces, length, encodings = _pieces(message, layout, values, compress, generator)
    data = bytearray().join(pieces)  # the only copy of dense float32 values
    CHECKSUM.pack_into(data, length - CHECKSUM.size, _checksum(data))
    return Encoded(data, encodings)


def encoded_length(message: Message, layout: Layout, compress: bool = False) -> int:
    """How many bytes `encode` makes of a message, where nobody is there to read them."""
    return _pieces(message, layout, "float32", compress, None)[1]


def _pieces(
    message: Message, layout: Layout, values: str, compress: bool, generator: torch.Generator | None
) -> tuple[list[bytes | memoryview], int, dict[str, str]]:
    """What a message consists of, its checksum still to be filled in; its length; and how each vector was written."""
    if message.kind not in KINDS:
        raise WireError(f"{message.kind} is no kind of message: {', '.join(KINDS)}")
    pieces: list[bytes | memoryview] = [b""]  # the header's place
    named = ((_name(name), number) for name, number in message.numbers.items())
    pieces.append(_padded(b"".join(NUMBER.pack(number, len(name)) + name for name, number in named)))
    encodings = {}
    for name, vector in message.vectors.items():
        if name not in layout.vectors:
            raise WireError(f"there is no vector {name} in the layout")
        encodings[name] = _encode_vector(pieces, name, vector, layout.vectors[name], values, compress, generator)
    pieces.append(bytes(CHECKSUM.size))
    length = HEADER.size + sum(map(len, pieces))
    counts = len(message.numbers), len(message.vectors)
    pieces[0] = HEADER.pack(MAGIC, VERSION, KINDS.index(message.kind) + 1, 0, layout.fingerprint, length, *counts)
    return pieces, length, encodings


def _encode_vector(
    pieces: list[bytes | memoryview],
    name: str,
    vector: Vector,
    extent: Extent,
    wanted: str,
    compress: bool,
    generator: torch.Generator | None,
) -> str:
    """Append a vector; how it was written."""
    kind = type_of(vector.values, wanted)
    encoding, positions = encode_positions(vector, extent)
    count = _count(vector.bits, extent, kind)
    if vector.values.numel() != count:
        raise WireError(f"{name} has {vector.values.numel()} values at {count} positions")
    values, compressed = encode_values(vector.values, kind, extent.exact, compress, generator)
    codes = ENCODINGS.index(encoding), TYPES.index(kind), compressed, len(_name(name))
    length = sum(map(len, values))
    pieces.append(_padded(VECTOR.pack(*codes, 0, len(positions), length) + _name(name)))
    pieces += [positions.data, _padding(len(positions))]
    pieces += [*(piece.data for piece in values), _padding(length)]
    return f"{encoding} {kind}"


def decode(
    data: bytes | bytearray | memoryview,
    layout: Layout,
    kind: str,
    known: Mapping[str, Tensor] | None = None,
    redraw: Redraw | None = None,
) -> Message:
    """The message of the given kind in these bytes, or WireError with the reason why they are not one.

    `known` are the bits of vectors whose positions need not be sent, and `redraw` draws bits from a seed. Positions
    that are said to be known, and are not in `known`, are those of the message's first vector that has any. Values that
    were sent as they are, and plain bitmaps, are views of `data`: copy them before you change them.
    """
    whole = np.frombuffer(data, dtype=np.uint8)
    numbers, vectors = _check_frame(whole, layout, kind)
    if whole.ctypes.data % 8:
        whole = whole.copy()
    reader = _Reader(whole.data[HEADER.size : -CHECKSUM.size])
    found_numbers = _decode_numbers(reader, numbers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that `data` may be read-only: then so are the views
        found_vectors = _decode_vectors(reader, vectors, layout, known or {}, redraw)
    if reader.left:
        raise WireError("the message holds more than its header says")
    return Message(kind, found_numbers, found_vectors)


def _check_frame(data: np.ndarray, layout: Layout, kind: str) -> tuple[int, int]:
    """How many numbers and vectors follow in a message that is whole, and meant for us."""
    if len(data) < HEADER.size + CHECKSUM.size:
        raise WireError(f"the message is cut short: {len(data)} bytes are not even a header")
    magic, version, code, zero, fingerprint, length, numbers, vectors = HEADER.unpack_from(data.data)
    if magic != MAGIC:
        raise WireError("this is no message of fedsieve")
    if version != VERSION:
        raise WireError(f"version {version} is not known; this is version {VERSION}")
    if length != len(data):
        what = "is cut short" if length > len(data) else "has something behind it"
        raise WireError(f"the message {what}: {len(data)} bytes instead of {length}")
    if CHECKSUM.unpack_from(data.data, length - CHECKSUM.size)[0] != _checksum(data.data):
        raise WireError("the message was altered on its way: its checksum is wrong")
    if fingerprint != layout.fingerprint:
        raise WireError("the message belongs to another model or phase")
    if not 1 <= code <= len(KINDS) or zero:
        raise WireError("the message is of no known kind")
    if KINDS[code - 1] != kind:
        raise WireError(f"the message is of kind {KINDS[code - 1]}, where {kind} is expected")
    return numbers, vectors


def _decode_numbers(reader: "_Reader", count: int) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for _ in range(count):
        number, length = reader.unpack(NUMBER)
        numbers[reader.new_name(length, numbers)] = number
    reader.skip_padding()
    return numbers


def _decode_vectors(
    reader: "_Reader", count: int, layout: Layout, known: Mapping[str, Tensor], redraw: Redraw | None
) -> dict[str, Vector]:
    vectors: dict[str, Vector] = {}
    for _ in range(count):
        encoding, kind, compressed, length, zero, positions_length, values_length = reader.unpack(VECTOR)
        name = reader.new_name(length, vectors)
        if name not in layout.vectors:
            raise WireError("the message has a vector that is not in the layout")
        if encoding >= len(ENCODINGS) or kind >= len(TYPES) or compressed > 1 or zero:
            raise WireError(f"{name} is written in a way that is not known")
        reader.skip_padding()
        positions = np.frombuffer(reader.take(positions_length), dtype=np.uint8)
        reader.skip_padding()
        values = np.frombuffer(reader.take(values_length), dtype=np.uint8)
        reader.skip_padding()
        extent = layout.vectors[name]
        before = next((one.bits for one in vectors.values() if one.bits is not None), None)
        found = decode_positions(ENCODINGS[encoding], positions, extent, known.get(name, before), redraw)
        entries = _count(found.bits, extent, TYPES[kind])
        tensor = decode_values(values, TYPES[kind], entries, extent.exact, bool(compressed))
        vectors[name] = replace(found, values=tensor, type=TYPES[kind])
    return vectors


class _Reader:
    """Takes bytes from the front, and no more than there are."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, length: int) -> memoryview:
        if length > self.left:
            raise WireError(f"the message is cut short: {length} bytes should follow where {self.left} do")
        self.at += length
        return self.data[self.at - length : self.at]

    def unpack(self, form: struct.Struct) -> tuple:
        return form.unpack(self.take(form.size))

    def new_name(self, length: int, others: Container[str]) -> str:
        try:
            name = bytes(self.take(length)).decode()
        except UnicodeDecodeError as error:
            raise WireError("a name in the message is not UTF-8") from error
        if name in others:  # said at once: each repetition would cost as much as a vector
            raise WireError(f"{name!r} is in the message twice")
        return name

    def skip_padding(self) -> None:
        if any(self.take(-self.at % 8)):  # the header is a multiple of 8 long
            raise WireError("the message has something where nothing should be")


def _count(bits: Tensor | None, extent: Extent, kind: str) -> int:
    """How many values there are at these positions."""
    if kind == "none":
        if bits is None:
            raise WireError("a vector has neither values nor positions")
        return 0
    return extent.size if bits is None else active(bits.cpu().numpy()) + extent.tail


def _name(name: str) -> bytes:
    encoded = name.encode()
    if len(encoded) > 255:
        raise WireError(f"the name {name} is too long")
    return encoded


def _padded(data: bytes) -> bytes:
    return data + _padding(len(data))


def _padding(length: int) -> bytes:
    """Zeros up to the next multiple of 8 bytes, so that what follows can be read in place."""
    return bytes(-length % 8)


def _checksum(data: bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(memoryview(data)[: -CHECKSUM.size])
