"""How sensitive a model's prediction is to each of its weights: the diagonal of its Fisher information.

With g(x, y) the gradient of log p(y | x) by the weights, and all squares taken weight by weight,

    exact      F = mean over x of mean over y ~ p(. | x) of g(x, y)^2     labels drawn from the model's own prediction
    empirical  F = mean over (x, y) of g(x, y)^2                          the data's labels
    batch      F = mean over batches of (mean over the batch of g)^2      the data's labels; biased, see docs/sieve.md

`exact` is what sparse model editing is built on (TaLoS, Iurada et al., ICLR 2025). Squares of per-sample
gradients are not to be had from a batch's gradient, and one backward pass per sample is slow. So one pass
carries the whole batch, and at each layer its input and the gradient by its output give every sample's
weight gradient, squared and added up at once (`layerwise.py`). Parameters that this is not right for get one
backward pass per sample: those of other kinds of layers, and of layers that are used twice, whose weights are also
used elsewhere, or whose input is not (batch, …). One sample is done both ways to find out.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsieve.errors import RunError
from fedsieve.sieve.eager import eagerly
from fedsieve.sieve.layerwise import Totals, layers_with_rules, watch
from fedsieve.sieve.mask import Mask

ADVICE = "; more fisher.samples may help, or a lower lr before it if the loss exploded"  # outputs that saturate
Batches = Iterable[tuple[Tensor, Tensor]]  # inputs and labels
Warn = Callable[[str], None]
SAME_GRADIENT = 0.01  # how far two ways to a layer's gradient may differ, relative to its norm: TF32 rounds to 0.001
ROUNDING_NOISE = 1e-5  # and relative to the norm of all of them: some gradients are zero but for rounding


def as_python_warning(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def sensitivity(
    network: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    batches: Batches,
    kind: str = "exact",
    draws: int = 1,
    generator: torch.Generator | None = None,
    warn: Warn = as_python_warning,
) -> tuple[Tensor, int]:
    """The sum of the squared gradients by `parameters`, laid one after another, and how many were added.

    The quotient is F, and the sums of several clients may be added up. The network runs in evaluation mode, and not
    compiled, since compiled code does not tell what goes in and out of layers.
    """
    totals = Totals(parameters)
    with eagerly(), _evaluating(network), torch.enable_grad():
        count = _batch(network, totals, batches) if kind == "batch" else 0
        if kind != "batch":
            count = _per_sample(network, totals, batches, draws if kind == "exact" else 0, generator, warn)
    return totals.flat, count


def summed_gradients(
    network: nn.Module, parameters: Mapping[str, nn.Parameter], batches: Batches
) -> tuple[Tensor, int]:
    """The sum over samples of the gradient of the loss by `parameters`, laid one after another, and how many they were.

    The quotient is the gradient of the mean loss; sums of several clients may be added up. The network runs in
    evaluation mode, as for sensitivity.
    """
    totals, count, chosen = Totals(parameters), 0, list(parameters.values())
    with eagerly(), _evaluating(network), torch.enable_grad(), _requiring_gradients(chosen):
        for inputs, labels in batches:
            loss = F.cross_entropy(network(inputs), labels, reduction="sum")
            for parameter, gradient in zip(chosen, torch.autograd.grad(loss, chosen, allow_unused=True), strict=True):
                if gradient is not None:
                    totals.of[parameter].add_(gradient)
            count += len(labels)
    return totals.flat, count


def must_tell_weights_apart(scores: Tensor, active: Mask) -> None:
    """RunError that names the first tensor whose scores are not finite, or all zero though it has active weights."""
    counts, sizes = active.counts(), [math.prod(shape) for shape in active.shapes.values()]
    for name, part in zip(active.shapes, scores.split(sizes), strict=True):
        if not torch.isfinite(part).all():
            raise RunError(f"the sensitivity of {name} is not finite; the model's scores or gradients overflow")
        if counts[name] and not part.any():
            raise RunError(f"the sensitivity of {name} is zero everywhere, so its weights cannot be told apart{ADVICE}")


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
    with _requiring_gradients(parameters):
        gradients = torch.autograd.grad(F.cross_entropy(network(inputs), labels), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            totals.of[parameter].addcmul_(gradient, gradient)


def _batch(network: nn.Module, totals: Totals, batches: Batches) -> int:
    count = 0
    for inputs, labels in batches:
        _add_plain_gradient(network, inputs, labels, totals.parameters, totals)
        count += 1
    return count


def _per_sample(
    network: nn.Module, totals: Totals, batches: Batches, draws: int, generator: torch.Generator | None, warn: Warn
) -> int:
    """`draws` labels per sample from the model's prediction, or 0: the data's."""
    count, layers = 0, None
    for inputs, labels in batches:
        layers = _trusted_layers(network, totals, inputs[:1], warn) if layers is None else layers
        with _watched(layers, totals, len(inputs)) as uses:
            scores = network(inputs)
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


@contextmanager
def _watched(layers: list[nn.Module], totals: Totals, batch: int) -> Iterator[dict[nn.Module, list[bool]]]:
    """Let the layers' rules work on what passes through `layers` within this context; how each of them was used."""
    uses: dict[nn.Module, list[bool]] = {layer: [] for layer in layers}
    hooks = [watch(layer, totals, uses[layer], batch) for layer in layers]
    try:
        yield uses
    finally:
        for hook in hooks:
            hook.remove()


def _trusted_layers(network: nn.Module, totals: Totals, sample: Tensor, warn: Warn) -> list[nn.Module]:
    """The layers whose rule gives the gradient of one sample that autograd gives; a warning if a rule does not.

    Alone, a sample also shows which layers do not have the batch as their first dimension. Its label is the least
    likely one, for which no gradient vanishes. `totals` are empty before and after.
    """
    layers = layers_with_rules(network, totals)
    owned = {layer: [one for one in layer.parameters(recurse=False) if one in totals.of] for layer in layers}
    parameters = [one for layer in layers for one in owned[layer]]
    if not parameters:
        return []
    with _watched(layers, totals, batch=1) as uses, _requiring_gradients(parameters):
        scores = network(sample)
        likelihood = F.log_softmax(scores, dim=1)[0, scores[0].argmin()]
        gradients = dict(zip(parameters, torch.autograd.grad(likelihood, parameters, allow_unused=True), strict=True))
    norms, errors = [], []
    for layer in layers:
        pairs = [(gradients[one], totals.of[one].sqrt()) for one in owned[layer]]
        pairs = [(torch.zeros_like(ours) if plain is None else plain.abs(), ours) for plain, ours in pairs]
        norms.append(torch.stack([plain.norm() for plain, _ in pairs]).norm())
        errors.append(torch.stack([(plain - ours).norm() for plain, ours in pairs]).norm())
    totals.flat.zero_()
    tolerance = max(SAME_GRADIENT, 30 * torch.finfo(totals.flat.dtype).eps)
    allowed = tolerance * torch.stack(norms) + ROUNDING_NOISE * torch.stack(norms).norm()
    wrong = dict(zip(layers, (torch.stack(errors) > allowed).tolist(), strict=True))
    slow = [layer for layer in layers if uses[layer] and (uses[layer] != [True] or wrong[layer])]
    if slow:
        names = {module: name for name, module in network.named_modules()}
        some = ", ".join(names[layer] for layer in slow[:3]) + (f" and {len(slow) - 3} more" if len(slow) > 3 else "")
        warn(
            f"the sensitivity of {some} takes one backward pass per sample, which is slow: these layers are used more "
            "than once, their weights also elsewhere, or the first dimension of their input is not the batch"
        )
    return [layer for layer in layers if uses[layer] == [True] and not wrong[layer]]


@contextmanager
def _requiring_gradients(parameters: list[nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


def _drawn_labels(scores: Tensor, draws: int, generator: torch.Generator | None) -> Tensor:
    """(batch, draws) labels from the model's own prediction."""
    probabilities = scores.detach().double().softmax(dim=1).cpu()  # the generator lives on the CPU
    if not torch.isfinite(probabilities).all():
        raise RunError("the model's scores are not finite, so no sensitivity can be measured; lower lr before it")
    return torch.multinomial(probabilities, draws, replacement=True, generator=generator).to(scores.device)
