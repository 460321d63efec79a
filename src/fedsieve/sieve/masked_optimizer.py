"""What optimizers under a mask have in common: they move, and remember, only the weights that it leaves active."""

import inspect
from collections.abc import Callable, Collection, Iterator
from itertools import count
from typing import Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import ParamsT

from fedsieve.errors import InputError
from fedsieve.sieve.mask import Mask
from fedsieve.sieve.weight_selection import Select, Selection

Penalty = Callable[[str, Tensor, Select], Tensor]  # a parameter's name, its selected weights: a term of their gradient
Correction = Callable[[str, Select], Tensor]  # a parameter's name: what is added to the gradient after clipping
MomentumPolicy = Literal["reset", "carry", "leak"]  # what becomes of the momentum when the mask is redrawn


class GradientSettings(TypedDict, total=False):
    """The keyword arguments that every optimizer under a mask has."""

    clip_norm: float | None  # to which the gradient of all active weights is clipped
    rescale: bool  # whether gradients are divided by the mask's density
    dense: Collection[str]  # parameters that are always active, though the mask does not know them
    penalty: Penalty | None
    correction: Correction | None


class MaskedOptimizer(torch.optim.Optimizer):
    """A torch optimizer for the active weights of a mask; frozen ones keep their bits, and have no state.

    The gradient of the active weights is divided by the mask's density if `rescale`; then `penalty` is added; then it
    is clipped to the norm `clip_norm`; then `correction` is added. What follows is the optimizer's own (`advance`).
    Parameters given with names are found in the mask by name, others by order. Those that the mask does not know are
    frozen, except those named in `dense`, which are always active. All are given once, here: `add_param_group` later
    on, and copies of the optimizer, are not supported.
    """

    # What is kept for each active weight, called its momentum below: the names in exported states and in `self.state`.
    remembers: ClassVar[dict[str, str]]
    shared: ClassVar[frozenset[str]] = frozenset()  # of these: one number for all weights, while they have the same
    policies: ClassVar[tuple[MomentumPolicy, ...]] = ("reset", "carry")

    def __init__(
        self,
        params: ParamsT,
        mask: Mask | None,
        defaults: dict[str, Any],
        *,
        clip_norm: float | None = None,
        rescale: bool = False,
        dense: Collection[str] = (),
        penalty: Penalty | None = None,
        correction: Correction | None = None,
    ) -> None:
        super().__init__(params, defaults)
        self.clip_norm, self.rescale, self.dense = clip_norm, rescale, dense
        self.penalty, self.correction = penalty, correction
        self._names = dict(
            zip((one for _, one in self._parameters()), self._given_names() or map(str, count()), strict=False)
        )
        self._select(mask)

    @staticmethod
    def advance(
        weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], silence: Select
    ) -> None:
        """Change selected weights of one tensor in place, and their state, which is empty before the first step.

        `group` holds the settings; `silence` puts zeros where a selected weight is not active.
        """
        raise NotImplementedError

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
        state = self.state.get(parameter, {})
        selection.change(parameter, lambda weights: self.advance(weights, gradient, state, group, selection.silence))
        if state:
            self.state[parameter] = state

    def set_mask(self, mask: Mask | None, momentum: MomentumPolicy = "reset") -> None:
        """From now on other weights are active. What becomes of the momentum there was:

        reset: it is forgotten; the next step is a first step. carry: it stays where weights are still active, and
        starts from zero for the newly active. leak (SparseSGDM only): it also stays at frozen weights, and moves them
        while it decays.
        """
        state = self.export_momentum() if self._known(momentum) != "reset" else {}
        self.state.clear()
        self._select(mask)
        self.import_momentum(state, momentum)

    @torch.no_grad()
    def export_momentum(self) -> dict[str, Tensor]:
        """What is remembered of all parameters, and the packed mask of where it belongs; {} before a step.

        Each name in `remembers` has one vector with a number for each weight, or for all of them if it is `shared`.
        """
        vectors: dict[str, list[Tensor]] = {name: [] for name in self.remembers}
        positions = []
        for _, parameter in self._parameters():
            selection, state = self._selections[parameter], self.state.get(parameter)
            if selection is None or not state:
                positions.append(torch.zeros(parameter.numel(), dtype=torch.bool))
                continue
            there = selection.moving(parameter).flatten()
            positions.append(there.cpu())
            for name, key in self.remembers.items():
                numbers = state[key].to(parameter.device)
                if numbers.ndim == 0:  # one for all
                    vectors[name].append(numbers.expand(int(there.count_nonzero())))
                else:
                    vectors[name].append(numbers.flatten() if selection.held is None else numbers[there])
        if not any(vectors.values()):
            return {}
        exported = {name: self._joined(name, parts) for name, parts in vectors.items()}
        return exported | {"mask": Mask.pack(self._shapes(), torch.cat(positions)).bits}

    def _joined(self, name: str, parts: list[Tensor]) -> Tensor:
        ends = [end for part in parts for end in part.aminmax()] if name in self.shared else []
        return parts[0][0].reshape(1).clone() if ends and min(ends) == max(ends) else torch.cat(parts)

    @torch.no_grad()
    def import_momentum(self, state: dict[str, Tensor], momentum: MomentumPolicy = "carry") -> None:
        """Go on with the momentum that another optimizer of these parameters exported, as `set_mask` does."""
        if self._known(momentum) == "reset" or not state:
            return
        old = Mask(self._shapes(), state["mask"].cpu())
        counts, parts = list(old.counts().values()), {}
        for name in self.remembers:
            is_one_for_all = name in self.shared and len(state[name]) == 1
            values = state[name].expand(sum(counts)) if is_one_for_all else state[name]
            parts[name] = values.split(counts)  # ValueError if it is not as long as the mask says
        for number, (group, parameter) in enumerate(self._parameters()):
            where, buffers = old[str(number)].to(parameter.device), {}
            for name, key in self.remembers.items():
                part = parts[name][number]
                buffers[key] = torch.zeros(parameter.shape, dtype=part.dtype, device=parameter.device)
                buffers[key][where] = part.to(buffers[key])
            self._go_on(group, parameter, buffers, momentum)

    def _go_on(
        self, group: dict[str, Any], parameter: Tensor, buffers: dict[str, Tensor], momentum: MomentumPolicy
    ) -> None:
        """Take the state of one tensor, in its shape, with zeros where there was none."""
        selection = self._selections[parameter]
        if selection is not None:
            self.state[parameter] = {key: selection.gather(buffer) for key, buffer in buffers.items()}

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and the digest of the mask: momentum is laid out by it, one number after another."""
        return super().state_dict() | {"mask": self._selected().digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, for the state of an optimizer with the same mask. The state of torch's own has a full one."""
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
            name = type(self).__name__
            raise ValueError(f"{name} needs contiguous parameters; call .contiguous() on those in channels_last")
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
            one: self._selection_of(mask[name].to(one.device))
            if name in mask.shapes
            else (Selection() if one in self._outside else None)
            for name, one in found.items()
        }

    def _selection_of(self, active: Tensor, moving: Tensor | None = None) -> Selection | None:
        return Selection.of(active, moving, len(self.remembers) - len(self.shared))

    def _known(self, momentum: MomentumPolicy) -> MomentumPolicy:
        if momentum not in self.policies:
            raise ValueError(f"momentum is one of {', '.join(self.policies)}, not {momentum}")
        return momentum

    def _given_names(self) -> list[str]:
        return [name for group in self.param_groups for name in group.get("param_names", ())]

    def _parameters(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        return ((group, parameter) for group in self.param_groups for parameter in group["params"])

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all parameters, for a mask that needs no names of them."""
        return {str(number): tuple(parameter.shape) for number, (_, parameter) in enumerate(self._parameters())}
