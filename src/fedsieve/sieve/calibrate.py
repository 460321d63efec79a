"""Calibration: from scores to a mask, in several rounds.

All weights in scope start active, and after round r of R the share `density ** (r / R)` is still active. Each
round scores anew, on a fresh draw of samples, with the weights frozen so far multiplied by `damping`, and
never revives a frozen weight (TaLoS, Iurada et al., ICLR 2025; its released code damps by 0.1). Going step
by step keeps a whole layer from being taken out by one coarse look at it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from fedsieve.config.mask_settings import FisherSettings, MaskSettings
from fedsieve.errors import InputError, PartError
from fedsieve.sieve.choose import choose, unit_sizes
from fedsieve.sieve.mask import Mask, Shapes, shapes_of
from fedsieve.sieve.model_inputs import checked_batches, giving_scores, inputs_and_labels
from fedsieve.sieve.rules import RULES, Evidence, LooksAt
from fedsieve.sieve.sensitivity import (
    Batches,
    Warn,
    as_python_warning,
    must_tell_weights_apart,
    sensitivity,
    summed_gradients,
)


def calibrate_mask(
    shapes: Shapes,
    weights: Tensor,
    measured: Callable[[int, Mask], Tensor],
    settings: MaskSettings,
    generator: torch.Generator,
    client: int | None = None,
) -> Mask:
    """The mask that `settings` ask for; `client` is whose it is, None if all clients share it.

    `measured(round, active)` is what the rule looks at, its `looks_at`, with the weights that are not active damped.
    """
    assert settings.sparsity is not None
    density = 1 - settings.sparsity
    active = Mask.full(shapes)
    if density == 1:
        return active
    rounds = settings.calibration_rounds if settings.looks_at_data else 1  # else another look shows the same
    sizes = unit_sizes(shapes, settings.unit)

    def random() -> Tensor:
        draws = torch.rand(len(sizes), dtype=torch.float64, generator=generator)
        return (draws if settings.unit == "weight" else draws.repeat_interleave(sizes)).to(weights.device)

    def look(what: LooksAt, round: int, active: Mask) -> Tensor:
        if settings.looks_at != what:
            raise PartError(f"rule {settings.rule} looks at {what}; declare it: @fedsieve.rule(looks_at='{what}')")
        found = measured(round, active)
        if what == "sensitivity":
            must_tell_weights_apart(found, active)
        return found

    for round in range(1, rounds + 1):
        sensitivity, gradients = (partial(look, what, round, active) for what in ("sensitivity", "gradients"))
        evidence = Evidence(weights, sensitivity, random, gradients, shapes, client)
        active = choose(
            _one_score_each(RULES[settings.rule](evidence), shapes, settings.rule),
            density ** (round / rounds),
            shapes,
            within=active,
            unit=settings.unit,
            across=settings.across,
            keep_alive=settings.keep_alive,
            draw=settings.draw,
        )
    return active


def _one_score_each(scores: Any, shapes: Shapes, rule: str) -> Tensor:
    """The scores that a rule gives; PartError if they are not a number for each weight, or all the same."""
    weights = sum(map(math.prod, shapes.values()))
    if not isinstance(scores, Tensor) or scores.shape != (weights,):
        found = f"a tensor of shape {list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise PartError(f"rule {rule} gives {found}; expected one score for each of {weights:,} weights")
    if weights > 1 and not RULES.is_own(rule):
        least, most = (float(end) for end in scores.aminmax())
        if not (math.isfinite(least) and math.isfinite(most)):
            raise PartError(f"rule {rule} gives scores that are not finite")
        if least == most:
            raise PartError(f"rule {rule} gives every weight the same score, so that there is nothing to choose by")
    return (scores if scores.dtype in (torch.float32, torch.float64) else scores.float()).cpu()


def damped_sensitivity(
    network: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    batches: Batches,
    fisher: FisherSettings,
    active: Mask,
    damping: float,
    generator: torch.Generator,
    warn: Warn = as_python_warning,
) -> tuple[Tensor, int]:
    """`sensitivity` with the weights that are not active multiplied by `damping` in the forward pass."""
    with damped(parameters, active, damping):
        return sensitivity(network, parameters, batches, fisher.kind, fisher.draws, generator, warn)


def damped_gradients(
    network: nn.Module, parameters: Mapping[str, nn.Parameter], batches: Batches, active: Mask, damping: float
) -> tuple[Tensor, int]:
    """`summed_gradients` with the weights that are not active multiplied by `damping` in the forward pass."""
    with damped(parameters, active, damping):
        return summed_gradients(network, parameters, batches)


@contextmanager
@torch.no_grad()
def damped(parameters: Mapping[str, nn.Parameter], active: Mask, damping: float) -> Iterator[None]:
    """Within this context, weights that are not active are multiplied by `damping`; the same bits afterwards."""
    partly = [(one, active[name]) for name, one in parameters.items()] if active.active < active.size else []
    saved = [(one, one.detach().clone(), keep.to(one.device)) for one, keep in partly if not keep.all()]
    try:
        for one, value, keep in saved:
            one.copy_(torch.where(keep, value, value * damping))
        yield
    finally:
        for one, value, _ in saved:
            one.copy_(value)


def calibrate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor] | Mapping[str, Tensor]],
    sparsity: float,
    *,
    rule: str = "least_sensitive",
    rounds: int = 4,
    damping: float = 0.1,
    kind: Literal["exact", "empirical", "batch"] = "exact",
    samples: int = 512,
    draws: int = 1,
    unit: Literal["weight", "row", "tensor"] = "weight",
    across: Literal["model", "tensor"] = "model",
    keep_alive: int = 1,
    parameters: Mapping[str, nn.Parameter] | None = None,
    seed: int = 42,
) -> Mask:
    """A mask for any module that gives class scores: `sparsity` of the weights of `parameters` are frozen.

    `batches` gives (inputs, labels), or dicts of a model's arguments and `labels`, and is gone through once each
    calibration round, until `samples` were seen: a shuffled DataLoader, or a list. The module may also give an object
    with `logits`, as models of transformers do. `parameters` are all that require a gradient unless given; the mask
    has their names, so that it fits `SparseSGDM(model.named_parameters(), mask)`. The rules are
    those of `fedsieve.sieve.rules.RULES`. The first dimension of inputs must be the batch. Layers that have something
    else there, or whose weights are also used elsewhere, take one backward pass per sample, with a warning.
    """
    chosen = _chosen(model, parameters)
    if not isinstance(seed, Integral) or not -(2**63) <= seed < 2**64:
        raise InputError(f"seed is {str(seed)[:60]!r}; give a whole number of 64 bits")
    try:
        settings = MaskSettings(
            rule=rule,
            sparsity=float(sparsity) if isinstance(sparsity, Real) else sparsity,  # also numpy's
            calibration_rounds=rounds,
            damping=float(damping) if isinstance(damping, Real) else damping,
            fisher=FisherSettings(kind=kind, samples=samples, draws=draws),
            unit=unit,
            across=across,
            keep_alive=keep_alive,
        )
    except ValidationError as error:
        raise InputError(_explained(error)) from None
    if settings.looks_at_data and not (isinstance(batches, Iterable) or hasattr(batches, "__getitem__")):
        raise InputError(f"batches is of type {type(batches).__name__}; give a list of batches or a DataLoader")
    generator = torch.Generator().manual_seed(int(seed))

    def measured(_: int, active: Mask) -> Tensor:
        uses_labels = settings.looks_at == "gradients" or settings.fisher.kind != "exact"
        some = checked_batches(model, _first_samples(batches, samples), uses_labels)
        damping = settings.damping
        if settings.looks_at == "gradients":
            total, count = damped_gradients(model, chosen, some, active, damping)
        else:
            total, count = damped_sensitivity(model, chosen, some, settings.fisher, active, damping, generator)
        if count == 0:
            raise InputError("batches gave no samples; pass a list or a DataLoader, it is gone through once a round")
        return total / count

    weights = torch.cat([one.detach().flatten() for one in chosen.values()])
    with giving_scores(model):
        return calibrate_mask(shapes_of(chosen.items()), weights, measured, settings, generator)


def _chosen(model: nn.Module, parameters: Mapping[str, nn.Parameter] | None) -> dict[str, nn.Parameter]:
    """The parameters that a mask is for."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is of type {type(model).__name__}; give an nn.Module")
    if parameters is None:
        chosen = {name: one for name, one in model.named_parameters() if one.requires_grad}
        if not chosen:
            raise InputError(
                "no parameter of the model requires a gradient, so there is nothing to choose from; name some"
            )
        return chosen
    if not isinstance(parameters, Mapping):
        raise InputError(f"parameters is of type {type(parameters).__name__}; give a dict of names and parameters")
    if not parameters:
        raise InputError("parameters is empty; name some, or leave it out for all that require a gradient")
    own = {id(one) for one in model.parameters()}
    for name, one in parameters.items():
        if id(one) not in own:
            raise InputError(
                f"parameters: '{name}' is no parameter of the model; take them from model.named_parameters()"
            )
    return dict(parameters)


def _explained(error: ValidationError) -> str:
    """The first problem with an argument, in one line."""
    problem = error.errors(include_url=False)[0]
    name = {"calibration_rounds": "rounds"}.get(str(problem["loc"][-1]), problem["loc"][-1]) if problem["loc"] else ""
    text = problem["msg"].replace("Input should", "it should").removeprefix("Value error, ")
    return f"{name} is {str(problem['input'])[:60]}; {text}" if name else text


def _first_samples(batches: Iterable[Any], samples: int) -> Iterator[tuple[Any, Tensor]]:
    seen = 0
    for inputs, labels in map(inputs_and_labels, batches):
        yield inputs[: samples - seen], labels[: samples - seen]
        seen += len(labels)
        if seen >= samples:
            return
