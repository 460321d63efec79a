"""Tensors as plain bytes with a type and a shape, which travel between machines without being copied or unpickled."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorBytes:
    bytes: np.ndarray
    type: str
    shape: tuple[int, ...]


def to_bytes(tensor: Tensor) -> TensorBytes:
    data = tensor.detach().cpu().contiguous()
    kind = str(tensor.dtype).removeprefix("torch.")
    return TensorBytes(data.reshape(-1).view(torch.uint8).numpy(), kind, tuple(tensor.shape))


def from_bytes(packed: TensorBytes, is_own: bool = False) -> Tensor:
    """A view of the bytes, which must not be written to; or (`is_own`) a tensor of its own."""
    kind: torch.dtype = getattr(torch, packed.type)
    if not len(packed.bytes):
        return torch.empty(packed.shape, dtype=kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the bytes are read-only, which is as it should be
        tensor = torch.from_numpy(packed.bytes.copy() if is_own else packed.bytes)
    return tensor.view(kind).view(packed.shape)


def all_to_bytes(tensors: Mapping[str, Tensor]) -> dict[str, TensorBytes]:
    return {name: to_bytes(tensor) for name, tensor in tensors.items()}


def all_from_bytes(packed: Mapping[str, TensorBytes], is_own: bool = False) -> dict[str, Tensor]:
    return {name: from_bytes(one, is_own) for name, one in packed.items()}
