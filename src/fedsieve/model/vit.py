"""A vision transformer whose parameter names are those of the DINO and DINOv2 checkpoint files.

Pre-norm ViT (Dosovitskiy et al., ICLR 2021) with the two additions of DINOv2 (Oquab et al., 2023):
LayerScale and register tokens. The image feature is the class token after the last LayerNorm.
Why not transformers' own classes: one fused qkv multiplication, names that stay the same between
its releases, an import that takes milliseconds, and blocks that can be run one by one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ViTShape:
    """Everything needed to build the network, apart from the weights."""

    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    hidden: int
    layer_scale: bool = False
    registers: int = 0
    epsilon: float = 1e-6

    @property
    def positions(self) -> int:
        """Rows of the position embedding: one for the class token, one for each patch."""
        return 1 + (self.image_size // self.patch_size) ** 2


class PatchEmbedding(nn.Module):
    def __init__(self, patch_size: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor, kept: int | None = None) -> Tensor:
        """What all tokens have to say to the first `kept` of them (None: to all)."""
        batch, length, width = tokens.shape
        query, key, value = (
            self.qkv(tokens).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        )
        mixed = F.scaled_dot_product_attention(query[:, :, :kept], key, value)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(tokens)))


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * self.gamma


class Block(nn.Module):
    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=shape.epsilon)
        self.attn = Attention(shape.width, shape.heads)
        self.ls1 = LayerScale(shape.width) if shape.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(shape.width, eps=shape.epsilon)
        self.mlp = Mlp(shape.width, shape.hidden)
        self.ls2 = LayerScale(shape.width) if shape.layer_scale else nn.Identity()

    def forward(self, tokens: Tensor, kept: int | None = None) -> Tensor:
        """The first `kept` tokens behind this block (None: all)."""
        tokens = tokens[:, :kept] + self.ls1(self.attn(self.norm1(tokens), kept))
        return tokens + self.ls2(self.mlp(self.norm2(tokens)))


class ViT(nn.Module):
    """Images (batch, 3, size, size) to features (batch, width)."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.shape = shape
        self.width = shape.width  # of the features, as every backbone has
        self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, shape.positions, shape.width))
        if shape.registers:
            self.register_tokens = nn.Parameter(torch.zeros(1, shape.registers, shape.width))
        self.patch_embed = PatchEmbedding(shape.patch_size, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width, eps=shape.epsilon)

    def embed(self, images: Tensor) -> Tensor:
        patches = self.patch_embed(images)
        cls = self.cls_token.expand(len(images), -1, -1)
        tokens = torch.cat((cls, patches), dim=1) + self.pos_embed
        if self.shape.registers:  # they carry no position, so they enter behind the class token afterwards
            registers = self.register_tokens.expand(len(images), -1, -1)
            tokens = torch.cat((tokens[:, :1], registers, tokens[:, 1:]), dim=1)
        return tokens

    def first_blocks(self, images: Tensor, count: int) -> Tensor:
        """The tokens behind the first `count` blocks; behind all of them the class token alone."""
        return through(self.blocks[:count], self.embed(images), to_the_end=count == len(self.blocks))

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.first_blocks(images, len(self.blocks))[:, 0])


def through(blocks: nn.ModuleList, tokens: Tensor, to_the_end: bool) -> Tensor:
    """The tokens behind some blocks of a ViT; at its end the class token alone.

    No other is used there, so the last block computes none. For 17 tokens that leaves out 70% of its multiplications,
    forward and backward: 6% of those of 12 blocks, and 17% of those of the last 4.
    """
    for number, block in enumerate(blocks, start=1):
        tokens = block(tokens, kept=1 if to_the_end and number == len(blocks) else None)
    return tokens


@torch.no_grad()
def initialize(network: nn.Module, generator: torch.Generator) -> None:
    """Random weights as for training from scratch: normal(0, 0.02), biases 0, norms and scales 1."""
    for name, parameter in network.named_parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0.0, 0.02, generator=generator)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.fill_(1.0)
