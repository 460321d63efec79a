"""A backbone with a head: the model that is fine-tuned, saved and opened again."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedsieve.config import Experiment, MlpHead
from fedsieve.errors import InputError
from fedsieve.model.backbone import Backbone, describe, from_description, load_backbone
from fedsieve.model.checkpoint import fill
from fedsieve.model.vit import ViT, through
from fedsieve.randomness import torch_generator
from fedsieve.runs.read import check_model


class Classifier(nn.Module):
    """Images to class scores; `head` alone takes features to class scores."""

    def __init__(self, backbone: Backbone, head: nn.Module, classes: list[str]) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.classes = classes

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))


class Tail(nn.Module):
    """What follows the first `depth` blocks of a classifier's ViT: from their tokens, one row an image, to scores."""

    def __init__(self, model: Classifier, depth: int) -> None:
        super().__init__()
        assert isinstance(model.backbone, ViT)
        self.width = model.backbone.width
        self.blocks = model.backbone.blocks[depth:]
        self.norm = model.backbone.norm
        self.head = model.head

    def forward(self, rows: Tensor) -> Tensor:
        tokens = rows.view(len(rows), -1, self.width)
        return self.head(self.norm(through(self.blocks, tokens, to_the_end=True)[:, 0]))


def make_head(width: int, classes: int, hidden: int | None) -> nn.Module:
    """A linear head, or with `hidden` an MLP with one hidden layer."""
    if hidden is None:
        return nn.Linear(width, classes)
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))


@torch.no_grad()
def initialize_head(head: nn.Module, generator: torch.Generator) -> None:
    """Small random weights, zero biases, so that training starts from an even guess: normal(0, 0.01) for
    the layer that gives the scores, normal(0, sqrt(2 / inputs)) (He et al., 2015) before a ReLU."""
    linears = [module for module in head.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        deviation = 0.01 if linear is linears[-1] else (2 / linear.in_features) ** 0.5
        linear.weight.normal_(0.0, deviation, generator=generator)
        linear.bias.zero_()


def build_classifier(experiment: Experiment, classes: list[str]) -> Classifier:
    """The model that an experiment starts from."""
    assert experiment.data.image_size is not None
    backbone = load_backbone(experiment.model.backbone, experiment.data.image_size, experiment.model.positions)
    blocks = len(getattr(backbone, "blocks", ()))
    for number, phase in enumerate(experiment.phases):
        wrong = [block for block in getattr(phase.train, "blocks", ()) if not 0 <= block < blocks]
        if wrong:
            there = f"it has blocks 0 to {blocks - 1}" if blocks else "it has no numbered blocks; use backbone or all"
            raise InputError(f"phases.{number}.train.blocks: the backbone has no block {wrong[0]}; {there}")
    hidden = experiment.model.head.mlp.hidden if isinstance(experiment.model.head, MlpHead) else None
    head = make_head(backbone.width, len(classes), hidden)
    initialize_head(head, torch_generator(experiment.seed, "head"))
    model = Classifier(backbone, head, classes)
    if experiment.model.init is not None:
        path = Path(experiment.model.init) / "model.safetensors"
        try:
            tensors, parts = read_classifier_file(path)
        except InputError as error:
            raise InputError(f"model.init: {error}") from None
        fill(model, tensors, f"model.init: {path}")
        if parts["classes"] != classes:
            raise InputError(
                f"model.init: {path} was trained for other classes, or in another order; use it with its data"
            )
    return model


# ------------------------------------------------------------------------------ the file of a finished run


def description(model: Classifier) -> dict[str, str]:
    """What stands beside the tensors in the file, so that it can be opened without the experiment."""
    hidden = model.head[0].out_features if isinstance(model.head, nn.Sequential) else None
    parts = {"backbone": describe(model.backbone), "hidden": hidden, "classes": model.classes}
    return {"fedsieve": json.dumps(parts, sort_keys=True)}


def read_classifier_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the description in a run's model.safetensors, which must be as the run wrote it."""
    check_model(path)
    try:
        with safe_open(path, framework="pt") as file:
            parts = json.loads((file.metadata() or {})["fedsieve"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        if parts.keys() == {"backbone", "hidden", "classes"}:
            return tensors, parts
    except (OSError, SafetensorError, KeyError, ValueError, AttributeError, RecursionError):
        pass
    raise InputError(f"{path} is no model of a finished run; give the folder of one")


def load_classifier(run: Path) -> Classifier:
    """The model of a finished run's folder."""
    tensors, parts = read_classifier_file(run / "model.safetensors")
    backbone = from_description(parts["backbone"])
    head = make_head(backbone.width, len(parts["classes"]), parts["hidden"])
    model = Classifier(backbone, head, parts["classes"])
    fill(model, tensors, str(run))
    return model.eval()
