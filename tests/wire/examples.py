"""Masks, vectors and messages of every kind for the tests of the wire."""

import struct
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
import xxhash
from torch import Tensor

from fedsieve.wire import Encoded, Extent, Layout, Message, Vector, decode, encode, layout_fingerprint

POSITIONS = ("dense", "full", "known", "seed", "bitmap", "runs", "entropy")
TYPES = ("none", "float32", "float16", "bfloat16", "int8", "float64", "int64")
SEED = 2**63 - 25


def some_bits(weights: int, positions: str, random: np.random.Generator) -> Tensor | None:
    """Bits for which these positions are the smallest, or None for dense ones."""
    if positions == "dense":
        return None
    if positions == "full":
        return packed(np.ones(weights, dtype=bool))
    if positions == "runs":
        return packed(np.repeat(random.random(weights // 400 + 1) < 0.5, 400)[:weights])
    return packed(random.random(weights) < (0.04 if positions == "entropy" else 0.5))


def packed(active: np.ndarray) -> Tensor:
    return torch.from_numpy(np.packbits(active, bitorder="little"))


def ones_of(bits: Tensor) -> int:
    return int(np.unpackbits(bits.numpy()).sum())


def some_values(count: int, kind: str, random: np.random.Generator) -> Tensor:
    if kind == "none":
        return torch.empty(0, dtype=torch.uint8)
    if kind in ("float64", "int64"):
        return torch.from_numpy(random.integers(-(2**60), 2**60, count)).to(getattr(torch, kind))
    return torch.from_numpy(random.normal(0, 1e-3, count).astype(np.float32))


@dataclass(frozen=True)
class Example:
    """A message with one vector, and all that its two sides need."""

    message: Message
    layout: Layout
    type: str = "float32"
    compress: bool = False

    @property
    def vector(self) -> Vector:
        return self.message.vectors["delta"]

    def encode(self) -> Encoded:
        wanted = self.type if self.type in ("float16", "bfloat16", "int8") else "float32"
        return encode(self.message, self.layout, wanted, self.compress, torch.Generator().manual_seed(0))

    def decode(self, data: bytes | bytearray | memoryview) -> Message:
        bits = self.vector.bits
        if bits is None:
            return decode(data, self.layout, "update")
        return decode(data, self.layout, "update", {"delta": bits}, lambda seed: bits)


def example(weights: int, tail: int, positions: str, kind: str, compress: bool = False, seed: int = 0) -> Example:
    random = np.random.default_rng(seed)
    bits = some_bits(weights, positions, random)
    count = weights + tail if bits is None else ones_of(bits) + tail
    values = some_values(count, kind, random)
    vector = Vector(values, bits, known=positions == "known", seed=SEED if positions == "seed" else None)
    extent = Extent(weights, weights + tail, rounded=weights + tail // 2)  # half of the tail may be rounded
    layout = Layout(layout_fingerprint([("all", (weights + tail,))]), {"delta": extent})
    return Example(Message("update", {"round": 3.0, "samples": -0.5}, {"delta": vector}), layout, kind, compress)


def all_examples(weights: int = 3000, tail: int = 5) -> list[Example]:
    return [
        example(weights, tail, positions, kind, compress)
        for positions, kind, compress in product(POSITIONS, TYPES, (False, True))
        if (positions, kind) != ("dense", "none")
    ]


def sealed(data: bytearray) -> bytearray:
    """The same with the length and the checksum that a valid message of these bytes would have."""
    if len(data) >= 48:
        struct.pack_into("<Q", data, 24, len(data))
        struct.pack_into("<Q", data, len(data) - 8, xxhash.xxh3_64_intdigest(memoryview(data)[:-8]))
    return data
