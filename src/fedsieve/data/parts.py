"""Whose samples are whose, for any number of clients: one array of positions and where each client's begin."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np


class Parts(Sequence[np.ndarray]):
    """The positions of each client's samples, `parts[client]`, as views of one array.

    A client costs its positions and one number. An array object for each would cost more than a hundred bytes,
    which is many times what a client with two samples has to say. Positions are int32 where they fit.
    """

    def __init__(self, positions: np.ndarray, sizes: np.ndarray) -> None:
        """`positions` are those of client 0, then those of client 1, …; `sizes` says how many each has."""
        largest = int(positions.max(initial=0))
        self.positions = positions.astype(np.int32 if largest <= np.iinfo(np.int32).max else np.int64, copy=False)
        self.edges = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        if self.edges[-1] != len(positions):
            raise ValueError(f"{len(positions)} positions for clients of {self.edges[-1]} samples")

    @staticmethod
    def of(arrays: Iterable[np.ndarray]) -> "Parts":
        arrays = list(arrays)
        positions = np.concatenate([np.empty(0, dtype=np.int64), *arrays])
        return Parts(positions, np.array([len(one) for one in arrays], dtype=np.int64))

    @staticmethod
    def by_owner(owner: np.ndarray, count: int) -> "Parts":
        """From the owner of each sample (-1: nobody) to the samples of each of `count` owners, in their order."""
        order = np.argsort(owner, kind="stable")  # nobody's come first
        sizes = np.bincount(owner[owner >= 0], minlength=count)
        return Parts(order[len(owner) - sizes.sum() :], sizes)

    @property
    def sizes(self) -> np.ndarray:
        """How many samples each client has."""
        return np.diff(self.edges)

    def __len__(self) -> int:
        return len(self.edges) - 1

    @overload
    def __getitem__(self, client: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, client: slice) -> "Parts": ...
    def __getitem__(self, client: int | slice) -> "np.ndarray | Parts":
        if isinstance(client, slice):
            first, last, step = client.indices(len(self))
            if step != 1:
                raise ValueError("clients can be taken one by one or in a row, not in steps")
            last = max(first, last)
            return Parts(self.positions[self.edges[first] : self.edges[last]], self.sizes[first:last])
        if not -len(self) <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        client %= len(self)
        return self.positions[self.edges[client] : self.edges[client + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.positions[start:end] for start, end in pairwise(self.edges))

    def count_classes(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Samples by (client, class), where the sample at position p is of class labels[p]."""
        owner = np.repeat(np.arange(len(self)), self.sizes)
        counts = np.bincount(owner * classes + labels[self.positions], minlength=len(self) * classes)
        return counts.reshape(len(self), classes)
