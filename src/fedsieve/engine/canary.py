"""A small fixed piece of training, whose result tells whether a machine computes the same bits as another one.

The last bits of floating-point results depend on the CPU's instructions, on torch's build and on the number of
threads. Layers are as wide as those of ViT-S, because libraries choose their code by size.
"""

import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsieve.model.precision import Precision, forward
from fedsieve.model.vit import ViT, ViTShape

SHAPE = ViTShape(image_size=28, patch_size=14, width=384, depth=2, heads=6, hidden=1536)
IMAGES, CLASSES, STEPS, LR = 16, 10, 3, 0.05


def canary(device: str, precision: Precision) -> str:
    """The SHA-256 of the weights after a few steps, on the threads that torch is set to."""
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(ViT(SHAPE), nn.Linear(SHAPE.width, CLASSES))
    with torch.no_grad():
        for weights in network.parameters():
            weights.copy_(0.05 * torch.randn(weights.shape, generator=generator))
    network.to(device)
    images = torch.randn((STEPS, IMAGES, 3, SHAPE.image_size, SHAPE.image_size), generator=generator).to(device)
    labels = torch.randint(CLASSES, (STEPS, IMAGES), generator=generator).to(device)
    for step in range(STEPS):
        _step(network, images[step], labels[step], precision)
    digest = hashlib.sha256()
    for weights in network.parameters():
        digest.update(weights.detach().cpu().numpy().data)
    return digest.hexdigest()


def _step(network: nn.Module, images: Tensor, labels: Tensor, precision: Precision) -> None:
    network.zero_grad()
    F.cross_entropy(forward(network, images, precision), labels).backward()
    with torch.no_grad():
        for weights in network.parameters():
            if weights.grad is not None:
                weights.sub_(LR * weights.grad)
