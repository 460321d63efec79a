"""docs/wire.md is enough to read a message: a reader that was written from it finds the same as decode."""

import pytest
import torch
from examples import POSITIONS, SEED, TYPES, Example, all_examples, example
from slow_reader import SlowMessage, read


def read_slowly(sent: Example, data: bytes) -> SlowMessage:
    extents = {
        name: (extent.weights, extent.size, extent.size - extent.exact) for name, extent in sent.layout.vectors.items()
    }
    bits = b"" if sent.vector.bits is None else sent.vector.bits.numpy().tobytes()
    return read(data, extents, {"delta": bits}, lambda seed: bits if seed == SEED else None)


@pytest.mark.parametrize("sent", [*all_examples(), *all_examples(4, 0), example(70_000, 3, "entropy", "int8")])
def test_both_readers_find_the_same(sent: Example) -> None:
    data = sent.encode().data
    fast, slow = sent.decode(data), read_slowly(sent, bytes(data))
    assert (slow.kind, slow.fingerprint, slow.numbers) == (fast.kind, sent.layout.fingerprint, fast.numbers)
    one, other = fast.vectors["delta"], slow.vectors["delta"]
    values = torch.tensor(other.values, dtype=one.values.dtype)
    assert one.values.numpy().tobytes() == values.numpy().tobytes()
    assert TYPES[other.type] == sent.type
    assert f"{POSITIONS[other.positions]} {sent.type}" == sent.encode().encodings["delta"]
    if one.bits is None:
        assert other.bits is None
    else:
        assert other.bits is not None
        unpacked = [byte >> bit & 1 for byte in one.bits.tolist() for bit in range(8)]
        assert unpacked[: len(other.bits)] == other.bits
        assert not any(unpacked[len(other.bits) :])
