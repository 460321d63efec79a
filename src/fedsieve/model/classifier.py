"""A backbone with a head: the model that is fine-tuned."""

import torch
from torch import Tensor, nn

from fedsieve.config.model_settings import MlpHead, RidgeHead
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError
from fedsieve.model.backbone import Backbone, load_backbone
from fedsieve.model.given_module import Model, split_module
from fedsieve.model.vit import ViT, through
from fedsieve.randomness import torch_generator


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


def build_classifier(experiment: Experiment, classes: list[str], given: Model | None = None) -> Classifier:
    """The model that an experiment starts from, unless `model.init` gives another one's weights.

    `given` is the module of a caller from Python.
    """
    assert experiment.data.image_size is not None
    if given is not None:
        return _from_module(experiment, classes, given)
    backbone = load_backbone(experiment.model.backbone, experiment.data.image_size, experiment.model.positions)
    _check_blocks(experiment, backbone)
    hidden = experiment.model.head.mlp.hidden if isinstance(experiment.model.head, MlpHead) else None
    head = make_head(backbone.width, len(classes), hidden)
    initialize_head(head, torch_generator(experiment.seed, "head"))
    return Classifier(backbone, head, classes)


def _from_module(experiment: Experiment, classes: list[str], given: Model) -> Classifier:
    assert experiment.data.image_size is not None
    if isinstance(experiment.model.head, MlpHead) or experiment.model.positions != "hugging_face":
        key = "head: mlp" if isinstance(experiment.model.head, MlpHead) else f"positions: {experiment.model.positions}"
        raise InputError(f"model.{key} is not for {given.name}, which brings its own; leave it out")
    backbone, head = split_module(given, experiment.data.image_size, len(classes))
    if isinstance(experiment.model.head, RidgeHead) and head.bias is None:
        raise InputError(f"model.head: ridge needs a bias, and '{given.head}' of {given.name} has none; give it one")
    _check_blocks(experiment, backbone)
    for number, phase in enumerate(experiment.phases):
        if phase.train == "backbone" and not any(True for _ in backbone.parameters()):
            what = f"phases.{number}.train: backbone"
            raise InputError(f"{what}: {given.name} has no weights before its head; use head")
    return Classifier(backbone, head, classes)


def _check_blocks(experiment: Experiment, backbone: Backbone) -> None:
    """InputError if a phase trains blocks that are not there."""
    blocks = len(getattr(backbone, "blocks", ()))
    for number, phase in enumerate(experiment.phases):
        wrong = [block for block in getattr(phase.train, "blocks", ()) if not 0 <= block < blocks]
        if wrong:
            there = f"it has blocks 0 to {blocks - 1}" if blocks else "it has no numbered blocks; use backbone or all"
            raise InputError(f"phases.{number}.train.blocks: the backbone has no block {wrong[0]}; {there}")
