"""What a client lacks of the server's weights, so that no broadcast repeats what it holds already."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsieve.model.flat import FlatModel, Scope

NOTHING = -1  # of the versions a client has seen, before its first broadcast


@dataclass
class Versions:
    """When each weight last changed and what each client saw last, both counted in changes that the server made.

    Version 0 is the model that the run starts from. A client that saw version v lacks the weights that changed after
    v. Those that clients hold from the beginning (the pretrained backbone, with `have_backbone`) are older than any.
    """

    changed: Tensor  # int32, one number for each weight
    seen: Tensor  # int32, one number for each client
    now: int = 0

    @staticmethod
    def at_start(model: FlatModel, clients: int, have_backbone: bool) -> "Versions":
        changed = torch.zeros(len(model.vector), dtype=torch.int32)
        for entry in model.entries:
            if have_backbone and entry.name.startswith("backbone."):
                changed[entry.start : entry.stop] = NOTHING
        return Versions(changed, torch.full((clients,), NOTHING, dtype=torch.int32))

    def record(self, scope: Scope, before: Tensor, after: Tensor) -> None:
        """The weights in scope went from `before` to `after`: a new version."""
        self.now += 1
        differs = (before.view(torch.int32) != after.view(torch.int32)).cpu()  # to the bit: 0.0 is not -0.0
        position = 0
        for start, stop in scope.ranges:
            self.changed[start:stop].masked_fill_(differs[position : position + stop - start], self.now)
            position += stop - start

    def saw(self, client: int) -> None:
        """This client holds the weights as they are now."""
        self.seen[client] = self.now

    def saw_all(self) -> None:
        self.seen.fill_(self.now)

    def forget(self, client: int) -> None:
        """This client may hold anything."""
        self.seen[client] = NOTHING

    def last_seen(self, client: int) -> int:
        return int(self.seen[client])

    def oldest(self, ranges: Iterable[tuple[int, int]]) -> int:
        """The version since which all weights in these ranges have changed."""
        return min((int(self.changed[start:stop].min()) for start, stop in ranges), default=NOTHING)

    def newest(self, ranges: Iterable[tuple[int, int]]) -> int:
        """The version that last changed any weight in these ranges."""
        return max((int(self.changed[start:stop].max()) for start, stop in ranges), default=NOTHING)

    def of(self, ranges: Iterable[tuple[int, int]]) -> Tensor:
        """When the weights in these ranges of the model's vector last changed."""
        return torch.cat([self.changed[start:stop] for start, stop in ranges] or [self.changed[:0]])


def outside(scope: Scope) -> list[tuple[int, int]]:
    """The ranges of the model's vector that a scope leaves out."""
    edges = [0, *(edge for pair in sorted(scope.ranges) for edge in pair), len(scope.model.vector)]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if stop > start]
