"""How sensitive a model's prediction is to each of its weights: the diagonal of its Fisher information.

With g(x, y) the gradient of log p(y | x) by the weights, and all squares taken weight by weight,

    exact      F = mean over x of mean over y ~ p(. | x) of g(x, y)^2     labels drawn from the model's own prediction
    empirical  F = mean over (x, y) of g(x, y)^2                          the data's labels
    batch      F = mean over batches of (mean over the batch of g)^2      the data's labels; biased, see docs/sieve.md

`exact` is what sparse model editing is built on (TaLoS, Iurada et al., ICLR 2025). Squares of per-sample
gradients are not to be had from a batch's gradient, and one backward pass per sample is slow. So one pass
carries the whole batch, and at each layer its input and the gradient by its output give every sample's
weight gradient, squared and added up at once: no more than one sample's gradient of one layer is ever held.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from fedsieve.errors import RunError
from fedsieve.model.vit import LayerScale, ViT
from fedsieve.sieve.eager import eagerly
from fedsieve.sieve.mask import Mask

Batches = Iterable[tuple[Tensor, Tensor]]  # inputs and labels


def sensitivity(
    network: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    batches: Batches,
    kind: str = "exact",
    draws: int = 1,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, int]:
    """The sum of the squared gradients by `parameters`, laid one after another, and how many were added.

    The quotient is F, and the sums of several clients may be added up. The network runs in evaluation mode, and not
    compiled, since compiled code does not tell what goes in and out of layers.
    """
    totals = Totals(parameters)
    with eagerly(), _evaluating(network), torch.enable_grad():
        count = _batch(network, totals, batches) if kind == "batch" else 0
        if kind != "batch":
            count = _per_sample(network, totals, batches, draws if kind == "exact" else 0, generator)
    return totals.flat, count


def must_tell_weights_apart(scores: Tensor, active: Mask) -> None:
    """RunError that names the first tensor whose scores are not finite, or all zero though it has active weights."""
    counts, sizes = active.counts(), [math.prod(shape) for shape in active.shapes.values()]
    for name, part in zip(active.shapes, scores.split(sizes), strict=True):
        if not torch.isfinite(part).all():
            raise RunError(f"the sensitivity of {name} is not finite; the model's scores or gradients overflow")
        if counts[name] and not part.any():
            raise RunError(f"the sensitivity of {name} is zero everywhere, so its weights cannot be told apart")


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


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no gradients by weights unless asked for; as before afterwards."""
    modes = [(module, module.training) for module in network.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in network.parameters()]
    network.eval().requires_grad_(False)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _add_plain_gradient(
    network: nn.Module, inputs: Tensor, labels: Tensor, parameters: list[nn.Parameter], totals: Totals
) -> None:
    """Add the square of the gradient of the mean loss of a batch."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    gradients = torch.autograd.grad(F.cross_entropy(network(inputs), labels), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(False)
        if gradient is not None:
            totals.of[parameter].addcmul_(gradient, gradient)


def _batch(network: nn.Module, totals: Totals, batches: Batches) -> int:
    count = 0
    for inputs, labels in batches:
        _add_plain_gradient(network, inputs, labels, totals.parameters, totals)
        count += 1
    return count


def _per_sample(
    network: nn.Module, totals: Totals, batches: Batches, draws: int, generator: torch.Generator | None
) -> int:
    """`draws` labels per sample from the model's prediction, or 0: the data's."""
    count, layers = 0, _layers_with_rules(network, totals)
    for inputs, labels in batches:
        uses: dict[nn.Module, list[bool]] = {layer: [] for layer in layers}
        hooks = [_watch(layer, totals, uses[layer], len(inputs)) for layer in layers]
        try:
            scores = network(inputs)
        finally:
            for hook in hooks:
                hook.remove()
        ruled = {one for layer in layers if uses[layer] == [True] for one in layer.parameters(recurse=False)}
        others = [parameter for parameter in totals.parameters if parameter not in ruled]
        chosen = _drawn_labels(scores, draws, generator) if draws else labels[:, None]
        for column in chosen.T if ruled else ():
            likelihood = F.log_softmax(scores, dim=1).gather(1, column[:, None]).sum()
            likelihood.backward(retain_graph=True)
        for sample, of_sample in zip(inputs, chosen, strict=True) if others else ():
            for label in of_sample:
                _add_plain_gradient(network, sample[None], label[None], others, totals)
        count += chosen.numel()
    return count


def _drawn_labels(scores: Tensor, draws: int, generator: torch.Generator | None) -> Tensor:
    """(batch, draws) labels from the model's own prediction."""
    probabilities = scores.detach().double().softmax(dim=1).cpu()  # the generator lives on the CPU
    if not torch.isfinite(probabilities).all():
        raise RunError("the model's scores are not finite, so no sensitivity can be measured; lower lr before it")
    return torch.multinomial(probabilities, draws, replacement=True, generator=generator).to(scores.device)


# ------------------------------------------------------- what each kind of layer makes of input and output gradient
# Parameters of any other kind, and those of layers that are used twice or on something else than (batch, …), get
# one backward pass per sample above: slow, and always right.


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


def _watch(layer: nn.Module, totals: Totals, uses: list[bool], batch: int) -> RemovableHandle:
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


def _layers_with_rules(network: nn.Module, totals: Totals) -> list[nn.Module]:
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
