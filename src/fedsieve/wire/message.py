"""What crosses the wire: numbers and vectors with names, for a model that both sides know."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("update", "broadcast", "request", "scores", "mask", "loss", "keys")  # numbered from 1 on the wire
NO_VALUES = torch.empty(0, dtype=torch.uint8)


class WireError(Exception):
    """Bytes that are no valid message for their receiver, or a message that cannot be put into bytes."""


@dataclass(frozen=True)
class Extent:
    """How long a vector is, and how many of its first entries masks cover; the rest, its tail, is always sent."""

    weights: int
    size: int
    rounded: int | None = None  # how many of its first entries may be rounded; None: those that masks cover

    @property
    def tail(self) -> int:
        return self.size - self.weights

    @property
    def exact(self) -> int:
        """How many of its last entries are never rounded."""
        return self.size - (self.weights if self.rounded is None else self.rounded)

    @property
    def mask_bytes(self) -> int:
        return (self.weights + 7) // 8


@dataclass(frozen=True)
class Layout:
    """What sender and receiver agree on before the first message."""

    fingerprint: bytes  # 16 bytes, from `layout_fingerprint`
    vectors: Mapping[str, Extent]  # the vectors that may occur, by name


def layout_fingerprint(shapes: Iterable[tuple[str, tuple[int, ...]]], *more: str) -> bytes:
    """The same 16 bytes only for the same names and shapes of tensors, in the same order, and the same `more`."""
    about = json.dumps([[[name, list(shape)] for name, shape in shapes], more])
    return hashlib.blake2b(about.encode(), digest_size=16).digest()


@dataclass(frozen=True, eq=False)
class Vector:
    """The values of a vector's entries at some positions: those of the set bits in order, then those of the tail."""

    values: Tensor = NO_VALUES  # 1-D: float32, or float64 or int64, which are always sent as they are
    bits: Tensor | None = None  # uint8, eight weights a byte, the first in the lowest bit; None: all positions
    known: bool = False  # the receiver has these bits already: only a checksum of them is sent
    seed: int | None = None  # below 2^63; the receiver can draw these bits from it: only it and a checksum are sent
    type: str | None = None  # that the values were sent in, one of `values.TYPES`; of a vector that was decoded


@dataclass(frozen=True, eq=False)
class Message:
    kind: str  # one of KINDS
    numbers: Mapping[str, float]  # may be infinite or not a number: whoever reads them checks
    vectors: Mapping[str, Vector]


@dataclass(frozen=True)
class Encoded:
    """A message's bytes, and how each of its vectors was written, such as "entropy float16"."""

    data: bytearray
    encodings: dict[str, str]
