"""The values of a vector in the type they are sent in, smaller by rounding or by lossless compression."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedsieve.wire.frames import compress, decompress
from fedsieve.wire.message import NO_VALUES, WireError

TYPES = ("none", "float32", "float16", "bfloat16", "int8", "float64", "int64")  # numbered from 0 on the wire
EXACT = {torch.float32: "float32", torch.float64: "float64", torch.int64: "int64"}  # types of a vector's values
DTYPES = {name: dtype for dtype, name in EXACT.items()} | {"float16": torch.float16, "bfloat16": torch.bfloat16}
ROUNDED = ("float16", "bfloat16", "int8")  # of float32; what stays exact goes before them
BLOCK = 512  # int8 values that share a scale
TINY = torch.finfo(torch.float32).tiny


def type_of(values: Tensor, wanted: str) -> str:
    """The type that these values are sent in where `wanted` is the one for float32."""
    if wanted not in ("float32", *ROUNDED):
        raise WireError(f"{wanted} is no type for values: choose float32, float16, bfloat16 or int8")
    if values.dtype == torch.uint8 and not values.numel():
        return "none"
    if values.dim() != 1 or values.dtype not in EXACT:
        raise WireError(f"values are 1-D and float32, float64 or int64, not {values.dim()}-D {values.dtype}")
    return wanted if values.dtype == torch.float32 else EXACT[values.dtype]


def encode_values(
    values: Tensor, kind: str, exact: int, small: bool, generator: torch.Generator | None
) -> tuple[list[np.ndarray], bool]:
    """The bytes in one or two pieces, and whether the last is compressed, which it is only where that is smaller."""
    values = values.detach().cpu().contiguous()
    if kind in ROUNDED:
        body, end = values[: len(values) - exact], values[len(values) - exact :]
        pieces = [_bytes(end), _round_to_int8(body, generator) if kind == "int8" else _bytes(_rounded(body, kind))]
    else:
        pieces = [_bytes(values)]
    if small and len(pieces[-1]):
        compressed = compress(_shuffled(pieces[-1], _width(kind)))
        if len(compressed) < len(pieces[-1]):
            return [*pieces[:-1], compressed], True
    return pieces, False


def decode_values(payload: np.ndarray, kind: str, count: int, exact: int, compressed: bool) -> Tensor:
    """`count` values, the last `exact` of them never rounded; a view of the payload where they are as they were."""
    before, body = (4 * exact, count - exact) if kind in ROUNDED else (0, count)
    size = body + 4 * -(-body // BLOCK) if kind == "int8" else body * _width(kind)
    if len(payload) < before or (not compressed and len(payload) != before + size):
        raise WireError(f"{count} values of type {kind} take {before + size} bytes, not {len(payload)}")
    end, rest = payload[:before], payload[before:]
    if compressed:
        rest = _unshuffled(decompress(rest, size), _width(kind))
    if kind == "none":
        return NO_VALUES
    if kind not in ROUNDED:
        return _tensor(rest, kind)
    found = _from_int8(rest, body) if kind == "int8" else _tensor(rest, kind).float()
    return torch.cat([found, _tensor(end, "float32")])


def _bytes(values: Tensor) -> np.ndarray:
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy().view(np.uint8)


def _tensor(data: np.ndarray, kind: str) -> Tensor:
    if kind == "bfloat16":  # which numpy does not know
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(data.view(kind))


def _width(kind: str) -> int:
    return DTYPES[kind].itemsize if kind in DTYPES else 1


def _rounded(values: Tensor, kind: str) -> Tensor:
    rounded = values.to(DTYPES[kind])
    if (rounded.isinf() & values.isfinite()).any():
        raise WireError(f"a value is too large for {kind}")
    return rounded


def _round_to_int8(values: Tensor, generator: torch.Generator | None) -> np.ndarray:
    """A float32 scale for each block, then v / scale rounded up or down at random so that its mean is v / scale."""
    if generator is None:
        raise WireError("int8 rounds at random: give a generator")
    if not values.isfinite().all():
        raise WireError("a value is not finite, which int8 cannot say")
    blocks = F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(1) / 127).clamp_(min=TINY)  # not 0, so that zeros and subnormal values divide, too
    scaled = blocks / scales[:, None]
    below = scaled.floor()
    up = torch.rand(scaled.shape, generator=generator) < scaled - below
    rounded = (below + up).clamp_(-127, 127).to(torch.int8)
    return np.concatenate([_bytes(scales), _bytes(rounded.view(-1)[: len(values)])])


def _from_int8(payload: np.ndarray, count: int) -> Tensor:
    scales, rounded = np.split(payload, [len(payload) - count])
    blocks = F.pad(_tensor(rounded, "int8").float(), (0, -count % BLOCK)).view(-1, BLOCK)
    return (blocks * _tensor(scales, "float32")[:, None]).view(-1)[:count]


def _shuffled(data: np.ndarray, width: int) -> np.ndarray:
    """All first bytes of the values, then all second ones, ...: signs and exponents side by side compress better."""
    return np.ascontiguousarray(data.reshape(-1, width).T).reshape(-1)


def _unshuffled(data: np.ndarray, width: int) -> np.ndarray:
    return data.reshape(width, -1).T.copy().reshape(-1)
