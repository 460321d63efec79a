"""How far the clients of a round drift from the server's weights, and how much their updates conflict.

Updates are measured one by one as they arrive. This takes a few vectors of the size of the model, and one number
per client (its drift).
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedsieve.model.flat import Entry
from fedsieve.sieve.mask import Mask

BLOCK = re.compile(r"(?:backbone\.)?blocks\.(\d+)\.")  # in the names of a ViT's tensors
CHUNK = 1 << 20  # values processed at a time: few enough for the cache, and enough that starting threads costs little
Ranges = list[tuple[int, int]]
Where = slice | Tensor  # positions in the vector: a range, or a list


class Interference:
    """How the updates u_1, u_2, … of a round relate to each other; u_k is the change of client k's weights.

    `add` each, then `finish`, which returns for the whole vector and, with `blocks`, for each block:

    - drift_mean, drift_max (and, for the whole vector, drift: each client's, in order of arrival): |u_k|, the L2 norm
      of the client's weights minus the server's weights that it received;
    - cosine: the mean over pairs of clients of u_i · u_j / (|u_i| |u_j|), see `_Directions`;
    - opposed: among the weights that at least two clients moved, the share that was moved both up and down;
    - agreement: the mean over these weights of |clients that moved it up - clients that moved it down| over
      clients that moved it: 1 if all move each weight the same way. With many clients `opposed` comes close to 1,
      since one client that differs is enough, but agreement still tells rounds apart;
    - mask_overlap: the sum over pairs of clients of |m_i and m_j| over the same sum of |m_i or m_j|, see `_Masks`.

    Undefined measures are None: cosine with fewer than two updates that are not all zero, opposed and agreement if
    there is no such weight, mask_overlap with fewer than two masks.
    """

    def __init__(
        self,
        size: int,
        weights: int,
        blocks: Mapping[str, Ranges] | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        """For vectors of `size` entries: first `weights` parameters, then buffers, which do not count.

        `blocks` are ranges of the vector by name. They must not overlap; a block without parameters is left out.
        """
        self.size = size
        self.weights = weights
        self.device = device
        self.whole = _Directions({"whole": [(0, weights)]}, weights, device)
        self.blocks = None if blocks is None else _Directions(_within(blocks, weights), weights, device)
        self.signs = _Signs(weights, device)
        self.masks = _Masks(device)

    def add(self, client: int, delta: Tensor, positions: Tensor | None, mask: Mask | None) -> None:
        """Add one client's update: of the whole vector, or only of `positions` (ascending) if the rest is unchanged."""
        expected = self.size if positions is None else len(positions)
        if len(delta) != expected:
            raise ValueError(f"client {client}: an update of {len(delta)} values for {expected} entries")
        delta = delta.to(self.device)
        positions = None if positions is None else positions.to(self.device)
        self.whole.add(delta, positions)
        if self.blocks is not None:
            self.blocks.add(delta, positions)
        self.signs.add(delta, positions)
        if mask is not None:
            self.masks.add(mask)

    def finish(self) -> dict[str, Any]:
        """The measures by name, as the class describes them; those of the blocks under "blocks"."""
        measures: dict[str, Any] = {"drift": list(self.whole.drifts["whole"]), **self._measures(self.whole, "whole")}
        if self.blocks is not None:
            measures["blocks"] = {name: self._measures(self.blocks, name) for name in self.blocks.parts}
        return measures

    def _measures(self, directions: "_Directions", part: str) -> dict[str, float | None]:
        drifts, ranges = directions.drifts[part], directions.parts[part]
        opposed, agreement = self.signs.opposed_and_agreement(ranges)
        return {
            "drift_mean": math.fsum(drifts) / len(drifts) if drifts else None,
            "drift_max": max(drifts, default=None),
            "cosine": directions.cosine(part),
            "opposed": opposed,
            "agreement": agreement,
            "mask_overlap": self.masks.overlap(ranges),
        }


class _Directions:
    """The length |u_k| of each update within each part of the vector, and the sum over clients of u_k / |u_k|."""

    def __init__(self, parts: Mapping[str, Ranges], weights: int, device: str | torch.device) -> None:
        self.parts = parts
        self.drifts: dict[str, list[float]] = {name: [] for name in parts}
        self.sum = torch.zeros(weights, device=device)  # parts do not overlap: each has its sum in its own ranges

    def add(self, delta: Tensor, positions: Tensor | None) -> None:
        for name, ranges in self.parts.items():
            drift = _norm(values for values, _ in _chunks(delta, positions, ranges))
            self.drifts[name].append(drift)
            if drift:
                for values, where in _chunks(delta, positions, ranges):
                    _add(self.sum, where, values / drift)

    def cosine(self, part: str) -> float | None:
        """(|sum_k u_k / |u_k||^2 - K) / (K (K - 1)) over the K updates that are not all zero, the mean over pairs.

        The square of the sum contains each pair's cosine twice, and the squares of the K unit vectors once each.
        The sum is in float32, so for hundreds of clients the result is accurate to about 1e-5.
        """
        moved = sum(drift > 0 for drift in self.drifts[part])
        if moved < 2:
            return None
        length = _norm(self.sum[where] for where in _slices(self.parts[part]))
        return max(-1.0, min(1.0, (length**2 - moved) / (moved * (moved - 1))))  # rounding may exceed ±1


class _Signs:
    """How many clients moved each weight up, and how many down."""

    def __init__(self, weights: int, device: str | torch.device) -> None:
        self.clients = 0
        self.up = torch.zeros(weights, dtype=torch.int8, device=device)
        self.down = torch.zeros_like(self.up)

    def add(self, delta: Tensor, positions: Tensor | None) -> None:
        self.clients += 1
        self.up, self.down = _wide_enough(self.up, self.clients), _wide_enough(self.down, self.clients)
        for values, where in _chunks(delta, positions, [(0, len(self.up))]):
            _add(self.up, where, (values > 0).to(self.up.dtype))
            _add(self.down, where, (values < 0).to(self.down.dtype))

    def opposed_and_agreement(self, ranges: Ranges) -> tuple[float | None, float | None]:
        """Of the weights that at least two clients moved: the share moved both ways, the mean |up - down| / moved."""
        several = opposed = agreement = 0.0
        for where in _slices(ranges):
            up, down = self.up[where], self.down[where]
            moved = up + down  # at most the number of clients, so this does not overflow either
            counts = moved > 1
            several += float(counts.sum())
            opposed += float(((up > 0) & (down > 0)).sum())
            agreement += float(((up - down).abs() / moved).where(counts, 0.0).sum())
        return (opposed / several, agreement / several) if several else (None, None)


class _Masks:
    """In how many clients' masks each weight is active; not counted while all masks are the same."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = device
        self.masks, self.covered = 0, 0  # number of masks, and of weights that each covers
        self.shared: Mask | None = None  # the mask that all clients so far have
        self.counts: Tensor | None = None  # once masks differ

    def add(self, mask: Mask) -> None:
        if self.masks == 0:
            self.shared = mask
        elif self.shared is not None and not (mask is self.shared or mask == self.shared):
            counts = self.shared.unpack().to(self.device, torch.int8)
            self.counts, self.shared = _wide_enough(counts, self.masks) * self.masks, None
        self.masks, self.covered = self.masks + 1, mask.size
        if self.counts is not None:
            self.counts = _wide_enough(self.counts, self.masks)
            self.counts += mask.unpack().to(self.device)

    def overlap(self, ranges: Ranges) -> float | None:
        """Weights active in both masks over those active in either, each summed over pairs; 1 if none is active.

        Masks may cover only the first part of the vector: None where they cover nothing.
        If a weight is active in c masks, c (c - 1) / 2 pairs share it. As |m_i or m_j| is
        |m_i| + |m_j| - |m_i and m_j|, the second sum is (masks - 1) sum_k |m_k| minus the first.
        """
        if self.masks < 2 or all(start >= self.covered for start, _ in ranges):
            return None
        if self.counts is None:
            return 1.0
        active = both = 0
        for where in _slices(ranges):
            counts = self.counts[where].long()
            active += int(counts.sum())
            both += int((counts * (counts - 1)).sum()) // 2
        either = (self.masks - 1) * active - both
        return both / either if either else 1.0


def block_ranges(entries: Iterable[Entry]) -> dict[str, Ranges]:
    """The ranges of each ViT block in a scope's vector, by block number; "rest" is everything outside the blocks.

    The vector holds the entries one after another, in this order.
    """
    blocks: dict[str, Ranges] = {}
    start = 0
    for entry in entries:
        stop = start + entry.stop - entry.start
        found = BLOCK.match(entry.name)
        ranges = blocks.setdefault(found[1] if found else "rest", [])
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, stop))
        start = stop
    return blocks


def _within(blocks: Mapping[str, Ranges], weights: int) -> dict[str, Ranges]:
    """The blocks, cut off where the buffers begin."""
    cut = {name: [(start, min(stop, weights)) for start, stop in blocks[name] if start < weights] for name in blocks}
    return {name: ranges for name, ranges in cut.items() if ranges}


def _slices(ranges: Ranges) -> Iterator[slice]:
    for start, stop in ranges:
        for first in range(start, stop, CHUNK):
            yield slice(first, min(first + CHUNK, stop))


def _chunks(delta: Tensor, positions: Tensor | None, ranges: Ranges) -> Iterator[tuple[Tensor, Where]]:
    """The values of an update in these ranges, chunk by chunk, with their positions in the vector."""
    if positions is None:
        yield from ((delta[where], where) for where in _slices(ranges))
        return
    bounds = torch.searchsorted(positions, torch.tensor(ranges, device=positions.device))
    for first, last in bounds.tolist():
        yield from zip(delta[first:last].split(CHUNK), positions[first:last].split(CHUNK), strict=True)


def _add(total: Tensor, where: Where, values: Tensor) -> None:
    if isinstance(where, slice):
        total[where].add_(values)
    else:
        total.scatter_add_(0, where, values)


def _norm(chunks: Iterable[Tensor]) -> float:
    """The L2 norm of all chunks together, in float64: squares of small changes would vanish in float32."""
    norms = [torch.linalg.vector_norm(chunk.double()) for chunk in chunks]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def _wide_enough(counts: Tensor, highest: int) -> Tensor:
    """The same counts in the smallest integer type that can hold `highest`."""
    kinds = (torch.int8, torch.int16, torch.int32)
    return counts.to(next(kind for kind in kinds if highest <= torch.iinfo(kind).max))
