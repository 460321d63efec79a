"""All weights of a model in one vector.

The parameters lie one after another in a single buffer, in the order of the modules, and the
floating-point buffers (BatchNorm's statistics) behind them; the model's own tensors are views into it.
So resetting a client is one copy, an update one subtraction and a mask one bit per entry.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedsieve.config.scope_settings import BlocksScope, LayerKind, Train
from fedsieve.errors import InputError

KINDS: dict[LayerKind, str] = {  # by name, the first that fits; ViT's names first, then others of transformers
    "head": r"^head\.",
    "tokens": r"cls_token|pos_embed|register_tokens|mask_token|position_embedding|relative_position",
    "scale": r"\.ls[12]\.|layer_scale|lambda1|\.gamma$",
    "norm": r"norm|\.ln_|\.bn\d",
    "patch": r"patch_embed|embeddings\.|embedder|\.stem\.",
    "attention": r"attn|attention",
    "mlp": r"mlp|\.fc[12]\.|intermediate|output\.dense|pwconv|dwconv",
}


def kind_of(name: str) -> LayerKind | None:
    """The kind of layer that a tensor belongs to, by its name; None for one of another kind."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), None)


@dataclass(frozen=True)
class Entry:
    """One named tensor's place in the vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    is_buffer: bool


class FlatModel:
    """A module whose weights are views into `vector`."""

    def __init__(self, module: nn.Module, device: str = "cpu") -> None:
        self.module = module.to(device)
        parameters = list(module.named_parameters())
        buffers = [(name, buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point()]
        self.entries: list[Entry] = []
        start = 0
        for tensors, is_buffer in ((parameters, False), (buffers, True)):
            for name, tensor in tensors:
                self.entries.append(Entry(name, tuple(tensor.shape), start, start + tensor.numel(), is_buffer))
                start += tensor.numel()
        self.vector = torch.empty(start, device=device)
        self.parameters: dict[str, nn.Parameter] = dict(parameters)
        with torch.no_grad():
            for entry, (_, tensor) in zip(self.entries, parameters + buffers, strict=True):
                view = self.view(entry)
                view.copy_(tensor)
                if entry.is_buffer:
                    owner, _, leaf = entry.name.rpartition(".")
                    module.get_submodule(owner)._buffers[leaf] = view
                else:
                    self.parameters[entry.name].data = view

    def view(self, entry: Entry) -> Tensor:
        return self.vector[entry.start : entry.stop].view(entry.shape)

    def tensors(self) -> dict[str, Tensor]:
        """The named tensors, as views."""
        return {entry.name: self.view(entry) for entry in self.entries}

    def scope(
        self, train: Train, only: tuple[LayerKind, ...] | None = None, dense: tuple[LayerKind, ...] = ()
    ) -> "Scope":
        """What `train: head | backbone | all | {blocks, head}` lets change, `only` these kinds of layers and `dense`.

        A mask covers all of it but the layers of `dense`.
        """
        if isinstance(train, BlocksScope):
            prefixes = [f"backbone.blocks.{block}." for block in train.blocks] + ["head."] * train.head
        else:
            prefixes = {"head": ["head."], "backbone": ["backbone."], "all": ["backbone.", "head."]}[train]
        entries = [entry for entry in self.entries if entry.name.startswith(tuple(prefixes))]
        there = {kind_of(entry.name) for entry in entries}
        has = "`train` has " + (", ".join(kind for kind in KINDS if kind in there) or "no kind of layer with a name")
        if absent := [kind for kind in dense if kind not in there]:
            raise InputError(f"dense: [{', '.join(dense)}] names layers that are not trained: {absent[0]}; {has}")
        chosen = [entry for entry in entries if only is None or kind_of(entry.name) in (*only, *dense)]
        scope = Scope(self, chosen, [entry.name for entry in chosen if kind_of(entry.name) in dense])
        if only is not None and not scope.sieved:
            raise InputError(f"only: [{', '.join(only)}] leaves nothing to train; {has}")
        if dense and not scope.sieved:
            raise InputError(f"dense: [{', '.join(dense)}] leaves nothing for the mask to cover; {has}")
        return scope


class Scope:
    """The entries that a phase may change, as ranges of the vector.

    The parameters that a mask covers come first, then those named in `dense`, which are outside every mask, then the
    buffers. So what a mask does not cover is the end of each vector over the scope.
    """

    def __init__(self, model: FlatModel, entries: list[Entry], dense: Collection[str] = ()) -> None:
        self.model = model
        self.entries = sorted(entries, key=lambda entry: (entry.is_buffer, entry.name in dense))
        self.ranges = merged((entry.start, entry.stop) for entry in self.entries)  # one or two for head or backbone
        self.size = sum(stop - start for start, stop in self.ranges)
        self.weights = sum(entry.stop - entry.start for entry in entries if not entry.is_buffer)
        self.dense = [entry.name for entry in self.entries if entry.name in dense and not entry.is_buffer]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.named.values())

    @cached_property
    def named(self) -> dict[str, nn.Parameter]:
        """The parameters in scope by name, the first part of `read`."""
        return {entry.name: self.model.parameters[entry.name] for entry in self.entries if not entry.is_buffer}

    @cached_property
    def sieved(self) -> dict[str, nn.Parameter]:
        """Those that a mask covers, the first of them."""
        return {name: parameter for name, parameter in self.named.items() if name not in self.dense}

    @cached_property
    def sieved_weights(self) -> int:
        """How many weights a mask covers."""
        return sum(parameter.numel() for parameter in self.sieved.values())

    def read(self) -> Tensor:
        """A copy of the model's values in scope, as one vector."""
        return torch.cat([self.model.vector[start:stop] for start, stop in self.ranges])

    def of(self, vector: Tensor) -> Tensor:
        """The values in scope of a vector of all weights: a view of it, if they lie side by side."""
        parts = [vector[start:stop] for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def split(self, values: Tensor) -> dict[str, Tensor]:
        """The parameters in a vector over the scope, by name and in their shapes: views of it."""
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = values[: self.weights].split(sizes)
        return {name: part.view_as(one) for (name, one), part in zip(self.named.items(), parts, strict=True)}

    def put(self, vector: Tensor, values: Tensor) -> None:
        """Set the values in scope of a vector of all weights: one copy per range."""
        position = 0
        for start, stop in self.ranges:
            vector[start:stop] = values[position : position + stop - start]
            position += stop - start

    @property
    def outside(self) -> list[tuple[int, int]]:
        """The ranges of the model's vector that the scope leaves out."""
        edges = [0, *(edge for pair in sorted(self.ranges) for edge in pair), len(self.model.vector)]
        return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if stop > start]

    def write(self, values: Tensor) -> None:
        """Set the model's values in scope."""
        self.put(self.model.vector, values)

    def prepare_training(self) -> None:
        """Gradients and training mode (BatchNorm, dropout) for what is in scope, neither for the rest."""
        for parameter, trained in self._trained:
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
        for module, training in self._modes:
            if module.training != training:
                module.training = training

    # Found once: to look through a network of many modules takes longer than to train a head.

    @cached_property
    def _trained(self) -> list[tuple[nn.Parameter, bool]]:
        return [(parameter, name in self.named) for name, parameter in self.model.parameters.items()]

    @cached_property
    def _modes(self) -> list[tuple[nn.Module, bool]]:
        return list(_training_modes(self.model.module, {id(one) for one in self.parameters}, inherited=False))


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same places in fewer ranges: those that touch become one."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _training_modes(module: nn.Module, trained: set[int], inherited: bool) -> Iterator[tuple[nn.Module, bool]]:
    """Training mode where anything below is trained; what has no parameters (dropout) follows its parent."""
    flags = [id(parameter) in trained for parameter in module.parameters()]
    training = any(flags) if flags else inherited
    yield module, training
    for child in module.children():
        yield from _training_modes(child, trained, training)
