"""Which of the server's weights a client lacks, so that no broadcast repeats what it already holds."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsieve.model.flat import FlatModel, Scope

NOTHING = -1  # the version a client has seen before its first broadcast


@dataclass
class Versions:
    """The version that last changed each weight, and the last version that each client saw.

    Version 0 is the model that the run starts from; each change by the server makes a new one. A client that saw
    version v lacks the weights that changed after v. Weights that clients hold from the beginning (the pretrained
    backbone, with `have_backbone`) are older than any version.
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

    @staticmethod
    def of_nobody() -> "Versions":
        """For a process that sends no weights."""
        return Versions(torch.empty(0), torch.empty(0))

    def record(self, scope: Scope, before: Tensor, after: Tensor) -> None:
        """Make a new version: the weights in scope went from `before` to `after`."""
        self.now += 1
        differs = (before.view(torch.int32) != after.view(torch.int32)).cpu()  # to the bit: 0.0 is not -0.0
        position = 0
        for start, stop in scope.ranges:
            self.changed[start:stop].masked_fill_(differs[position : position + stop - start], self.now)
            position += stop - start

    def saw(self, client: int) -> None:
        """This client holds the current weights."""
        self.seen[client] = self.now

    def saw_all(self) -> None:
        self.seen.fill_(self.now)

    def forget(self, client: int) -> None:
        """What this client holds is unknown."""
        self.seen[client] = NOTHING

    def last_seen(self, client: int) -> int:
        return int(self.seen[client])

    def oldest(self, ranges: Iterable[tuple[int, int]]) -> int:
        """The lowest version among these weights: since then, all of them have changed."""
        return min((int(self.changed[start:stop].min()) for start, stop in ranges), default=NOTHING)

    def newest(self, ranges: Iterable[tuple[int, int]]) -> int:
        """The version that last changed any weight in these ranges."""
        return max((int(self.changed[start:stop].max()) for start, stop in ranges), default=NOTHING)

    def of(self, ranges: Iterable[tuple[int, int]]) -> Tensor:
        """The version that last changed each weight in these ranges of the model's vector."""
        return torch.cat([self.changed[start:stop] for start, stop in ranges] or [self.changed[:0]])
