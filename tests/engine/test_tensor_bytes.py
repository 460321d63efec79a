"""Tensors that travel as bytes arrive as they were."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from fedsieve.engine.tensor_bytes import TensorBytes, all_from_bytes, all_to_bytes, from_bytes, to_bytes

KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool]


@given(kind=some.sampled_from(KINDS), shape=some.lists(some.integers(0, 4), max_size=3), is_own=some.booleans())
def test_a_round_trip(kind: torch.dtype, shape: list[int], is_own: bool) -> None:
    tensor = (torch.randn(shape) * 3).to(kind)
    back = from_bytes(to_bytes(tensor), is_own)
    assert back.dtype == kind and back.shape == tensor.shape and torch.equal(back, tensor)


def test_what_is_not_contiguous_arrives_in_order() -> None:
    tensors = {"turned": torch.arange(6.0).view(2, 3).T, "part": torch.arange(10)[2::3]}
    for name, back in all_from_bytes(all_to_bytes(tensors)).items():
        assert torch.equal(back, tensors[name])


def test_only_an_own_tensor_may_be_written_to() -> None:
    """Memory that other processes read is read-only, as in the object store."""
    shared = np.frombuffer(bytes(8), np.uint8)
    assert not shared.flags.writeable
    mine = from_bytes(TensorBytes(shared, "float32", (2,)), is_own=True)
    mine += 1
    assert mine.tolist() == [1, 1] and not shared.any()


def test_types_are_those_of_torch_only() -> None:
    with pytest.raises(AttributeError):
        from_bytes(TensorBytes(np.zeros(4, np.uint8), "no such type", (1,)))
