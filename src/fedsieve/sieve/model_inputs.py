"""Batches and models as they are: dicts of arguments, and outputs that hold the class scores among other things."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsieve.errors import InputError, RunError, machine_error
from fedsieve.model.outputs import scores_of

LABELS = ("labels", "label")


@dataclass(frozen=True)
class Arguments:
    """The arguments of a model for a batch. It is cut like a tensor: by samples."""

    named: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.named.values())))

    def __getitem__(self, index: Any) -> "Arguments":
        return Arguments({name: tensor[index] for name, tensor in self.named.items()})

    def __iter__(self) -> Iterator["Arguments"]:
        return (self[sample] for sample in range(len(self)))


Batch = tuple[Tensor | Arguments, Tensor]


def inputs_and_labels(batch: Any) -> Batch:
    """The two parts of a batch: a pair, or a dict in which labels are called so."""
    expected = "a batch is a pair of inputs and labels, or a dict such as {'pixel_values': …, 'labels': …}"
    inputs: Any = None
    labels: Any = None
    if isinstance(batch, Mapping):
        name = next((name for name in LABELS if name in batch), None)
        labels = batch[name] if name is not None else None
        inputs = {key: value for key, value in batch.items() if key != name}
    elif isinstance(batch, list | tuple) and len(batch) == 2:
        inputs, labels = batch
        inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    named: dict[str, Any] = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    if not isinstance(labels, Tensor) or not named or not all(isinstance(one, Tensor) for one in named.values()):
        there = f"a dict with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        raise InputError(f"batches gave {there}; {expected}, all of them tensors")
    if any(one.ndim == 0 or len(one) != len(labels) for one in named.values()):
        raise InputError(f"batches gave inputs and {labels.numel()} labels that do not go together; {expected}")
    return (Arguments(inputs) if isinstance(inputs, dict) else inputs), labels


def checked_batches(model: nn.Module, batches: Iterable[Batch], uses_labels: bool) -> Iterator[Batch]:
    """The same batches without empty ones, with labels as whole numbers; to be read within `giving_scores`.

    InputError if the model cannot work on the first sample, or if labels that are used are none of its classes.
    """
    classes = None
    for inputs, labels in batches:
        if not len(labels):
            continue
        classes = _scores_of_one(model, inputs[:1]).shape[1] if classes is None else classes
        if uses_labels:
            if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
                what = f"{str(labels.dtype).removeprefix('torch.')} of shape {list(labels.shape)}"
                raise InputError(f"labels are {what}; give a whole number for each sample")
            if not 0 <= (least := int(labels.min())) <= (most := int(labels.max())) < classes:
                wrong = least if least < 0 else most
                raise InputError(f"a label is {wrong}, and the model has {classes} classes; labels count from 0")
            labels = labels.long()
        yield inputs, labels


def _scores_of_one(model: nn.Module, inputs: Tensor | Arguments) -> Tensor:
    try:
        with torch.no_grad():
            scores = model(inputs)
    except (InputError, RunError):
        raise
    except Exception as error:
        if (known := machine_error(error)) is not None:
            raise known from error
        reason = (str(error).strip().splitlines() or [""])[0]
        what = f"the model fails on a sample of the batches ({type(error).__name__}: {reason})"
        raise InputError(f"{what}; give inputs that it takes") from error
    if scores.ndim != 2:
        raise InputError(f"the model gives scores of shape {list(scores.shape)} for a sample; expected one per class")
    return scores


@contextmanager
def giving_scores(model: nn.Module) -> Iterator[None]:
    """Within this context the model also takes `Arguments`, and gives its class scores alone.

    It is not wrapped, so all of its tensors and layers keep their names.
    """

    def spread(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((), {**inputs[0].named, **named}) if inputs and isinstance(inputs[0], Arguments) else (inputs, named)

    def scores(_: nn.Module, __: Any, output: Any) -> Tensor:
        try:
            return scores_of(output)
        except TypeError as error:
            raise InputError(str(error)) from None

    hooks: list[torch.utils.hooks.RemovableHandle] = [
        model.register_forward_pre_hook(spread, with_kwargs=True),
        model.register_forward_hook(scores),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
