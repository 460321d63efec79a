"""Outputs of what is frozen, batch by batch, and of what is not computed because nothing depends on it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.data.load import Dataset, Samples
from fedsieve.data.partition import Split
from fedsieve.data.parts import Parts
from fedsieve.data.roles import Roles
from fedsieve.model.classifier import Classifier, make_head
from fedsieve.model.features import batch_outputs, feature_depth, network_behind
from fedsieve.model.vit import ViT, ViTShape, initialize
from fedsieve.observe.callbacks import Callback

SHAPE = ViTShape(image_size=16, patch_size=8, width=32, depth=3, heads=1, hidden=48, layer_scale=True)


@pytest.fixture
def model() -> Classifier:
    backbone, generator = ViT(SHAPE), torch.Generator().manual_seed(0)
    initialize(backbone, generator)
    for parameter in backbone.parameters():  # away from the even start, where attention sees all alike
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return Classifier(backbone, make_head(32, 4, None), list("abcd")).eval()


def every_token_through_every_block(model: Classifier, images: Tensor) -> Tensor:
    """The scores, with all tokens computed to the end."""
    backbone = model.backbone
    assert isinstance(backbone, ViT)
    tokens = backbone.embed(images)
    for block in backbone.blocks:
        tokens = block(tokens)
        assert tokens.shape[1] == backbone.shape.positions
    return model.head(backbone.norm(tokens)[:, 0])


def test_tokens_that_are_not_computed_would_change_neither_scores_nor_gradients(model: Classifier) -> None:
    images, labels = torch.randn(5, 3, 16, 16), torch.tensor([0, 1, 2, 3, 0])
    expected = every_token_through_every_block(model, images)
    expected_gradients = torch.autograd.grad(torch.nn.functional.cross_entropy(expected, labels), [*model.parameters()])
    for depth in range(feature_depth(model)):
        part = model if depth == 0 else network_behind(model, depth)
        scores = part(images if depth == 0 else batch_outputs(model, depth, images))
        torch.testing.assert_close(scores, expected)
        own = {id(one) for one in part.parameters()}
        reached = torch.autograd.grad(torch.nn.functional.cross_entropy(scores, labels), [*part.parameters()])
        wanted = [one for of, one in zip(model.parameters(), expected_gradients, strict=True) if id(of) in own]
        for gradient, want in zip(reached, wanted, strict=True):
            torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_the_rest_of_the_network_makes_the_same_of_them_at_every_depth(model: Classifier) -> None:
    images = torch.randn(5, 3, 16, 16)
    expected = every_token_through_every_block(model, images)
    for depth in range(1, feature_depth(model) + 1):
        rows = batch_outputs(model, depth, images)
        assert rows.is_contiguous() and rows.ndim == 2  # they are sent as they lie in memory
        torch.testing.assert_close(network_behind(model, depth)(rows), expected)


class SomeImages:
    """Features of the training images at some positions, as a process that has only these computes them."""

    def __init__(self, experiment: Callable[..., Experiment], *overrides: str) -> None:
        self.settings = experiment(*overrides).resolved()
        images = np.random.default_rng(5).integers(0, 256, (230, 3, 16, 16), dtype=np.uint8)
        self.whole = Samples(torch.from_numpy(images), torch.arange(230) % 4)

    def features(self, positions: np.ndarray) -> np.ndarray:
        train = Samples(self.whole.images[positions], self.whole.labels[positions])
        data = Dataset(train, self.whole, list("abcd"))
        nothing = np.empty(0, np.int64)
        partition = Split(Parts.of([np.arange(len(positions))]), [])
        count = len(positions)
        roles = Roles(data, np.arange(count), nothing, nothing, partition, None, np.array([count]), count, count)
        context = RunContext(self.settings, Callback(), roles=roles)
        rows = context.frozen_outputs("train", np.arange(count), context.feature_depth)
        return rows(torch.arange(count)).numpy()


@pytest.mark.parametrize("count", [1, 2, 3, 37, 100, 101])
@pytest.mark.parametrize("size", ["pico", "384"])
def test_features_do_not_depend_on_other_images(
    experiment: Callable[..., Experiment], tmp_path: Path, size: str, count: int
) -> None:
    settings = ["model.backbone=pico", "data.image_size=32"]
    if size == "384":
        shape = ViTShape(image_size=56, patch_size=14, width=384, depth=3, heads=6, hidden=1536, layer_scale=True)
        network = ViT(shape)
        initialize(network, torch.Generator().manual_seed(0))
        save_file(
            {name: tensor.clone() for name, tensor in network.state_dict().items()}, tmp_path / "wide.safetensors"
        )
        settings = f"model.backbone={tmp_path / 'wide.safetensors'} data.image_size=56".split()
    some = SomeImages(experiment, "data.normalize=imagenet", "clients.count=1", *settings)
    everything = some.features(np.arange(230))
    assert len(np.unique(everything, axis=0)) == 230
    positions = np.random.default_rng(count).permutation(230)[:count]
    assert np.array_equal(some.features(positions), everything[positions])
