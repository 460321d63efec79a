"""Masks in about as many bits as their entropy.

The bytes of a mask are coded as if all its bits were independent, each 1 with the density of the chunk it lies in:
a byte with k ones has the probability p^k (1 - p)^(8 - k). The coder is constriction's ANS coder with words of 32
bits, a state of 64 bits and probabilities in units of 2^-24.
"""

from collections.abc import Iterator
from typing import Any

import constriction
import numpy as np

from fedsieve.wire.message import WireError

CHUNK = 8191  # bytes; their number of ones fits 16 bits
UNITS = 2**24  # what the frequencies of all bytes add up to
ONES = np.array([byte.bit_count() for byte in range(256)], dtype=np.uint8)  # in each byte

Coder = constriction.stream.stack.AnsCoder
Model = constriction.stream.model.Categorical


def encode_entropy(bits: np.ndarray) -> np.ndarray:
    """The number of ones in each chunk, then the coder's words."""
    counts = ones_in_chunks(bits)
    coder = Coder()
    for chunk, model in reversed(list(_coded_chunks(counts, len(bits)))):  # the coder is a stack
        coder.encode_reverse(bits[chunk].astype(np.int32), model)
    padded = np.zeros((len(counts) + 1) // 2 * 2, dtype=np.uint16)
    padded[: len(counts)] = counts
    return np.concatenate([padded.view(np.uint8), coder.get_compressed().view(np.uint8)])


def decode_entropy(payload: np.ndarray, size: int) -> np.ndarray:
    """The `size` bytes of a mask."""
    chunks = -(-size // CHUNK)
    head = (chunks + 1) // 2 * 4
    if len(payload) < head:
        raise WireError("a coded mask is cut short")
    counts, padding = np.split(payload[:head].view(np.uint16), [chunks])
    bits = np.zeros(size, dtype=np.uint8)
    for index in np.flatnonzero(counts == _bits_in_chunks(size)):
        bits[index * CHUNK : (index + 1) * CHUNK] = 0xFF
    try:
        coder = Coder(payload[head:].view(np.uint32))
    except ValueError as error:  # the last word is 0, or cut short
        raise WireError("a coded mask is damaged") from error
    for chunk, model in _coded_chunks(counts, size):
        bits[chunk] = coder.decode(model, len(bits[chunk]))
    if padding.any() or not coder.is_empty() or (ones_in_chunks(bits) != counts).any():
        raise WireError("a coded mask is damaged")
    return bits


def ones_in_chunks(bits: np.ndarray) -> np.ndarray:
    if not len(bits):
        return np.zeros(0, dtype=np.int64)
    return np.add.reduceat(ONES[bits], np.arange(0, len(bits), CHUNK), dtype=np.int64)


def _bits_in_chunks(size: int) -> np.ndarray:
    return 8 * np.minimum(CHUNK, size - np.arange(0, size, CHUNK))


def _coded_chunks(counts: np.ndarray, size: int) -> Iterator[tuple[slice, Any]]:
    """Where the chunks that need to be coded lie, and the probabilities of their bytes."""
    for index, (ones, total) in enumerate(zip(counts.tolist(), _bits_in_chunks(size).tolist(), strict=True)):
        if 0 < ones < total:
            # constriction gives each symbol one unit and shares out the rest in proportion; as these numbers add up
            # to that rest, nothing is left to rounding.
            model = Model((frequencies(ones, total) - 1).astype(np.float64), perfect=False)
            yield slice(index * CHUNK, (index + 1) * CHUNK), model


def frequencies(ones: int, total: int) -> np.ndarray:
    """Of each byte, in units of 2^-24, where `ones` of `total` bits are set.

    f(byte) = 1 + floor((2^24 - 256) ones^k (total - ones)^(8 - k) / total^8) with k the ones in the byte, computed
    in integers so that all machines agree; what is lost by rounding down goes to byte 0.
    """
    zeros, whole = total - ones, total**8
    by_ones = [1 + (UNITS - 256) * ones**k * zeros ** (8 - k) // whole for k in range(9)]
    found: np.ndarray = np.array(by_ones, dtype=np.int64)[ONES]
    found[0] += UNITS - found.sum()
    return found
