"""SparseSGDM: SGD with momentum that moves, and remembers, only the weights that a mask leaves active."""

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import ParamsT

from fedsieve.errors import InputError
from fedsieve.sieve.mask import Mask
from fedsieve.sieve.rows import active_rows

Select = Callable[[Tensor], Tensor]  # from a tensor in a parameter's shape to the entries that a step moves
Penalty = Callable[[str, Tensor, Select], Tensor]  # a parameter's name, its selected weights: a term of their gradient
Correction = Callable[[str, Select], Tensor]  # a parameter's name: what is added to the gradient after clipping
MomentumPolicy = Literal["reset", "carry", "leak"]  # what becomes of the momentum when the mask is redrawn


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
    def of(active: Tensor, moving: Tensor | None = None) -> "Selection | None":
        """The weights of a tensor that are `active` (bool, in its shape), or moved by old momentum; None if none."""
        chosen = active if moving is None else active | moving
        count, size = int(chosen.count_nonzero()), active.numel()
        if count == 0:
            return None
        if count == size:
            selection = Selection()
        elif (rows := active_rows(chosen)) is not None:
            selection = Selection(rows.int(), rows=True)
        elif 3 * count > 2 * size:  # momentum and position of each active weight would take more
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

    def move(self, tensor: Tensor, values: Tensor, step: Tensor, rate: float) -> None:
        """tensor -= rate * step for the selected entries, of which `values` is what `gather` gave."""
        kept = None if self.held is None else values.index_select(0, self.held)
        values.add_(step, alpha=-rate)
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


class SparseSGDM(torch.optim.Optimizer):
    """torch.optim.SGD for the active weights of a mask; frozen ones keep their bits, and have no momentum.

    With g the gradient of the active weights (divided by the mask's density if `rescale`; plus `penalty`; clipped to
    the norm `clip_norm`; plus `correction`): d = g + weight_decay * w;
    v = d at first, then momentum * v + (1 - dampening) * d;  w -= lr * (d + momentum * v if nesterov else v).
    With a full mask the result is that of SGD to the last bit.
    Parameters given with names are found in the mask by name, others by order. Those that the mask does not know are
    frozen, except those named in `dense`, which are always active. All are given once, here: `add_param_group` later
    on, and copies of the optimizer, are not supported.
    """

    def __init__(
        self,
        params: ParamsT,
        mask: Mask | None = None,
        *,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        clip_norm: float | None = None,
        rescale: bool = False,
        dense: Collection[str] = (),
        penalty: Penalty | None = None,
        correction: Correction | None = None,
    ) -> None:
        if min(lr, momentum, weight_decay) < 0:
            raise ValueError("lr, momentum and weight_decay must not be negative")
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError("nesterov needs momentum, and no dampening")
        settings = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, settings | {"nesterov": nesterov})
        self.clip_norm, self.rescale, self.dense = clip_norm, rescale, dense
        self.penalty, self.correction = penalty, correction
        self._names = dict(
            zip((one for _, one in self._parameters()), self._given_names() or map(str, count()), strict=False)
        )
        self._select(mask)

    # torch's own, without its wrapper that imports a compiler at the first call, which takes seconds
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, and without that wrapper, too."""
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        for _, parameter in self._parameters():
            parameter.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; the loss, if a closure computes it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.descend()
        return loss

    @torch.no_grad()
    def descend(self) -> None:
        """A step without the hooks and profiler's marks that torch puts around `step`: on a head they take as long."""
        found, shrink = self._gradients(), None
        if self.clip_norm is not None:
            found = iter(all_found := list(found))
            norm = get_total_norm([gradient for *_, gradient in all_found])
            shrink = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for group, parameter, selection, gradient in found:
            if shrink is not None:
                gradient = gradient.mul(shrink.to(gradient.device))
            if self.correction is not None:
                gradient = gradient.add(selection.silence(self.correction(self._names[parameter], selection.gather)))
            self._move(group, parameter, selection, gradient)

    def _gradients(self) -> Iterator[tuple[dict[str, Any], Tensor, Selection, Tensor]]:
        """What the next step moves, one tensor at a time: its group, itself, what of it, and the gradient of that."""
        for group, parameter in self._parameters():
            selection = self._selections[parameter]
            if selection is None:
                continue
            if parameter.grad is not None:
                gradient = selection.gather_gradient(parameter.grad)
            elif selection.quiet is not None and bool(selection.quiet.all()):
                gradient = torch.zeros_like(selection.gather(parameter))  # old momentum moves it all the same
            else:
                continue
            if self.rescale and self._density != 1 and parameter not in self._outside:
                gradient = gradient / self._density
            if self.penalty is not None:
                weights = selection.gather(parameter)
                gradient = gradient.add(self.penalty(self._names[parameter], weights, selection.gather))
            yield group, parameter, selection, selection.silence(gradient)

    def _move(self, group: dict[str, Any], parameter: Tensor, selection: Selection, gradient: Tensor) -> None:
        """The step of torch.optim.SGD, operation by operation (their rounding counts), on the selected weights."""
        weights, momentum = selection.gather(parameter), group["momentum"]
        if group["weight_decay"] != 0:
            gradient = selection.silence(gradient.add(weights, alpha=group["weight_decay"]))
        if momentum != 0:
            buffer = self.state[parameter].get("momentum_buffer")
            if buffer is None:
                buffer = self.state[parameter]["momentum_buffer"] = gradient.clone()
            else:
                buffer.mul_(momentum).add_(gradient, alpha=1 - group["dampening"])
            gradient = gradient.add(buffer, alpha=momentum) if group["nesterov"] else buffer
        selection.move(parameter, weights, gradient, group["lr"])

    def set_mask(self, mask: Mask | None, momentum: MomentumPolicy = "reset") -> None:
        """From now on other weights are active. What becomes of the momentum there was:

        reset: it is forgotten; the next step is a first step. carry: it stays where weights are still active, and
        starts from zero for the newly active. leak: it also stays at frozen weights, and moves them while it decays.
        """
        state = self.export_momentum() if _known(momentum) != "reset" else {}
        self.state.clear()
        self._select(mask)
        self.import_momentum(state, momentum)

    @torch.no_grad()
    def export_momentum(self) -> dict[str, Tensor]:
        """The momentum of all parameters in one vector, and the packed mask of where it belongs; {} before a step."""
        values, positions = [], []
        for _, parameter in self._parameters():
            selection, buffer = self._selections[parameter], self.state.get(parameter, {}).get("momentum_buffer")
            if selection is None or buffer is None:
                positions.append(torch.zeros(parameter.numel(), dtype=torch.bool))
                continue
            there = selection.moving(parameter).flatten()
            values.append(buffer.flatten() if selection.held is None else buffer[there])
            positions.append(there.cpu())
        if not values:
            return {}
        return {"momentum": torch.cat(values), "mask": Mask.pack(self._shapes(), torch.cat(positions)).bits}

    @torch.no_grad()
    def import_momentum(self, state: dict[str, Tensor], momentum: MomentumPolicy = "carry") -> None:
        """Go on with the momentum that another optimizer of these parameters exported, as `set_mask` does."""
        if _known(momentum) == "reset" or not state:
            return
        old, values = Mask(self._shapes(), state["mask"].cpu()), state["momentum"]
        parts = values.split(list(old.counts().values()))  # ValueError if it is not as long as the mask says
        for (group, parameter), name, part in zip(self._parameters(), old.shapes, parts, strict=True):
            if group["momentum"] == 0:
                continue
            buffer = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            buffer[old[name].to(parameter.device)] = part.to(buffer)
            selection = self._selections[parameter]
            if momentum == "leak":
                moving = buffer != 0
                active = torch.zeros_like(moving) if selection is None else selection.active(parameter)
                selection = self._selections[parameter] = Selection.of(active, moving)
            if selection is not None:
                self.state[parameter]["momentum_buffer"] = selection.gather(buffer)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and the digest of the mask: momentum is laid out by it, one number after another."""
        return super().state_dict() | {"mask": self._selected().digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, for the state of an optimizer with the same mask. The state of torch.optim.SGD has a full one."""
        if state_dict.get("mask", Mask.full(self._shapes()).digest) != self._selected().digest:
            raise InputError(
                "the optimizer's state belongs to another mask; load it with the mask that it was saved with, "
                "or hand momentum on to another mask with export_momentum and import_momentum"
            )
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def _selected(self) -> Mask:
        """The weights that have a place in the state: all that a step moves."""
        found = ((self._selections[parameter], parameter) for _, parameter in self._parameters())
        moving = [torch.zeros(one.shape) > 0 if it is None else it.moving(one).cpu() for it, one in found]
        return Mask.pack(self._shapes(), torch.cat([one.flatten() for one in moving]))

    def _select(self, mask: Mask | None) -> None:
        parameters = [parameter for _, parameter in self._parameters()]
        self._density = 1.0 if mask is None else mask.density
        self._selections: dict[Tensor, Selection | None]
        self._outside: set[Tensor] = set()  # of the mask, and active
        if mask is None:
            self._selections = dict.fromkeys(parameters, Selection())
            return
        if not all(parameter.is_contiguous() for parameter in parameters):
            raise ValueError("SparseSGDM needs contiguous parameters; call .contiguous() on those in channels_last")
        names = self._given_names()
        named = bool(names)
        if not named:
            names = [*mask.shapes, *(f"parameter {number}" for number in range(len(mask.shapes), len(parameters)))]
        shapes = {name: tuple(one.shape) for name, one in zip(names, parameters, strict=named)}
        if named and shapes.keys().isdisjoint(mask.shapes):
            raise InputError(f"the mask belongs to another model or phase: it has no {names[0]}, nor any other tensor")
        mask.must_fit({name: shapes.get(name, mask.shapes[name]) for name in mask.shapes} if named else shapes)
        found = dict(zip(names, parameters, strict=True))
        self._outside = {one for name, one in found.items() if name in self.dense and name not in mask.shapes}
        self._selections = {
            one: Selection.of(mask[name].to(one.device))
            if name in mask.shapes
            else (Selection() if one in self._outside else None)
            for name, one in found.items()
        }

    def _given_names(self) -> list[str]:
        return [name for group in self.param_groups for name in group.get("param_names", ())]

    def _parameters(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        return ((group, parameter) for group in self.param_groups for parameter in group["params"])

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all parameters, for a mask that needs no names of them."""
        return {str(number): tuple(parameter.shape) for number, (_, parameter) in enumerate(self._parameters())}


def _positions(chosen: Tensor) -> Tensor:
    return chosen.flatten().nonzero().flatten().int()


def _known(momentum: str) -> str:
    if momentum not in get_args(MomentumPolicy):
        raise ValueError(f"momentum is one of {', '.join(get_args(MomentumPolicy))}, not {momentum}")
    return momentum
