"""Files of tensors that a run reads back: written with a digest, and refused if anything is not as it was written.

They are safetensors. They are written here rather than by the library, which first writes to names of its own that
nobody could tell from other people's files after a kill, and here the digest of the file comes with it.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from xxhash import xxh3_128

from fedsieve.files.atomic import written_atomically

TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


class OtherVersionError(ValueError):
    """A file as another version of fedsieve writes it."""


def save_sealed(path: Path, about: str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and what is to be said about them, with a digest of both."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with written_atomically(path) as partial:
        write_tensors(partial, tensors, {"about": about, "digest": _seal(about, tensors)})


def load_sealed(path: Path) -> tuple[str, dict[str, Tensor]]:
    """Read what `save_sealed` wrote; ValueError if it is not as it was written."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    about = metadata.get("about")
    if about is None and "progress" in metadata:
        raise OtherVersionError(f"{path} was made by another version")
    if about is None or metadata.get("digest") != _seal(about, tensors):
        raise ValueError(f"{path} was altered")
    return about, tensors


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write contiguous tensors of the CPU as safetensors; the digest of the file."""
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that each is aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = xxh3_128()
    parts: list[bytes | memoryview] = [struct.pack("<Q", len(text)), text, *(_bytes(tensors[name]) for name in names)]
    with path.open("wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
    return digest.hexdigest()


def digest_of_file(path: Path) -> str:
    """Of all bytes of a file; of one that is not there or cannot be read it is empty."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, xxh3_128).hexdigest()
    except OSError:
        return ""


def digest_of_tensors(tensors: Iterable[Tensor]) -> str:
    """Of the values of tensors, one after the other."""
    digest = xxh3_128()
    for tensor in tensors:
        digest.update(_bytes(tensor.detach().cpu().contiguous()))
    return digest.hexdigest()


def _seal(about: str, tensors: Mapping[str, Tensor]) -> str:
    digest = xxh3_128(json.dumps(about).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
