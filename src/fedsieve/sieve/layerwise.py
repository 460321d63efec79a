"""Every sample's squared weight gradients from one backward pass of a batch, layer by layer.

A layer's input and the gradient by its output give the gradient of its weights for each sample. A rule for each kind
of layer squares them and adds them up, so that no more than one sample's gradient of one layer is ever held.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from fedsieve.model.vit import LayerScale, ViT


class Totals:
    """Sums of squared gradients: one vector, with a view for each parameter."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = list(parameters.values())
        sizes, first = [one.numel() for one in self.parameters], self.parameters[0]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        parts = zip(self.parameters, self.flat.split(sizes), strict=True)
        self.of: dict[Tensor | None, Tensor] = {one: part.view(one.shape) for one, part in parts}

    def add(self, parameter: Tensor | None, gradients: Tensor) -> None:
        """Add the squares of per-sample gradients, (batch, …)."""
        if parameter in self.of:
            self.of[parameter].view(-1).add_(gradients.flatten(1).square().sum(dim=0))

    def add_products(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        """Add the squares of the per-sample gradients left[b].T @ right[b], with left and right (batch, places, …)."""
        if parameter not in self.of:
            return
        total = self.of[parameter].view(left.shape[2], right.shape[2])
        gradient = torch.empty_like(total)  # one sample's: this is all the memory it takes
        for one, other in zip(left, right, strict=True):
            torch.mm(one.T, other, out=gradient)
            total.addcmul_(gradient, gradient)


# ------------------------------------------------------- what each kind of layer makes of input and output gradient


def _linear(layer: nn.Linear, inputs: Tensor, gradient: Tensor, totals: Totals) -> None:
    inputs, gradient = _by_place(inputs, layer.in_features), _by_place(gradient, layer.out_features)
    totals.add_products(layer.weight, gradient, inputs)
    totals.add(layer.bias, gradient.sum(dim=1))


def _convolution(layer: nn.Conv2d, inputs: Tensor, gradient: Tensor, totals: Totals) -> None:
    gradient = gradient.flatten(2).transpose(1, 2)
    for image, of_image in zip(inputs, gradient, strict=True):  # one by one: patches may take k^2 times the image
        patches = F.unfold(image[None], layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # type: ignore[arg-type]
        totals.add_products(layer.weight, of_image[None], patches.transpose(1, 2))
    totals.add(layer.bias, gradient.sum(dim=1))


def _layer_norm(layer: nn.LayerNorm, inputs: Tensor, gradient: Tensor, totals: Totals) -> None:
    normalized = F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
    width = layer.weight.numel()
    totals.add(layer.weight, _by_place(gradient * normalized, width).sum(dim=1))
    totals.add(layer.bias, _by_place(gradient, width).sum(dim=1))


def _batch_norm(layer: nn.BatchNorm2d, inputs: Tensor, gradient: Tensor, totals: Totals) -> None:
    normalized = F.batch_norm(inputs, layer.running_mean, layer.running_var, eps=layer.eps)
    totals.add(layer.weight, (gradient * normalized).sum(dim=(2, 3)))
    totals.add(layer.bias, gradient.sum(dim=(2, 3)))


def _layer_scale(layer: LayerScale, inputs: Tensor, gradient: Tensor, totals: Totals) -> None:
    totals.add(layer.gamma, _by_place(gradient * inputs, layer.gamma.numel()).sum(dim=1))


def _tokens(network: ViT, inputs: Tensor, gradient: Tensor, totals: Totals) -> None:
    """The gradient by the tokens before the first block: class token, register tokens, patches."""
    registers = network.shape.registers
    totals.add(network.cls_token, gradient[:, :1])
    totals.add(network.pos_embed, torch.cat((gradient[:, :1], gradient[:, 1 + registers :]), dim=1))
    if registers:
        totals.add(network.register_tokens, gradient[:, 1 : 1 + registers])


def _by_place(tensor: Tensor, width: int) -> Tensor:
    return tensor.reshape(len(tensor), -1, width)


RULES: dict[type[nn.Module], Callable[[Any, Tensor, Tensor, Totals], None]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.LayerNorm: _layer_norm,
    nn.BatchNorm2d: _batch_norm,
    LayerScale: _layer_scale,
    ViT: _tokens,
}


def watch(layer: nn.Module, totals: Totals, uses: list[bool], batch: int) -> RemovableHandle:
    """Let the layer's rule see what goes in, and the gradient by what comes out, of the next pass.

    Each use is noted, and whether it is one that the rule understands; only a single such use counts.
    """
    rule = RULES[type(layer)]

    def watched(inputs: Any, output: Any) -> Any:
        uses.append(isinstance(inputs, Tensor) and isinstance(output, Tensor) and len(inputs) == len(output) == batch)
        if not uses[-1]:
            return output
        if not output.requires_grad:  # the first layer of interest: here the gradient's way ends
            output = output.detach().requires_grad_().clone()
        output.register_hook(lambda gradient: rule(layer, inputs, gradient, totals) if uses == [True] else None)
        return output

    if isinstance(layer, ViT):  # its own parameters have done their work when the first block begins
        return layer.blocks[0].register_forward_pre_hook(lambda _, given: (watched(given[0].detach(), given[0]),))
    return layer.register_forward_hook(lambda _, given, output: watched(given[0].detach() if given else None, output))


def layers_with_rules(network: nn.Module, totals: Totals) -> list[nn.Module]:
    """The layers with parameters of interest that a rule may be right for."""
    modules = list(network.modules())
    owners = Counter(parameter for module in modules for parameter in module.parameters(recurse=False))
    return [
        module
        for module in modules
        if type(module) in RULES
        and _is_plain(module)
        and any(one in totals.of for one in module.parameters(recurse=False))
        and all(owners[one] == 1 for one in module.parameters(recurse=False))
    ]


def _is_plain(layer: nn.Module) -> bool:
    """Whether the layer is of the form that its rule knows."""
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if isinstance(layer, nn.LayerNorm):
        return layer.elementwise_affine
    if isinstance(layer, nn.BatchNorm2d):
        return layer.affine and layer.track_running_stats
    return True
