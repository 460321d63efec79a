"""Vectors that the server publishes, in memory shared with all workers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedsieve.engine.channel import SharedBuffer

ALIGNED = 64  # bytes
Place = tuple[int, int, int, str, list[int]]  # a tensor's version, first byte, length in bytes, type and shape


class PublishedVectors:
    """Shared memory for all vectors of a phase. `places` says what lies where, and is sent with each job."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self.buffer = buffer
        self.places: dict[str, Place] = {}
        self._version = self._end = 0

    def write(self, vectors: Mapping[str, Tensor]) -> None:
        """Write vectors at the server. With `model`, a phase begins, and the vectors of the one before are dropped."""
        if "model" in vectors:
            self.places, self._end = {}, 0
        for name, vector in vectors.items():
            data = vector.detach().cpu().reshape(-1).view(torch.uint8)
            _, first, length, _, _ = self.places.get(name, (0, self._end, -1, "", []))
            if length != len(data):
                first, self._end = self._end, self._end + -(-len(data) // ALIGNED) * ALIGNED
            if len(data):
                room = torch.frombuffer(self.buffer.view(self._end), dtype=torch.uint8)
                room[first : first + len(data)] = data
            self._version += 1
            kind = str(vector.dtype).removeprefix("torch.")
            self.places[name] = self._version, first, len(data), kind, list(vector.shape)


class VectorReader:
    """A worker's side: the vectors that are newer than those it has seen, as views of the shared memory."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self.buffer = buffer
        self._seen: dict[str, int] = {}

    def new(self, places: Mapping[str, Place]) -> dict[str, Tensor]:
        found = {name: place for name, place in places.items() if self._seen.get(name) != place[0]}
        self._seen = {name: place[0] for name, place in places.items()}
        return {name: self._view(*place[1:]) for name, place in found.items()}

    def _view(self, first: int, length: int, dtype: str, shape: list[int]) -> Tensor:
        kind = getattr(torch, dtype)
        if not length:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(self.buffer.view(first + length)[first:], dtype=kind).view(shape)
