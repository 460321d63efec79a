"""Backward passes that compute only what a mask lets change: no gradient of a frozen tensor, and only active rows."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedsieve.sieve.eager import eagerly
from fedsieve.sieve.mask import Mask


def active_rows(active: Tensor) -> Tensor | None:
    """Numbers of the active rows (of the first dimension), or None if some row is active only in part."""
    if active.ndim < 2:
        return None
    weights = active.flatten(1)
    first = weights[:, :1]
    return first.any(1).nonzero().flatten() if torch.equal(weights, first.expand_as(weights)) else None


@contextmanager
def only_active(network: nn.Module, parameters: Mapping[str, nn.Parameter], mask: Mask) -> Iterator[None]:
    """Within this context, a backward pass through `network` computes only gradients that `mask` has a use for.

    Parameters without an active weight, or unknown to the mask, do not require a gradient, so the backward pass
    ends at the earliest active tensor. A Linear layer of which whole rows are active gets the gradient of just
    these rows, as a sparse tensor (`MaskedOptimizer` takes it as it is). With either, a compiled network runs as it is
    written, since every mask would have it compiled again.
    """
    counts = mask.counts()
    frozen = [parameter for name, parameter in parameters.items() if not counts.get(name)]
    rows_of = {
        id(one): rows for name, one in parameters.items() if (rows := _some_rows(mask, name, counts)) is not None
    }
    linears = [one for one in network.modules() if type(one) is nn.Linear and id(one.weight) in rows_of]
    linears = [one for one in linears if "forward" not in vars(one)]  # else somebody has changed what it does
    required = [parameter.requires_grad for parameter in frozen]
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for linear in linears:
            vars(linear)["forward"] = _rows_forward(linear, rows_of[id(linear.weight)].to(linear.weight.device))
        with eagerly() if frozen or linears else nullcontext():
            yield
    finally:
        for linear in linears:
            vars(linear).pop("forward", None)  # so that the method of the class is found again
            linear.weight.grad = None  # it is sparse, and only this context's user expects that
        for parameter, before in zip(frozen, required, strict=True):
            parameter.requires_grad_(before)
            parameter.grad = None


def _some_rows(mask: Mask, name: str, counts: Mapping[str, int]) -> Tensor | None:
    """The active rows of a tensor of the mask, if there are whole rows, but not all."""
    some = name in mask.shapes and 0 < counts[name] < mask[name].numel()
    return active_rows(mask[name]) if some else None


def _rows_forward(linear: nn.Linear, rows: Tensor) -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        return _LinearOfRows.apply(inputs, linear.weight, linear.bias, rows)

    return forward


class _LinearOfRows(torch.autograd.Function):
    """inputs @ weight.T + bias, with the gradient of some rows of the weight only.

    Under autocast it computes in autocast's type both ways, as F.linear does; autograd gives each gradient the type of
    what it belongs to.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
        of_inputs, of_weight = ctx.needs_input_grad[:2]
        ctx.weight_shape = weight.shape
        dtype = _computed_in(weight)
        inputs, weight = inputs.to(dtype), weight.to(dtype)
        ctx.save_for_backward(inputs if of_weight else None, weight if of_inputs else None, rows)
        return F.linear(inputs, weight, None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        inputs, weight, rows = ctx.saved_tensors
        of_inputs, of_weight, of_bias, _ = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        input_gradient = gradient @ weight if of_inputs else None
        weight_gradient = None
        if of_weight:
            values = flat.index_select(1, rows).t() @ inputs.reshape(-1, inputs.shape[-1])
            weight_gradient = torch.sparse_coo_tensor(
                rows[None], values, ctx.weight_shape, is_coalesced=True, check_invariants=False
            )
        return input_gradient, weight_gradient, flat.sum(0) if of_bias else None, None


def _computed_in(weight: Tensor) -> torch.dtype:
    """The type in which F.linear computes: the weight's own, or what autocast makes of it (float64 it leaves alone)."""
    kind = weight.device.type
    lowered = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if lowered else weight.dtype
