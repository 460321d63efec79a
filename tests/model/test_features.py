"""Outputs of what is frozen, batch by batch, and of what is not computed because nothing depends on it."""

import pytest
import torch
from torch import Tensor

from fedsieve.model.classifier import Classifier, make_head
from fedsieve.model.features import batch_outputs, feature_depth, network_behind
from fedsieve.model.vit import ViT, ViTShape, initialize

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
