"""Masks layer by layer: which share of every layer's weights may change."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsieve.model.flat import KINDS, kind_of
from fedsieve.sieve.mask import Mask, Shapes

LAYERS = ("q", "k", "v", "proj", "fc1", "fc2", "norms")  # of a ViT's block
REST = {"patch": "patch", "tokens": "tokens", "norm": "final norm", "head": "head"}  # of a ViT outside of its blocks
BLOCK = re.compile(r"(?:backbone\.)?blocks\.(\d+)\.(?:attn\.|mlp\.)?(\w+)")
DIGITS = 5  # behind the point, of a share that is written down
Cell = tuple[int | str, str]  # row and column: a block's number or a kind of layer, and one of LAYERS or "all"


@dataclass(frozen=True)
class Layers:
    """A share (a density, say) of every layer; None for layers that a mask does not cover."""

    blocks: dict[int, dict[str, float | None]]  # by number, then by LAYERS and "all"; empty for a network without
    rest: dict[str, float | None]  # by kind of layer
    total: float

    def rounded(self) -> dict[str, Any]:
        """For a file."""

        def short(row: Mapping[str, float | None]) -> dict[str, float | None]:
            return {name: None if share is None else round(share, DIGITS) for name, share in row.items()}

        return {"blocks": {block: short(row) for block, row in self.blocks.items()}, "rest": short(self.rest)}


def density(mask: Mask) -> Layers:
    """The active share of every layer's weights."""
    return shares(mask.shapes, counted(mask), counted(Mask.full(mask.shapes)))


def overlap(one: Mask, other: Mask) -> Layers:
    """The Jaccard index of every layer: weights in both over weights in either; 1 where both are empty."""
    return shares(one.shapes, counted(one & other), counted(one | other))


class MeanDensity:
    """The mean of several masks' densities, one after another, none of which is kept but the last."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.active, self.size, self.masks = Counter[Cell](), counted(Mask.full(shapes)), 0
        self._last: tuple[Mask, Counter[Cell]] | None = None

    def add(self, mask: Mask) -> None:
        if self._last is None or self._last[0] is not mask:  # clients may all have the same one
            self._last = mask, counted(mask)
        for cell, count in self._last[1].items():
            self.active[cell] += count
        self.masks += 1

    def layers(self) -> Layers:
        whole = Counter({cell: count * self.masks for cell, count in self.size.items()})
        return shares(self.shapes, self.active, whole)


def counted(mask: Mask) -> Counter[Cell]:
    """How many weights of every layer may change."""
    total, active = Counter[Cell](), mask.unpack().numpy()
    has_blocks = _has_blocks(mask.shapes)
    for name, (start, stop) in mask.ranges.items():
        cells = _cells(name) if has_blocks else [(kind_of(name) or "other", "all")]
        edges = np.linspace(start, stop, len(cells) + 1, dtype=np.int64)
        for (row, column), first, last in zip(cells, edges[:-1], edges[1:], strict=True):
            count = int(np.count_nonzero(active[first:last]))
            for cell in {(row, column), (row, "all")}:
                total[cell] += count
    return total


def shares(shapes: Shapes, part: Counter[Cell], whole: Counter[Cell]) -> Layers:
    """How much of what `whole` counts is in `part`."""
    has_blocks = _has_blocks(shapes)

    def share(row: int | str, column: str = "all") -> float | None:
        if (row, column) not in whole:
            return None
        return part[row, column] / whole[row, column] if whole[row, column] else 1.0

    depth = 1 + max((row for row, _ in whole if isinstance(row, int)), default=-1)
    blocks = {row: {column: share(row, column) for column in (*LAYERS, "all")} for row in range(depth)}
    rows = [*(REST.values() if has_blocks else (kind for kind in KINDS if (kind, "all") in whole))]
    rest = {row: share(row) for row in rows + ["other"] * (("other", "all") in whole)}
    everything, active = (sum(count for (_, column), count in one.items() if column == "all") for one in (whole, part))
    return Layers(blocks, rest, active / everything if everything else 1.0)


def _has_blocks(shapes: Shapes) -> bool:
    return any(BLOCK.match(name) for name in shapes)


def _cells(name: str) -> list[Cell]:
    """Where a tensor of a ViT is counted; in three cells for q, k and v, which are the thirds of one tensor."""
    found = BLOCK.match(name)
    if found is None:
        return [(REST.get(kind_of(name) or "", "other"), "all")]
    block, layer = int(found[1]), found[2]
    columns = {"qkv": ("q", "k", "v"), "norm1": ("norms",), "norm2": ("norms",), "ls1": ("norms",), "ls2": ("norms",)}
    places = columns.get(layer, (layer,) if layer in LAYERS else ())
    return [(block, column) for column in places] or [("other", "all")]
