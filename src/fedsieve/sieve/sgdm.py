"""SparseSGDM: SGD with momentum that moves, and remembers, only the weights that a mask leaves active."""

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fedsieve.sieve.mask import Mask
from fedsieve.sieve.masked_optimizer import GradientSettings, MaskedOptimizer, MomentumPolicy
from fedsieve.sieve.weight_selection import Select


class SparseSGDM(MaskedOptimizer):
    """torch.optim.SGD for the active weights of a mask; frozen ones keep their bits, and have no momentum.

    With g the gradient of the active weights (see `MaskedOptimizer`): d = g + weight_decay * w;
    v = d at first, then momentum * v + (1 - dampening) * d;  w -= lr * (d + momentum * v if nesterov else v).
    With a full mask the result is that of SGD to the last bit.
    """

    remembers: ClassVar = {"momentum": "momentum_buffer"}
    policies: ClassVar = ("reset", "carry", "leak")

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
        **more: Unpack[GradientSettings],
    ) -> None:
        if min(lr, momentum, weight_decay) < 0:
            raise ValueError("lr, momentum and weight_decay must not be negative")
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError("nesterov needs momentum, and no dampening")
        settings = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, mask, settings | {"nesterov": nesterov}, **more)

    @staticmethod
    def advance(
        weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], silence: Select
    ) -> None:
        """The step of torch.optim.SGD, operation by operation (their rounding counts)."""
        momentum = group["momentum"]
        if group["weight_decay"] != 0:
            gradient = silence(gradient.add(weights, alpha=group["weight_decay"]))
        if momentum != 0:
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = state["momentum_buffer"] = gradient.clone()
            else:
                buffer.mul_(momentum).add_(gradient, alpha=1 - group["dampening"])
            gradient = gradient.add(buffer, alpha=momentum) if group["nesterov"] else buffer
        weights.add_(gradient, alpha=-group["lr"])

    def _go_on(
        self, group: dict[str, Any], parameter: Tensor, buffers: dict[str, Tensor], momentum: MomentumPolicy
    ) -> None:
        if group["momentum"] == 0:
            return
        if momentum == "leak":
            selection, moving = self._selections[parameter], buffers["momentum_buffer"] != 0
            active = torch.zeros_like(moving) if selection is None else selection.active(parameter)
            self._selections[parameter] = self._selection_of(active, moving)
        super()._go_on(group, parameter, buffers, momentum)
