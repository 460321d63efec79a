"""A reader of messages in plain Python, written from docs/wire.md alone, to check that page and the fast reader."""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import xxhash
import zstandard

KINDS = [None, "update", "broadcast", "request", "scores", "mask", "loss", "keys"]
WIDTHS = [0, 4, 2, 2, 1, 8, 8]
NONE, FLOAT32, FLOAT16, BFLOAT16, INT8, FLOAT64, INT64 = range(7)


class SlowVector(NamedTuple):
    positions: int
    type: int
    bits: list[int] | None  # one for each weight
    values: list[float]


class SlowMessage(NamedTuple):
    kind: str | None
    fingerprint: bytes
    numbers: dict[str, float]
    vectors: dict[str, SlowVector]


def read(data: bytes, extents: dict[str, tuple[int, int, int]], known: dict[str, bytes], redraw: Any) -> SlowMessage:
    """`extents` are each vector's weights, size and roundable entries; `known` and `redraw` give packed masks."""
    magic, version, kind, zero, fingerprint, length, numbers, vectors = struct.unpack("<4sHBB16sQII", data[:40])
    assert (magic, version, zero, length) == (b"SIEV", 1, 0, len(data))
    assert struct.unpack("<Q", data[-8:])[0] == xxhash.xxh3_64(data[:-8]).intdigest()
    at = 40
    found_numbers = {}
    for _ in range(numbers):
        number, name_length = struct.unpack("<dB", data[at : at + 9])
        found_numbers[data[at + 9 : at + 9 + name_length].decode()] = number
        at += 9 + name_length
    at = padded(data, at)
    found_vectors = {}
    for _ in range(vectors):
        head = struct.unpack("<BBBBIQQ", data[at : at + 24])
        at += 24
        assert head[4] == 0
        name = data[at : at + head[3]].decode()
        at = padded(data, at + head[3])
        positions = data[at : at + head[5]]
        at = padded(data, at + head[5])
        values = data[at : at + head[6]]
        at = padded(data, at + head[6])
        weights, size, may_be_rounded = extents[name]
        bits = read_positions(head[0], positions, weights, known.get(name), redraw)
        count = 0 if head[1] == NONE else size if bits is None else sum(bits) + size - weights
        read_out = read_values(head[1], head[2], values, count, size - may_be_rounded)
        found_vectors[name] = SlowVector(head[0], head[1], bits, read_out)
    assert at == len(data) - 8
    return SlowMessage(KINDS[kind], fingerprint, found_numbers, found_vectors)


def padded(data: bytes, at: int) -> int:
    after = (at + 7) // 8 * 8
    assert data[at:after] == bytes(after - at)
    return after


def read_positions(how: int, payload: bytes, weights: int, known: bytes | None, redraw: Any) -> list[int] | None:
    size = (weights + 7) // 8
    if how == 0:
        return None
    if how == 1:
        return [1] * weights
    if how == 2:
        packed = known
        assert payload == struct.pack("<Q", xxhash.xxh3_64(packed).intdigest())
    elif how == 3:
        packed = redraw(struct.unpack("<Q", payload[:8])[0])
        assert payload[8:] == struct.pack("<Q", xxhash.xxh3_64(packed).intdigest())
    elif how == 4:
        packed = payload
    elif how == 5:
        packed = zstandard.ZstdDecompressor().decompress(payload)
    else:
        packed = bytes(read_entropy(payload, size))
    assert packed is not None and len(packed) == size
    unpacked = [packed[i // 8] >> i % 8 & 1 for i in range(8 * size)]
    assert not any(unpacked[weights:])
    return unpacked[:weights]


def read_entropy(payload: bytes, size: int) -> Iterator[int]:
    sizes = [min(8191, size - start) for start in range(0, size, 8191)]
    head = (2 * len(sizes) + 3) // 4 * 4
    counts = struct.unpack(f"<{head // 2}H", payload[:head])
    words = list(struct.unpack(f"<{(len(payload) - head) // 4}I", payload[head:]))
    state = words.pop() if words else 0
    if words:
        state = state * 2**32 + words.pop()
    for count, bytes_in_chunk in zip(counts, sizes, strict=False):
        total = 8 * bytes_in_chunk
        if count in (0, total):
            yield from [255 if count else 0] * bytes_in_chunk
            continue
        frequencies = [
            1 + (2**24 - 256) * count**ones * (total - count) ** (8 - ones) // total**8
            for ones in (bin(byte).count("1") for byte in range(256))
        ]
        frequencies[0] += 2**24 - sum(frequencies)
        for _ in range(bytes_in_chunk):
            quantile = state % 2**24
            byte, below = 0, 0
            while quantile >= below + frequencies[byte]:
                below += frequencies[byte]
                byte += 1
            state = state // 2**24 * frequencies[byte] + quantile - below
            if state < 2**32 and words:
                state = state * 2**32 + words.pop()
            yield byte
    assert state == 0 and not words


def read_values(kind: int, compressed: int, payload: bytes, count: int, exact: int) -> list[float]:
    rounded = kind in (FLOAT16, BFLOAT16, INT8)
    before = 4 * exact if rounded else 0
    end = list(struct.unpack(f"<{before // 4}f", payload[:before]))
    rest, count = payload[before:], count - len(end)
    if compressed:
        rest = zstandard.ZstdDecompressor().decompress(rest)
        width = WIDTHS[kind]
        rest = bytes(rest[byte * count + i] for i in range(count) for byte in range(width)) if width > 1 else rest
    if kind == INT8:
        blocks = (count + 511) // 512
        scales_and_values = struct.unpack(f"<{blocks}f{count}b", rest)
        scales, values = scales_and_values[:blocks], scales_and_values[blocks:]
        return [value * scales[i // 512] for i, value in enumerate(values)] + end
    if kind == BFLOAT16:
        widened = b"".join(b"\0\0" + rest[i : i + 2] for i in range(0, 2 * count, 2))
        return list(struct.unpack(f"<{count}f", widened)) + end
    letter = {NONE: "f", FLOAT32: "f", FLOAT16: "e", FLOAT64: "d", INT64: "q"}[kind]
    return list(struct.unpack(f"<{count}{letter}", rest)) + end
