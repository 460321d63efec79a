"""Which entries of a vector are sent: nothing, a checksum or a seed where that suffices, else the smallest of three."""

from collections.abc import Callable

import numpy as np
import torch
import xxhash
from torch import Tensor

from fedsieve.wire.entropy import ONES, decode_entropy, encode_entropy
from fedsieve.wire.frames import compress, decompress
from fedsieve.wire.message import Extent, Vector, WireError

ENCODINGS = ("dense", "full", "known", "seed", "bitmap", "runs", "entropy")  # numbered from 0 on the wire
Redraw = Callable[[int], Tensor]


def encode_positions(vector: Vector, extent: Extent) -> tuple[str, np.ndarray]:
    """The name of the encoding, and its bytes."""
    nothing = np.zeros(0, dtype=np.uint8)
    if vector.bits is None:
        if vector.known or vector.seed is not None:
            raise WireError("positions that the receiver knows or draws are checked against bits: give them")
        return "dense", nothing
    bits = _checked(vector.bits, extent)
    if vector.known and vector.seed is not None:
        raise WireError("positions are either known to the receiver or drawn from a seed, not both")
    if vector.known:
        return "known", _words(_checksum(bits))
    if vector.seed is not None:
        if not 0 <= vector.seed < 2**63:
            raise WireError("a seed of positions has 63 bits")
        return "seed", _words(vector.seed, _checksum(bits))
    if active(bits) == extent.weights:
        return "full", nothing
    candidates = {"bitmap": bits, "runs": compress(bits), "entropy": encode_entropy(bits)}
    return min(candidates.items(), key=lambda candidate: len(candidate[1]))  # of equal ones, the simplest


def decode_positions(
    encoding: str,
    payload: np.ndarray,
    extent: Extent,
    known: Tensor | None,
    redraw: Redraw | None,
) -> Vector:
    """A vector of these positions that has no values yet."""
    expected = {"dense": 0, "full": 0, "known": 8, "seed": 16, "bitmap": extent.mask_bytes}.get(encoding, len(payload))
    if len(payload) != expected:
        raise WireError(f"{encoding} positions take {expected} bytes, not {len(payload)}")
    if encoding == "dense":
        return Vector()
    if encoding == "full":
        return Vector(bits=torch.from_numpy(_all_ones(extent)))
    if encoding == "known":
        if known is None:
            raise WireError("positions are said to be known, but they are not known here")
        return Vector(bits=_verified(known, extent, payload), known=True)
    if encoding == "seed":
        seed = int(payload[:8].view(np.uint64)[0])
        if redraw is None or seed >= 2**63:
            raise WireError("positions are to be drawn from a seed, which cannot be done here")
        return Vector(bits=_verified(redraw(seed), extent, payload[8:]), seed=seed)
    if encoding == "runs":
        payload = decompress(payload, extent.mask_bytes).copy()  # to be written to
    elif encoding == "entropy":
        payload = decode_entropy(payload, extent.mask_bytes)
    bits = torch.from_numpy(payload)
    _checked(bits, extent)
    return Vector(bits=bits)


def active(bits: np.ndarray) -> int:
    """How many bits are set."""
    return int(ONES[bits].sum(dtype=np.int64))


def _checked(bits: Tensor, extent: Extent) -> np.ndarray:
    if bits.dtype != torch.uint8 or bits.shape != (extent.mask_bytes,):
        raise WireError(f"the bits of {extent.weights} weights are {extent.mask_bytes} bytes")
    found = bits.cpu().contiguous().numpy()
    if extent.weights % 8 and found[-1] >> extent.weights % 8:
        raise WireError("a bit behind the last weight is set")
    return found


def _verified(bits: Tensor, extent: Extent, checksum: np.ndarray) -> Tensor:
    if not np.array_equal(_words(_checksum(_checked(bits, extent))), checksum):
        raise WireError("the positions that are known or drawn here are not those of the sender")
    return bits


def _checksum(bits: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(bits.data)


def _words(*words: int) -> np.ndarray:
    return np.array(words, dtype=np.uint64).view(np.uint8)


def _all_ones(extent: Extent) -> np.ndarray:
    bits = np.full(extent.mask_bytes, 0xFF, dtype=np.uint8)
    if extent.weights % 8:
        bits[-1] = (1 << extent.weights % 8) - 1
    return bits
