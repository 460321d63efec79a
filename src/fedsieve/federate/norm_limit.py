"""Leaves out updates whose norm is far larger than that of the others in their phase.

The reference is the median norm of the phase's last `WINDOW` accepted updates. The first updates of a phase have
nothing to be compared with, so they wait until there are `ENOUGH` of them (or the round is over) and are then judged
together: a bad client gains nothing by being first. Updates are judged in their order of arrival, which is the same
for any number of workers, and the norms are part of the checkpoint, so a resumed run leaves out the same updates.
"""

import math
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsieve.federate.aggregators.mean import pieces
from fedsieve.federate.types import Update

ENOUGH = 3  # updates: a single bad one is not their median
WINDOW = 255  # norms in a checkpoint


@dataclass(frozen=True)
class Reply:
    """What a client sent, decoded and checked on its own."""

    update: Update
    norm: float  # from `check_update`
    remembers: str | None  # the digest of the client's state for its next round, if it has one

    @property
    def is_sums(self) -> bool:
        return "delta" not in self.update.vectors


def all_finite(values: Tensor) -> bool:
    """Whether all values are finite. If their sum is, they are, and that check takes a thirtieth of the time."""
    return math.isfinite(values.sum()) or bool(torch.isfinite(values).all())


def norm_of(*vectors: Tensor) -> float:
    """The L2 norm of all numbers together: squared in their own type, which is fast, or in float64 on overflow."""
    parts = [vector[part] for vector in vectors for part in pieces(vector)]
    total = sum(float(torch.dot(part, part)) for part in parts)
    if not total < math.inf:
        total = sum(float(torch.dot(part.double(), part.double())) for part in parts)
    return math.sqrt(total)


class NormLimit:
    """Leaves out updates whose norm is more than `limit` times the median; None: accepts all."""

    def __init__(self, limit: float | None, norms: Iterable[float]) -> None:
        """`norms` are those of the phase's last updates; those of accepted updates are added."""
        self.limit, self.norms = limit, list(norms)
        self._sorted = sorted(self.norms)

    def judged(self, replies: Iterable[Reply]) -> Iterator[tuple[Reply, str | None]]:
        """Each reply in order, and why it must be left out, or None."""
        if self.limit is None:
            yield from ((reply, None) for reply in replies)
            return
        waiting: list[Reply] = []
        for reply in replies:
            is_early = len(self.norms) + len(waiting) + 1 < ENOUGH
            waiting.append(reply)
            if not is_early:
                yield from self._judge(waiting, self.limit)
                waiting = []
        yield from self._judge(waiting, self.limit)

    def _judge(self, replies: list[Reply], limit: float) -> Iterator[tuple[Reply, str | None]]:
        usual = self._sorted
        if len(usual) < ENOUGH:
            usual = sorted(usual + [reply.norm for reply in replies if reply.norm > 0])  # zeros tell nothing
        median = usual[(len(usual) - 1) // 2] if usual else math.inf
        for reply in replies:
            if reply.norm > limit * median:
                what = "the norm of its sums per sample is" if reply.is_sums else "the norm of its update is"
                than = f"clients.norm_limit {limit:g} times the phase's median {median:.3g}"
                yield reply, f"{what} {reply.norm:.3g}, more than {than}; if the client is honest, lower lr"
                continue
            if reply.norm > 0:
                self._record(reply.norm)
            yield reply, None

    def _record(self, norm: float) -> None:
        self.norms.append(norm)
        insort(self._sorted, norm)
        if len(self.norms) > WINDOW:
            self._sorted.remove(self.norms.pop(0))
