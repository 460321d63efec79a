"""A model that is given from Python: any module whose last step is a Linear layer, its head.

The run works on a copy, as float32. In the copy the head is taken out, so that what is left gives the head's inputs:
the features.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsieve.errors import InputError, RunError, machine_error
from fedsieve.model.outputs import scores_of
from fedsieve.model.pretrained import check_finite

PROBE = 2  # images that a module is tried with
TOLERANCE = 1e-4  # between the scores of the module and those of its two parts, for scores around 1
NAME_IT = "name the layer that gives the class scores: fedsieve.Model(module, head='…')"


@dataclass(frozen=True)
class Model:
    """A module, and the name of its head, the nn.Linear that gives the class scores (without a name: the last one).

        run("digits-iid", "runs/mine", model=fedsieve.Model(resnet, head="fc"))

    The module itself is never changed.
    """

    module: nn.Module
    head: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise InputError(f"the model is of type {type(self.module).__name__}; give an nn.Module")
        linears = [name for name, one in self.module.named_modules() if isinstance(one, nn.Linear) and name]
        if not linears:
            raise InputError(f"{self.name} has no Linear layer below it that could be its head; give it one")
        if self.head and self.head not in linears:
            there = ", ".join(linears[-3:])
            raise InputError(f"{self.name} has no Linear layer '{self.head}'; its last ones are {there}")
        object.__setattr__(self, "head", self.head or linears[-1])

    @property
    def name(self) -> str:
        return f"the given model {type(self.module).__name__}"


class GivenBackbone(nn.Module):
    """What comes before the head: images to features."""

    def __init__(self, network: nn.Module, head: str, width: int, image_size: int) -> None:
        super().__init__()
        self.network: Any = network  # its head is an Identity
        self.head_name, self.width, self.image_size = head, width, image_size

    def forward(self, images: Tensor) -> Tensor:
        try:
            return scores_of(self.network(images))
        except Exception as error:  # of code that is not ours
            raise machine_error(error) or RunError(f"the given model failed ({first_line(error)})") from error

    @torch.no_grad()
    def probe(self) -> bytes:
        """What it computes of a few fixed images: outputs of another network must never be taken for its own."""
        device = next(self.network.parameters(), torch.empty(0)).device
        return self.eval()(_images(self.image_size).to(device)).cpu().contiguous().numpy().tobytes()


def describe_given(backbone: GivenBackbone) -> dict[str, Any]:
    return {"given": type(backbone.network).__name__, "head": backbone.head_name, "width": backbone.width}


@torch.no_grad()
def split_module(model: Model, image_size: int, classes: int) -> tuple[GivenBackbone, nn.Linear]:
    """A copy of the module in two parts, backbone and head, which together give the same scores; else InputError."""
    name, module = model.name, _copied(model)
    _check(model, module, classes)
    try:
        scores = scores_of(module(_images(image_size)))
    except Exception as error:
        raise machine_error(error) or InputError(
            f"{name} fails on images of 3 x {image_size} x {image_size} ({first_line(error)}); set data.image_size to "
            "a size that it takes, or mend it"
        ) from error
    owner, _, leaf = model.head.rpartition(".")
    head: Any = module.get_submodule(model.head)
    setattr(module.get_submodule(owner), leaf, nn.Identity())
    backbone = GivenBackbone(module, model.head, head.in_features, image_size)
    try:
        features = backbone(_images(image_size))
        parts = head(features)
    except Exception as error:
        raise machine_error(error) or InputError(
            f"{name} cannot be taken apart at '{model.head}' ({first_line(error.__cause__ or error)}); {NAME_IT}"
        ) from error
    limit = TOLERANCE * max(1.0, float(scores.abs().max()))
    if features.ndim != 2 or parts.shape != scores.shape or not float((parts - scores).abs().max()) < limit:
        raise InputError(
            f"the outputs of '{model.head}' are not the scores of {name}, or these differ from call to call; {NAME_IT}"
        )
    return backbone, head


def whole_module(backbone: GivenBackbone, head: nn.Module) -> nn.Module:
    """The module again, with its head in place."""
    owner, _, leaf = backbone.head_name.rpartition(".")
    setattr(backbone.network.get_submodule(owner), leaf, head)
    return backbone.network


def _copied(model: Model) -> nn.Module:
    try:
        return deepcopy(model.module).float().cpu().eval().requires_grad_(True)
    except Exception as error:
        raise machine_error(error) or InputError(f"{model.name} cannot be copied ({first_line(error)})") from error


def _check(model: Model, module: nn.Module, classes: int) -> None:
    head = module.get_submodule(model.head)
    assert isinstance(head, nn.Linear)
    if head.out_features != classes:
        what = (
            f"{model.name}: its head '{model.head}' has {head.out_features} outputs, and the data has {classes} classes"
        )
        raise InputError(f"{what}; give it a head with {classes}")
    own = {id(one) for one in head.parameters()}
    others = [one for layer in module.modules() if layer is not head for one in layer.parameters(recurse=False)]
    if own & {id(one) for one in others}:
        raise InputError(f"{model.name}: its head '{model.head}' shares weights with another layer; give it its own")
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats and layer.momentum is None:
            raise InputError(f"{model.name}: {name} has momentum None, so it counts batches; give a number such as 0.1")
    check_finite(module, model.name)


def _images(size: int) -> Tensor:
    return torch.randn(PROBE, 3, size, size, generator=torch.Generator().manual_seed(0))


def first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
