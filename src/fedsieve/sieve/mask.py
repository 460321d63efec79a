"""Masks: which weights may change, one bit for each (1 = may change)."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedsieve.errors import InputError
from fedsieve.files.atomic import written_atomically

Shapes = Mapping[str, tuple[int, ...]]  # of the tensors that a mask covers, in the order of its bits
FILE_NAME = "mask.safetensors"  # in a folder that is made for a mask
ONES = np.array([byte.bit_count() for byte in range(256)], dtype=np.uint8)  # in each byte


def shapes_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, ...]]:
    """What a mask for these tensors covers, such as `shapes_of(model.named_parameters())`."""
    return {name: tuple(tensor.shape) for name, tensor in named}


@dataclass(frozen=True, eq=False)
class Mask:
    """One bit per weight of the named tensors, laid one after another; what they do not cover is frozen."""

    shapes: Shapes
    bits: Tensor  # uint8, eight weights a byte, the first in the lowest bit

    def __post_init__(self) -> None:
        if self.bits.dtype != torch.uint8 or self.bits.shape != ((self.size + 7) // 8,):
            raise ValueError(f"a mask of {self.size} weights needs {(self.size + 7) // 8} bytes of bits")
        if self.size % 8 and int(self.bits[-1]) >> self.size % 8:
            raise ValueError("the bits behind the last weight of a mask are 0")  # else they would be counted

    @staticmethod
    def pack(shapes: Shapes, active: Tensor) -> "Mask":
        """From one bool per weight."""
        if active.numel() != (weights := sum(map(_numel, shapes.values()))):
            raise ValueError(f"a mask of {weights} weights cannot be made of {active.numel()} bools")
        return Mask(dict(shapes), packed(active))

    @staticmethod
    def full(shapes: Shapes) -> "Mask":
        return Mask.pack(shapes, torch.ones(sum(map(_numel, shapes.values())), dtype=torch.bool))

    @staticmethod
    def empty(shapes: Shapes) -> "Mask":
        return Mask.pack(shapes, torch.zeros(sum(map(_numel, shapes.values())), dtype=torch.bool))

    def unpack(self) -> Tensor:
        """One bool per weight, of all tensors one after another."""
        return unpacked(self.bits, self.size)

    def __getitem__(self, name: str) -> Tensor:
        """One bool per weight of one tensor, in its shape."""
        start, stop = self.ranges[name]
        return torch.from_numpy(_unpack(self.bits.numpy(), start, stop)).view(self.shapes[name])

    @cached_property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """Where each tensor's weights start and stop."""
        ranges, start = {}, 0
        for name, shape in self.shapes.items():
            ranges[name] = (start, start := start + _numel(shape))
        return ranges

    @cached_property
    def size(self) -> int:
        return sum(map(_numel, self.shapes.values()))

    @cached_property
    def active(self) -> int:
        """How many weights may change."""
        return int(ONES[self.bits.numpy()].sum(dtype=np.int64))

    @cached_property
    def positions(self) -> Tensor:
        """The places of the active weights, ascending."""
        return torch.from_numpy(np.flatnonzero(self.unpack().numpy()))

    @property
    def density(self) -> float:
        return self.active / max(1, self.size)

    @property
    def sparsity(self) -> float:
        return 1 - self.density

    @property
    def digest(self) -> str:
        """A checksum of the shapes and bits."""
        return _digest(self.shapes, self.bits)

    def counts(self) -> dict[str, int]:
        """Active weights of each tensor."""
        active = self.unpack().numpy()
        return {name: int(np.count_nonzero(active[start:stop])) for name, (start, stop) in self.ranges.items()}

    def densities(self) -> dict[str, float]:
        """The active share of each tensor."""
        return {name: count / max(1, _numel(self.shapes[name])) for name, count in self.counts().items()}

    # Sets of weights.

    def __and__(self, other: "Mask") -> "Mask":
        return self._combined(other, torch.bitwise_and)

    def __or__(self, other: "Mask") -> "Mask":
        return self._combined(other, torch.bitwise_or)

    def __xor__(self, other: "Mask") -> "Mask":
        return self._combined(other, torch.bitwise_xor)

    def __sub__(self, other: "Mask") -> "Mask":
        return self & ~other

    def __invert__(self) -> "Mask":
        return self ^ Mask.full(self.shapes)  # so that the bits behind the last weight stay 0

    def __le__(self, other: "Mask") -> bool:
        other.must_fit(self.shapes)
        return not bool((self.bits & ~other.bits).any())  # the bits behind the last weight are 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and _same(self.shapes, other.shapes) and torch.equal(self.bits, other.bits)

    __hash__ = None  # type: ignore[assignment]

    def overlap(self, other: "Mask") -> float:
        """Jaccard index: weights in both over weights in either; 1 for two empty masks."""
        union = (self | other).active
        return (self & other).active / union if union else 1.0

    def overlaps(self, other: "Mask") -> dict[str, float]:
        """The Jaccard index of each tensor."""
        both, either = (self & other).counts(), (self | other).counts()
        return {name: both[name] / either[name] if either[name] else 1.0 for name in self.shapes}

    def _combined(self, other: "Mask", operation: Callable[[Tensor, Tensor], Tensor]) -> "Mask":
        other.must_fit(self.shapes)
        return Mask(self.shapes, operation(self.bits, other.bits))

    def must_fit(self, shapes: Shapes, what: str = "the mask") -> None:
        """InputError that names the first tensor in which the mask and `shapes` differ."""
        for (own, own_shape), (name, shape) in zip(self.shapes.items(), shapes.items(), strict=False):
            if own != name:
                raise InputError(f"{what} belongs to another model or phase: it has {own} where {name} is expected")
            if own_shape != shape:
                sizes = f"{own} is {_times(own_shape)} in it, and {_times(shape)} here"
                raise InputError(f"{what} belongs to another model or phase: {sizes}")
        longer, where = (self.shapes, "here") if len(self.shapes) > len(shapes) else (shapes, "in it")
        if len(self.shapes) != len(shapes):
            extra = list(longer)[min(len(self.shapes), len(shapes))]
            raise InputError(f"{what} belongs to another model or phase: there is no {extra} {where}")

    # Files.

    def save(self, path: str | Path, of: str = "") -> None:
        """Write the mask; `of` says whose it is, for who must not take it for another one."""
        about = {"shapes": self.shapes, "digest": _digest(self.shapes, self.bits, of)} | ({"of": of} if of else {})
        content = save({"bits": self.bits}, metadata={"mask": json.dumps(about)})  # one key: their order is by chance
        with written_atomically(Path(path)) as partial:
            partial.write_bytes(content)

    @staticmethod
    def load(path: str | Path, of: str | None = None) -> "Mask":
        """Read a mask, from its file or the folder that `fedsieve mask` wrote; InputError if it cannot be trusted.

        With `of`, also if it was not saved as that.
        """
        path = Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
        if not path.exists():
            raise InputError(f"{path} does not exist; give a file made by `fedsieve mask`")
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["mask"])
                bits = file.get_tensor("bits").clone()  # not a view of the file
            shapes = {name: tuple(shape) for name, shape in about["shapes"].items()}
            whose = about.get("of", "")
            if _digest(shapes, bits, whose) == about["digest"] and of in (None, whose):
                return Mask(shapes, bits)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError):
            pass
        raise InputError(f"{path} is no mask, or a damaged one; give a file made by `fedsieve mask`")


def packed(active: Tensor) -> Tensor:
    """One bit for each bool, eight a byte, the first in the lowest bit."""
    return torch.from_numpy(np.packbits(active.flatten().cpu().numpy(), bitorder="little"))


def unpacked(bits: Tensor, count: int) -> Tensor:
    """The first `count` bools of packed bits."""
    return torch.from_numpy(_unpack(bits.numpy(), 0, count))


def _unpack(bits: np.ndarray, start: int, stop: int) -> np.ndarray:
    first = start // 8
    unpacked = np.unpackbits(bits[first : (stop + 7) // 8], bitorder="little")
    return unpacked[start - 8 * first : stop - 8 * first].view(np.bool_)


def _numel(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _same(one: Shapes, other: Shapes) -> bool:
    return list(one.items()) == list(other.items())


def bytes_of_file(shapes: Shapes) -> int:
    """About how many bytes the file of a mask takes."""
    return (sum(math.prod(shape) for shape in shapes.values()) + 7) // 8 + len(json.dumps(shapes))


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def _digest(shapes: Shapes, bits: Tensor, of: str = "") -> str:
    digest = hashlib.sha256(json.dumps(shapes).encode() + of.encode())
    digest.update(bits.numpy().data)
    return digest.hexdigest()
