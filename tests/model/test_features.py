"""Outputs of what is frozen, batch by batch."""

import torch

from fedsieve.model.classifier import Classifier, make_head
from fedsieve.model.features import batch_outputs, feature_depth, network_behind
from fedsieve.model.vit import ViT, ViTShape, initialize

SHAPE = ViTShape(image_size=16, patch_size=8, width=32, depth=3, heads=1, hidden=48, layer_scale=True)


@torch.no_grad()
def test_the_rest_of_the_network_makes_the_same_of_them_at_every_depth() -> None:
    backbone = ViT(SHAPE)
    initialize(backbone, torch.Generator().manual_seed(0))
    model = Classifier(backbone, make_head(32, 4, None), list("abcd")).eval()
    images = torch.randn(5, 3, 16, 16)
    expected = model(images)
    for depth in range(1, feature_depth(model) + 1):
        rows = batch_outputs(model, depth, images)
        assert rows.is_contiguous() and rows.ndim == 2  # they are sent as they lie in memory
        torch.testing.assert_close(network_behind(model, depth)(rows), expected)
