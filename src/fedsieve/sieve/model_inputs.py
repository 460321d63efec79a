"""Batches and models as they are: dicts of arguments, and outputs that hold the class scores among other things."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsieve.errors import InputError
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


def inputs_and_labels(batch: Any) -> tuple[Tensor | Arguments, Tensor]:
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
