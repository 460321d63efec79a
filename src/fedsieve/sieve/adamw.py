"""SparseAdamW: AdamW that moves, and remembers, only the weights that a mask leaves active."""

import math
from typing import Any, ClassVar, Unpack

import torch
from pydantic import Field
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fedsieve.config.refusals import leaking
from fedsieve.config.settings import Settings as AnySettings
from fedsieve.sieve.mask import Mask
from fedsieve.sieve.masked_optimizer import GradientSettings, MaskedOptimizer, MomentumPolicy
from fedsieve.sieve.weight_selection import Select


class SparseAdamW(MaskedOptimizer):
    """torch.optim.AdamW for the active weights of a mask; others have no moments (Loshchilov and Hutter, ICLR 2019).

    With g the gradient of the active weights (see `MaskedOptimizer`) and t the steps that a weight has taken, this one
    included:

        w -= lr * weight_decay * w;  m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2
        w -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    With a full mask the result is that of AdamW to the last bit. `set_mask(mask, "carry")` keeps m, v and t where
    weights stay active; newly active ones start with m = v = t = 0. With the others' t their steps would be up to 6.6
    times too long, since m grows faster from zero than sqrt(v). So t is kept for each weight from then on, a third
    number besides m and v; until then, and after "reset", there is one for each tensor.
    """

    remembers: ClassVar = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "step": "step"}
    shared: ClassVar = frozenset({"step"})
    refuses: ClassVar = (leaking("frozen weights have no moments that could go on moving them; use reset or carry"),)

    class Settings(AnySettings):
        """In an experiment."""

        beta1: float = Field(0.9, ge=0, lt=1)
        beta2: float = Field(0.999, ge=0, lt=1)
        eps: float = Field(1e-8, gt=0, le=1)

        def arguments(self) -> dict[str, Any]:
            return {"betas": (self.beta1, self.beta2), "eps": self.eps}

    def __init__(
        self,
        params: ParamsT,
        mask: Mask | None = None,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **more: Unpack[GradientSettings],
    ) -> None:
        if min(lr, eps, weight_decay) < 0:
            raise ValueError("lr, eps and weight_decay must not be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("betas are from 0 to below 1")
        super().__init__(params, mask, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **more)

    @staticmethod
    def advance(
        weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], silence: Select
    ) -> None:
        """The step of torch.optim.AdamW, operation by operation (their rounding counts)."""
        lr, (beta1, beta2) = group["lr"], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        steps = state["step"] = state["step"] + 1
        if group["weight_decay"] != 0:
            weights.mul_(1 - lr * group["weight_decay"])
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if steps.ndim == 0:
            taken = steps.item()
            root = (square.sqrt() / (1 - beta2**taken) ** 0.5).add_(group["eps"])
            weights.addcdiv_(mean, root, value=-(lr / (1 - beta1**taken)))
        else:  # a number for each weight
            steps = steps.to(weights.device)
            root = square.div(_bias(beta2, steps)).sqrt_().add_(group["eps"])
            weights.addcdiv_(mean / _bias(beta1, steps), root, value=-lr)

    def _go_on(
        self, group: dict[str, Any], parameter: Tensor, buffers: dict[str, Tensor], momentum: MomentumPolicy
    ) -> None:
        super()._go_on(group, parameter, buffers, momentum)
        selection = self._selections[parameter]
        if selection is not None:
            fewest, most = buffers["step"][selection.moving(parameter)].aminmax()
            if fewest == most:  # as in all runs whose mask stays the same
                self.state[parameter]["step"] = most.cpu()


def _bias(beta: float, steps: Tensor) -> Tensor:
    """1 - beta^steps, which is close to 0 at first: without cancellation."""
    return -torch.expm1(steps * (math.log(beta) if beta else -math.inf))
