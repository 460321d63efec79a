"""Which weights of a tensor an optimizer moves: `Selection` gathers them and puts them back."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsieve.sieve.rows import active_rows

Select = Callable[[Tensor], Tensor]  # from a tensor in a parameter's shape to the entries that a step moves


@dataclass(frozen=True)
class Selection:
    """The weights of one tensor that an optimizer moves, in the form that needs the fewest bytes.

    Indices are int32, half of what torch keeps; where it insists on int64 they are widened for one operation.
    """

    index: Tensor | None = None  # flat positions, or row numbers; None: all weights
    rows: bool = False
    held: Tensor | None = None  # positions that stay as they are though `index` takes them in: cheaper if few
    quiet: Tensor | None = None  # bool: not active, so only old momentum moves it ("leak"), or nothing if it is held

    @staticmethod
    def of(active: Tensor, moving: Tensor | None = None, numbers: int = 1) -> "Selection | None":
        """The weights of a tensor that are `active` (bool, in its shape), or moved by old momentum; None if none.

        `numbers` says how many the optimizer keeps for each of them.
        """
        chosen = active if moving is None else active | moving
        count, size = int(chosen.count_nonzero()), active.numel()
        if count == 0:
            return None
        if count == size:
            selection = Selection()
        elif (rows := active_rows(chosen)) is not None:
            selection = Selection(rows.int(), rows=True)
        elif (numbers + 2) * count > (numbers + 1) * size:  # numbers and position of each active weight take more
            selection = Selection(held=_positions(~chosen))
        else:
            selection = Selection(_positions(chosen))
        if moving is None:
            return selection
        return replace(selection, quiet=selection.gather(~active)) if bool((chosen & ~active).any()) else selection

    def gather(self, tensor: Tensor) -> Tensor:
        """The selected entries: a copy, or the tensor itself (flat if some are held) when `index` is None."""
        if self.index is None:
            return tensor if self.held is None else tensor.reshape(-1)
        return (tensor if self.rows else tensor.reshape(-1)).index_select(0, self.index)

    def gather_gradient(self, gradient: Tensor) -> Tensor:
        """The selected entries of a gradient, which may be a sparse tensor of rows."""
        if gradient.is_sparse:  # autograd forgets that it is coalesced, and coalescing would sort and copy
            if self.rows and self.index is not None and torch.equal(gradient._indices()[0].int(), self.index):
                return gradient._values()
            gradient = gradient.to_dense()
        return self.gather(gradient)

    def scatter(self, tensor: Tensor, values: Tensor) -> None:
        """Write what `gather` gave, or as many other values, into a contiguous tensor."""
        if self.index is None:
            tensor.view(values.shape).copy_(values)
        elif self.rows:
            tensor.index_copy_(0, self.index.long(), values)
        else:
            tensor.view(-1).scatter_(0, self.index.long(), values)  # twice as fast as index_copy_ on a CPU

    def silence(self, values: Tensor) -> Tensor:
        """Selected entries, with zeros where the weight is not active."""
        if self.held is not None:
            values = values.index_fill(0, self.held.long(), 0)
        return values if self.quiet is None else values.masked_fill(self.quiet, 0)

    def change(self, tensor: Tensor, step: Callable[[Tensor], None]) -> None:
        """Let `step` change the selected entries, in place; all others keep their bits."""
        values = self.gather(tensor)
        kept = None if self.held is None else values.index_select(0, self.held)
        step(values)
        if self.index is not None:
            self.scatter(tensor, values)
        elif self.held is not None and kept is not None:
            values.index_copy_(0, self.held.long(), kept)

    def active(self, like: Tensor) -> Tensor:
        """One bool per weight of the tensor: what `of` was given."""
        selected = self.silence(torch.ones_like(self.gather(like), dtype=torch.bool))
        active = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
        self.scatter(active, selected)
        return active

    def moving(self, like: Tensor) -> Tensor:
        """One bool per weight of the tensor: whether it is active, or moved by old momentum."""
        return replace(self, quiet=None).active(like)


def _positions(chosen: Tensor) -> Tensor:
    return chosen.flatten().nonzero().flatten().int()
