"""The vision transformer against a slow, obvious one: plain functions on a checkpoint's tensors, in float64."""

import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from fedsieve.model.backbone import load_backbone
from fedsieve.model.vit import ViT, ViTShape, initialize

Tensors = dict[str, Tensor]


def dino_tensors(
    width: int,
    depth: int,
    patch: int,
    side: int,
    hidden: int,
    layer_scale: bool = False,
    registers: int = 0,
) -> Tensors:
    """Random weights under the names and shapes of facebookresearch's files, large enough that each one matters."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 1 + side**2, width),
        "patch_embed.proj.weight": (width, 3, patch, patch),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    if registers:
        shapes |= {"register_tokens": (1, registers, width), "mask_token": (1, width)}
    for block in range(depth):
        own: dict[str, tuple[int, ...]] = {
            "norm1.weight": (width,),
            "norm1.bias": (width,),
            "attn.qkv.weight": (3 * width, width),
            "attn.qkv.bias": (3 * width,),
            "attn.proj.weight": (width, width),
            "attn.proj.bias": (width,),
            "norm2.weight": (width,),
            "norm2.bias": (width,),
            "mlp.fc1.weight": (hidden, width),
            "mlp.fc1.bias": (hidden,),
            "mlp.fc2.weight": (width, hidden),
            "mlp.fc2.bias": (width,),
        }
        if layer_scale:
            own |= {"ls1.gamma": (width,), "ls2.gamma": (width,)}
        shapes |= {f"blocks.{block}.{name}": shape for name, shape in own.items()}
    generator = torch.Generator().manual_seed(1)
    return {name: realistic(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def realistic(name: str, noise: Tensor) -> Tensor:
    if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "gamma")):
        return 1 + 0.2 * noise
    if noise.ndim < 2 or name.endswith(("embed", "token", "tokens")):
        return 0.2 * noise
    return noise / math.sqrt(noise[0].numel())


# ----------------------------------------------------------------------------------------- the reference


def layer_norm(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    deviation = torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-6)
    return centred / deviation * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def linear(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def attention(tensors: Tensors, name: str, x: Tensor, heads: int) -> Tensor:
    """Each image and each head on its own: softmax(q k^T / sqrt(d)) v."""
    width = x.shape[-1]
    each = width // heads
    qkv = linear(tensors, f"{name}.qkv", x)
    result = torch.zeros_like(x)
    for image in range(len(x)):
        for head in range(heads):
            query, key, value = (
                qkv[image, :, part * width + head * each : part * width + (head + 1) * each] for part in range(3)
            )
            scores = torch.exp(query @ key.T / math.sqrt(each))
            result[image, :, head * each : (head + 1) * each] = scores / scores.sum(1, keepdim=True) @ value
    return linear(tensors, f"{name}.proj", result)


def mlp(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    x = linear(tensors, f"{name}.fc1", x)
    return linear(tensors, f"{name}.fc2", x * 0.5 * (1 + torch.erf(x / math.sqrt(2))))


def patches(tensors: Tensors, images: Tensor) -> Tensor:
    """Cut the images into squares, row by row, and multiply each by the patch embedding's weights."""
    weight, bias = tensors["patch_embed.proj.weight"], tensors["patch_embed.proj.bias"]
    patch, side = weight.shape[2], images.shape[2] // weight.shape[2]
    squares = [
        images[:, :, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch].flatten(1)
        for row in range(side)
        for column in range(side)
    ]
    return torch.stack([square @ weight.flatten(1).T + bias for square in squares], dim=1)


def positions(tensors: Tensors, side: int) -> Tensor:
    table = tensors["pos_embed"]
    old = math.isqrt(table.shape[1] - 1)
    if side == old:
        return table
    grid = table[0, 1:].reshape(old, old, -1).permute(2, 0, 1)[None]
    antialias = "register_tokens" in tensors  # facebookresearch/dinov2: interpolate_antialias in the hub's *_reg models
    grid = F.interpolate(grid, (side, side), mode="bicubic", align_corners=False, antialias=antialias)
    return torch.cat((table[:, :1], grid[0].permute(1, 2, 0).reshape(1, side * side, -1)), dim=1)


def reference(tensors: Tensors, images: Tensor, heads: int) -> Tensor:
    """The class token's feature."""
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    x = patches(tensors, images.double())
    x = torch.cat((tensors["cls_token"].expand(len(images), -1, -1), x), dim=1)
    x = x + positions(tensors, math.isqrt(x.shape[1] - 1))
    if "register_tokens" in tensors:
        x = torch.cat((x[:, :1], tensors["register_tokens"].expand(len(images), -1, -1), x[:, 1:]), dim=1)
    for block in range(sum(name.endswith("attn.qkv.weight") for name in tensors)):
        name = f"blocks.{block}"
        for scale, part in (
            ("ls1", lambda x, name: attention(tensors, f"{name}.attn", layer_norm(tensors, f"{name}.norm1", x), heads)),
            ("ls2", lambda x, name: mlp(tensors, f"{name}.mlp", layer_norm(tensors, f"{name}.norm2", x))),
        ):
            x = x + part(x, name) * tensors.get(f"{name}.{scale}.gamma", torch.ones(()))
    return layer_norm(tensors, "norm", x)[:, 0]


def gap(network: torch.nn.Module, expected: Tensor, images: Tensor) -> float:
    with torch.no_grad():
        return float((network(images) - expected).abs().max())


# ---------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def vit_small() -> Tensors:
    """What is in dino_deitsmall16_pretrain.pth."""
    tensors = dino_tensors(width=384, depth=12, patch=16, side=14, hidden=1536)
    assert tensors["pos_embed"].shape == (1, 197, 384)
    return tensors


@pytest.fixture(scope="module")
def pictures() -> Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(2))


def test_dino_vit_small_at_64_pixels_equals_the_reference(vit_small: Tensors, pictures: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "dino_deitsmall16_pretrain.pth"
    torch.save(vit_small, path)
    network = load_backbone(str(path), 64)
    assert isinstance(network, ViT)
    assert network.shape == ViTShape(64, 16, width=384, depth=12, heads=6, hidden=1536)
    assert gap(network, reference(vit_small, pictures, heads=6), pictures) < 1e-4
    assert gap(network, reference(vit_small, pictures, heads=12), pictures) > 1e-2  # the test can tell


def test_a_full_training_checkpoint_is_unwrapped(vit_small: Tensors, pictures: Tensor, tmp_path: Path) -> None:
    wrapped = {f"module.backbone.{name}": tensor for name, tensor in vit_small.items()}
    head = {"module.head.mlp.0.weight": torch.randn(8, 384), "module.head.last_layer.weight_g": torch.ones(8, 1)}
    torch.save({"teacher": wrapped | head}, tmp_path / "teacher.pth")
    full = {"student": {"module.backbone.x": torch.ones(1)}, "teacher": wrapped | head, "epoch": 100}
    torch.save(full | {"args": Namespace(arch="vit_small", patch_size=16)}, tmp_path / "full.pth")
    torch.save(vit_small, tmp_path / "plain.pth")
    with torch.no_grad():
        plain, *others = (load_backbone(str(tmp_path / f"{n}.pth"), 64)(pictures) for n in ("plain", "teacher", "full"))
    assert all(torch.equal(plain, other) for other in others)


@pytest.mark.parametrize("image_size", [35, 21, 56])
def test_dinov2_with_registers_equals_the_reference(image_size: int, tmp_path: Path) -> None:
    tensors = dino_tensors(width=128, depth=2, patch=7, side=5, hidden=512, layer_scale=True, registers=4)
    save_file(tensors, tmp_path / "dinov2_reg4.safetensors")
    network = load_backbone(str(tmp_path / "dinov2_reg4.safetensors"), image_size)
    images = torch.randn(2, 3, image_size, image_size, generator=torch.Generator().manual_seed(2))
    assert isinstance(network, ViT)
    assert (network.shape.heads, network.shape.registers, network.shape.layer_scale) == (2, 4, True)
    assert gap(network, reference(tensors, images, heads=2), images) < 1e-4


def cubic(x: float) -> float:
    """Keys' kernel with a = -0.75, as torch has it."""
    a, x = -0.75, abs(x)
    if x < 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0


def read_by_hand(table: Tensor, side: int, offset: float) -> Tensor:
    """DINO's interpolate_pos_encoding, number by number: new i is at (i + 0.5) * old / (side + offset) - 0.5."""
    old = math.isqrt(table.shape[1] - 1)
    grid = table[0, 1:].double().reshape(old, old, -1)
    weights = torch.zeros(side, old, dtype=torch.float64)
    for i in range(side):
        place = (i + 0.5) * old / (side + offset) - 0.5
        for j in range(math.floor(place) - 1, math.floor(place) + 3):
            weights[i, min(max(j, 0), old - 1)] += cubic(place - j)  # the border is repeated
    read = torch.einsum("ia,jb,abw->ijw", weights, weights, grid)
    return torch.cat((table[:, :1].double(), read.reshape(1, side * side, -1)), dim=1)


@pytest.mark.parametrize("side", [2, 4, 5, 8])
@pytest.mark.parametrize("registers", [0, 4])
def test_positions_are_interpolated_as_hugging_face_or_the_authors_do(
    side: int, registers: int, tmp_path: Path
) -> None:
    tensors = dino_tensors(width=16, depth=1, patch=4, side=5, hidden=8, registers=registers)
    save_file(tensors, tmp_path / "file.safetensors")
    theirs, ours = (
        load_backbone(str(tmp_path / "file.safetensors"), 4 * side, way).pos_embed  # type: ignore[arg-type, union-attr]
        for way in ("authors", "hugging_face")
    )
    assert torch.equal(ours, load_backbone(str(tmp_path / "file.safetensors"), 4 * side).pos_embed)  # type: ignore[union-attr]
    if registers or side == 5:  # no offset with registers, and nothing to interpolate at the size it was trained at
        assert torch.equal(theirs, ours)
        return
    table = tensors["pos_embed"]
    assert (ours - read_by_hand(table, side, 0.0)).abs().max() < 1e-5
    assert (theirs - read_by_hand(table, side, 0.1)).abs().max() < 1e-5
    assert (theirs - ours).abs().max() > 1e-3


@pytest.mark.parametrize(("width", "heads"), [(192, 3), (384, 6), (768, 12), (1024, 16), (64, 1), (32, 1)])
def test_heads_of_a_checkpoint_file_are_64_wide(width: int, heads: int, tmp_path: Path) -> None:
    save_file(dino_tensors(width, depth=1, patch=16, side=2, hidden=8), tmp_path / "file.safetensors")
    network = load_backbone(str(tmp_path / "file.safetensors"), 32)
    assert isinstance(network, ViT) and network.shape.heads == network.blocks[0].attn.heads == heads


def test_half_precision_files_become_float32(tmp_path: Path) -> None:
    tensors = dino_tensors(64, depth=1, patch=8, side=4, hidden=64)
    torch.save({name: tensor.half() for name, tensor in tensors.items()}, tmp_path / "half.pth")
    network = load_backbone(str(tmp_path / "half.pth"), 16)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    assert torch.equal(network.blocks[0].mlp.fc1.weight, tensors["blocks.0.mlp.fc1.weight"].half().float())


def test_initialize_fills_every_parameter_the_same_way_each_time() -> None:
    networks = [ViT(ViTShape(16, 8, width=32, depth=1, heads=2, hidden=64, layer_scale=True)) for _ in range(2)]
    for network in networks:
        initialize(network, torch.Generator().manual_seed(3))
    first, second = (network.state_dict() for network in networks)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert 0.015 < float(first["pos_embed"].std()) < 0.025
    assert bool((first["blocks.0.ls1.gamma"] == 1).all()) and bool((first["blocks.0.attn.qkv.bias"] == 0).all())


def test_pico_comes_with_the_package() -> None:
    network = load_backbone("pico", 32)
    assert isinstance(network, ViT)
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, network.width)
