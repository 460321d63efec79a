"""Checkpoint files of vision transformers: reading them, naming things alike, fitting the image size."""

import json
import re
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsieve.config.model_settings import Positions
from fedsieve.errors import InputError
from fedsieve.files.memory import must_fit
from fedsieve.model.vit import ViT, ViTShape

MOST_BLOCKS, MOST_PATCHES = 1000, 512  # patches along a side
LARGEST_CONFIG = 1 << 20  # bytes
HEAD_WIDTH = 64  # DINO and DINOv2 files do not say the number of heads; all of them use 64 wide ones

# Hugging Face's names, those of the files on the hub and those of transformers 5, to ours.
HUGGING_FACE_NAMES = [
    (r"^(vit|dinov2|dinov2_with_registers)\.", ""),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.register_tokens$", "register_tokens"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^(encoder\.layer|layers)\.", "blocks."),
    (r"\.attention\.attention\.", ".attention."),
    (r"\.attention\.(query|q_proj)\.", ".attn.q."),
    (r"\.attention\.(key|k_proj)\.", ".attn.k."),
    (r"\.attention\.(value|v_proj)\.", ".attn.v."),
    (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"^(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
]
UNUSED = re.compile(r"^(pooler\.|classifier\.|head\.|(embeddings\.)?mask_token$|fc\.)")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The named tensors of a `.safetensors` file, or of a `.pth`/`.bin` one (no pickled code is run)."""
    hint = "give a .safetensors or .pth file of weights"
    if not path.is_file():
        raise InputError(f"{path} is no regular file; {hint}")
    try:
        must_fit(_unpacked_size(path), f"{path} does not fit into memory", "use a smaller backbone")
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        with torch.serialization.safe_globals([Namespace]):  # DINO's training checkpoints keep their arguments in one
            content = torch.load(path, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except Exception as error:  # both readers raise many kinds for a damaged file
        raise InputError(f"{path} is no readable checkpoint ({type(error).__name__}); {hint}") from None
    for key in ("teacher", "state_dict", "model"):  # DINO's full training checkpoints wrap the network
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise InputError(f"{path} holds no named tensors; {hint}")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if not _is_plain(tensor):
            raise InputError(f"{path}: {name[:100]} does not store each of its numbers (sparse, meta, …); {hint}")
    return {re.sub(r"^(module\.)?(backbone\.)?", "", name): value for name, value in tensors.items()}


def _unpacked_size(path: Path) -> int:
    """Bytes of what is in a file, as it says itself: `.pth` files are zip archives, which may be compressed."""
    if path.suffix == ".safetensors" or not zipfile.is_zipfile(path):
        return path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        return sum(member.file_size for member in archive.infolist())


def _is_plain(tensor: Tensor) -> bool:
    """Whether it has real numbers, and each of them in memory: a few bytes may claim to be a tensor of any size."""
    if (
        tensor.is_nested
        or tensor.layout != torch.strided
        or tensor.is_meta
        or tensor.is_quantized
        or tensor.is_complex()
    ):
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def our_name(name: str) -> str:
    """Our name of a Hugging Face tensor; query, key and value are `attn.q`, `attn.k` and `attn.v`."""
    for pattern, ours in HUGGING_FACE_NAMES:
        name = re.sub(pattern, ours, name)
    return name


def rename_hugging_face(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's ViT, DINOv2 tensors under our names, with query, key and value fused into qkv."""
    renamed = {our_name(name): tensor for name, tensor in tensors.items()}
    for name in [name for name in renamed if ".attn.q." in name]:
        parts = [name.replace(".attn.q.", f".attn.{letter}.") for letter in "qkv"]
        shapes = {renamed[part].shape if part in renamed else None for part in parts}
        if len(shapes) == 1:  # otherwise the network will miss qkv, and `fill` say so
            renamed[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat([renamed.pop(part) for part in parts])
    return renamed


def shape_of(tensors: Mapping[str, Tensor], source: str) -> ViTShape:
    """Read the network's shape off the tensors' shapes (image size: the one it was trained at)."""
    try:
        width, _, patch_size, _ = tensors["patch_embed.proj.weight"].shape
        copies, positions, columns = tensors["pos_embed"].shape
        numbers = {int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")}
        hidden = tensors["blocks.0.mlp.fc1.weight"].shape[0]
        registers = tensors["register_tokens"].shape[1] if "register_tokens" in tensors else 0
    except (KeyError, ValueError, IndexError) as error:
        if "blocks.0.mlp.w12.weight" in tensors:
            why = "has SwiGLU layers (DINOv2 giant), which are not supported"
            raise InputError(f"{source} {why}; use ViT-S, B or L") from None
        raise InputError(
            f"{source} is no DINO or DINOv2 checkpoint (missing or misshapen: {str(error)[:100]}); expected names such "
            "as patch_embed.proj.weight, pos_embed and blocks.0.attn.qkv.weight"
        ) from None
    side = round(max(0, positions - 1) ** 0.5)
    if copies != 1 or side == 0 or positions != 1 + side**2 or columns != width:
        raise InputError(
            f"{source} does not fit: pos_embed has shape {list(tensors['pos_embed'].shape)}, expected "
            f"[1, 1 + patches, {width}] with a square number of patches"
        )
    if min(width, patch_size, hidden) == 0:
        raise InputError(
            f"{source} does not fit: width {width}, patch size {patch_size} and hidden width {hidden} "
            "should all be above 0"
        )
    depth = len(numbers)
    if depth > MOST_BLOCKS or numbers != set(range(depth)):
        raise InputError(
            f"{source} does not fit: expected blocks 0, 1, … without gaps, at most {MOST_BLOCKS:,}, and it "
            f"has {depth:,} up to number {max(numbers)}"
        )
    return ViTShape(
        image_size=side * patch_size,
        patch_size=patch_size,
        width=width,
        depth=depth,
        heads=max(1, width // HEAD_WIDTH),
        hidden=hidden,
        layer_scale="blocks.0.ls1.gamma" in tensors,
        registers=registers,
    )


def shape_of_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> ViTShape:
    """The shape that a Hugging Face `config.json` and its tensors describe."""
    shape = shape_of(tensors, source)
    heads = config.get("num_attention_heads", 12)
    if type(heads) is not int or not 1 <= heads <= shape.width:
        wrong = f"num_attention_heads is {str(heads)[:60]}"
        raise InputError(f"{source}: in config.json {wrong}; expected a whole number from 1 to {shape.width}")
    epsilon = config.get("layer_norm_eps", 1e-12 if config.get("model_type") == "vit" else 1e-6)
    if type(epsilon) not in (int, float) or not 0 <= epsilon < 1:
        raise InputError(f"{source}: in config.json layer_norm_eps is {str(epsilon)[:60]}; expected a small number")
    return replace(shape, heads=heads, epsilon=float(epsilon))


def resize_positions(positions: Tensor, patches_per_side: int, antialias: bool, offset: float = 0.0) -> Tensor:
    """Position embeddings for another image size: bicubic over the grid of patches, the class token's kept.

    New position i is read at (i + 0.5) * side / (patches_per_side + offset) - 0.5 of the old grid.
    """
    side = round((positions.shape[1] - 1) ** 0.5)
    if side == patches_per_side:
        return positions
    grid = positions[:, 1:].float().reshape(1, side, side, -1).permute(0, 3, 1, 2)
    # Given a factor, torch computes with it where to read, and rounds the size down.
    size = {"scale_factor": ((patches_per_side + offset) / side,) * 2} if offset else {"size": (patches_per_side,) * 2}
    grid = F.interpolate(grid, **size, mode="bicubic", align_corners=False, antialias=antialias)
    return torch.cat((positions[:, :1].float(), grid.flatten(2).transpose(1, 2)), dim=1)


def check_image_size(image_size: int, patch_size: int) -> None:
    if image_size % patch_size:
        below = image_size - image_size % patch_size
        choices = f"{below} or {below + patch_size}" if below else str(patch_size)
        raise InputError(
            f"data.image_size {image_size} is no multiple of the backbone's patch size {patch_size}; use {choices}"
        )
    if image_size > MOST_PATCHES * patch_size:
        many = f"data.image_size {image_size} is {image_size // patch_size} patches a side"
        raise InputError(f"{many} of {patch_size} pixels; use at most {MOST_PATCHES * patch_size}")


def vit_from_tensors(
    tensors: dict[str, Tensor], shape: ViTShape, image_size: int, source: str, positions: Positions = "hugging_face"
) -> ViT:
    """Build the network for `image_size` and fill it, checking each tensor.

    Positions are interpolated as Hugging Face does it, or as the authors of DINO and DINOv2 do in their code: there
    the sizes are 0.1 larger, but not with registers (their `interpolate_offset`).
    """
    check_image_size(image_size, shape.patch_size)
    if shape.width % shape.heads:
        raise InputError(f"{source} does not fit: a width of {shape.width} cannot be shared by {shape.heads} heads")
    shape = replace(shape, image_size=image_size)
    with torch.device("meta"):  # without memory
        skeleton = ViT(shape)
    size = 4 * sum(parameter.numel() for parameter in skeleton.parameters())
    much = f"{source} for images of {image_size} pixels does not fit into memory"
    must_fit(size, much, "use a smaller data.image_size or backbone")
    side = image_size // shape.patch_size
    tensors = {name: tensor.float() for name, tensor in tensors.items() if not UNUSED.match(name)}
    antialias = shape.registers > 0  # as the authors of DINOv2 do it: with registers, but not without
    offset = 0.1 if positions == "authors" and not shape.registers else 0.0
    tensors["pos_embed"] = resize_positions(tensors["pos_embed"], side, antialias, offset)
    check_fit(skeleton, tensors, source)
    network = ViT(shape)
    fill(network, tensors, source)
    return network


def _floats(network: torch.nn.Module) -> dict[str, Tensor]:
    """Its weights and buffers; whole-number ones (BatchNorm's count of batches, tables of indices) are none."""
    named: dict[str, Tensor] = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {name: tensor for name, tensor in named.items() if tensor.is_floating_point()}


def check_fit(network: torch.nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """The first tensor that is missing, left over or misshapen is named."""
    own = _floats(network)
    for name, target in own.items():
        if name not in tensors:
            raise InputError(f"{source} does not fit: it has no tensor {name} of shape {list(target.shape)}")
        if tensors[name].shape != target.shape:
            raise InputError(
                f"{source} does not fit: {name} has shape {list(tensors[name].shape)}, expected {list(target.shape)}"
            )
    for name in tensors:
        if name not in own:
            raise InputError(f"{source} does not fit: it has a tensor {name[:100]} that the network does not")


def check_finite(network: torch.nn.Module, source: str) -> None:
    """Infinite weights would spoil the first round."""
    for name, tensor in _floats(network).items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{source} is damaged: {name} has numbers that are not finite in float32; fetch it again")


@torch.no_grad()
def fill(network: torch.nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy named tensors into a network that they fit."""
    check_fit(network, tensors, source)
    for name, target in _floats(network).items():
        target.copy_(tensors[name])
    check_finite(network, source)


def read_hugging_face_config(folder: Path) -> dict[str, Any]:
    hint = "give a folder made by save_pretrained"
    path = folder / "config.json"
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > LARGEST_CONFIG):
            raise ValueError("no regular file, or too large")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{folder} has no readable config.json ({error}); {hint}") from None
    if not isinstance(config, dict):
        raise InputError(f"{path} holds no settings in braces; {hint}")
    return config
