"""Backbones from Hugging Face folders equal transformers' own; whatever cannot be loaded is told in one line."""

import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTModel,
)

from fedsieve.errors import InputError
from fedsieve.files import memory
from fedsieve.model.backbone import HuggingFaceBackbone, describe, from_description, load_backbone
from fedsieve.model.pretrained import fill
from fedsieve.model.vit import ViT, ViTShape, initialize

Tensors = dict[str, Tensor]
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
NETWORKS: dict[str, Callable[[int, int], Any]] = {
    "vit": lambda width, heads: ViTModel(
        ViTConfig(hidden_size=width, num_attention_heads=heads, intermediate_size=96, **SMALL)
    ),
    "dinov2": lambda width, heads: Dinov2Model(Dinov2Config(hidden_size=width, num_attention_heads=heads, **SMALL)),
    "registers": lambda width, heads: Dinov2WithRegistersModel(
        Dinov2WithRegistersConfig(hidden_size=width, num_attention_heads=heads, **SMALL)
    ),
}


@torch.no_grad()
def randomized(network: Any) -> Any:
    """Fresh networks have zeros and ones in many places; other numbers show whether each tensor is used."""
    torch.manual_seed(0)
    for tensor in float_tensors(network).values():
        noise = torch.randn(tensor.shape)
        if tensor.ndim == 1:
            tensor.add_(0.1 * noise).abs_()  # BatchNorm's variances among them
        else:
            tensor.add_(0.3 * noise / tensor[0].numel() ** 0.5)
    return network.eval()


def float_tensors(module: torch.nn.Module) -> Tensors:
    return {name: tensor for name, tensor in module.state_dict().items() if tensor.is_floating_point()}


def random_images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def gap(network: Any, place: Path, image_size: int) -> float:
    """How far our class token's feature is from transformers'."""
    images = random_images(image_size)
    options = {"interpolate_pos_encoding": True} if isinstance(network, ViTModel) else {}
    theirs = network(images, **options).last_hidden_state[:, 0]
    ours = load_backbone(str(place), image_size)
    assert isinstance(ours, ViT)
    return float((ours(images) - theirs).abs().max())


@pytest.mark.parametrize(("width", "heads"), [(128, 2), (96, 4)])
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_saved_transformers_model_gives_the_same_features(kind: str, width: int, heads: int, tmp_path: Path) -> None:
    network = randomized(NETWORKS[kind](width, heads))
    network.save_pretrained(tmp_path)
    for image_size in (32, 16, 48):  # its own, and two for which the positions are interpolated
        assert gap(network, tmp_path, image_size) < 1e-4
    assert gap(network, tmp_path / "model.safetensors", 32) < 1e-4  # the heads are read from the config beside it


@pytest.mark.parametrize("kind", NETWORKS)
def test_names_in_memory_are_known_as_well_as_those_in_files(kind: str, tmp_path: Path) -> None:
    network = randomized(NETWORKS[kind](64, 2))
    network.save_pretrained(tmp_path)
    save_file({name: tensor.clone() for name, tensor in network.state_dict().items()}, tmp_path / "model.safetensors")
    assert gap(network, tmp_path, 32) < 1e-4


CLASSIC = {
    "q_proj": "attention.query",
    "k_proj": "attention.key",
    "v_proj": "attention.value",
    "o_proj": "output.dense",
}


def classic_name(name: str, kind: str) -> str:
    """The name that transformers 4 gave a tensor, of which the hub's files are full."""
    for new, old in CLASSIC.items():
        name = name.replace(f".attention.{new}.", f".attention.{old}.")
    if kind == "vit":
        name = re.sub(r"^layers\.", "encoder.layer.", name)
        name = name.replace(".mlp.fc1.", ".intermediate.dense.").replace(".mlp.fc2.", ".output.dense.")
    return name


@pytest.mark.parametrize("ending", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", ["vit", "dinov2"])
def test_classic_names_of_a_classifier_on_the_hub(kind: str, ending: str, tmp_path: Path) -> None:
    network = randomized(NETWORKS[kind](128, 4))
    network.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tensors = {f"{kind}.{classic_name(name, kind)}": tensor.clone() for name, tensor in network.state_dict().items()}
    assert f"{kind}.encoder.layer.0.attention.attention.query.weight" in tensors
    assert f"{kind}.encoder.layer.1.attention.output.dense.bias" in tensors
    tensors |= {"classifier.weight": torch.randn(5, 128), "classifier.bias": torch.randn(5)}
    save: Callable[..., None] = save_file if ending.endswith("safetensors") else torch.save
    save(tensors, tmp_path / ending)
    assert gap(network, tmp_path, 32) < 1e-4


def resnet(folder: Path) -> Any:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    network = randomized(ResNetModel(config))
    network.save_pretrained(folder)
    return network


def test_any_other_model_is_used_as_it_is(tmp_path: Path) -> None:
    network = resnet(tmp_path)
    ours = load_backbone(str(tmp_path), 32)
    images = random_images(32)
    assert isinstance(ours, HuggingFaceBackbone) and ours.width == 16
    with pytest.raises(InputError, match=r"model\.positions: authors is for ViT, DINO and DINOv2; .* use hugging_face"):
        load_backbone(str(tmp_path), 32, "authors")
    with torch.no_grad():
        assert torch.allclose(ours(images), network(images).pooler_output.flatten(1), atol=1e-6)


def test_a_described_backbone_is_built_again(tmp_path: Path) -> None:
    resnet(tmp_path)
    for backbone in (load_backbone(str(tmp_path), 32), load_backbone("pico", 32)):
        again = from_description(describe(backbone)).eval()
        fill(again, float_tensors(backbone), "test")
        with torch.no_grad():
            assert torch.equal(again(random_images(32)), backbone(random_images(32)))


# --------------------------------------------------------------------------------------------- bad input


@pytest.fixture
def good() -> Tensors:
    """A checkpoint that fits, to be spoilt."""
    network = ViT(ViTShape(32, 8, width=64, depth=2, heads=1, hidden=96))
    initialize(network, torch.Generator().manual_seed(0))
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def refusal(name: Path | str, image_size: int = 32) -> str:
    with pytest.raises(InputError) as caught:
        load_backbone(str(name), image_size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blocks.0.attn.proj.weight", (64, 63)),
        ("blocks.1.norm2.bias", (65,)),
        ("blocks.0.mlp.fc2.weight", (64, 97)),
        ("norm.weight", (1, 64)),
        ("cls_token", (64,)),
        ("pos_embed", (1, 17, 63)),
        ("pos_embed", (1, 16, 64)),
        ("pos_embed", (2, 17, 64)),
    ],
)
def test_a_misshapen_tensor_is_named(good: Tensors, name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.save(good | {name: torch.zeros(shape)}, tmp_path / "file.pth")
    for image_size in (32, 16):
        assert f"{name} has shape" in refusal(tmp_path / "file.pth", image_size)


def test_the_first_of_several_misshapen_tensors_is_named(good: Tensors, tmp_path: Path) -> None:
    spoilt = ("norm.bias", "blocks.1.norm1.weight", "blocks.0.norm2.bias")
    torch.save(good | {name: torch.zeros(1) for name in spoilt}, tmp_path / "file.pth")
    message = refusal(tmp_path / "file.pth")
    assert "blocks.0.norm2.bias has shape [1], expected [64]" in message and "blocks.1" not in message


@pytest.mark.parametrize(
    "name", ["blocks.1.attn.qkv.bias", "cls_token", "pos_embed", "patch_embed.proj.weight", "norm.bias"]
)
def test_a_missing_tensor_is_named(good: Tensors, name: str, tmp_path: Path) -> None:
    del good[name]
    torch.save(good, tmp_path / "file.pth")
    assert name in refusal(tmp_path / "file.pth")


def test_a_tensor_too_many_is_named(good: Tensors, tmp_path: Path) -> None:
    torch.save(good | {"blocks.1.attn.rope": torch.zeros(3)}, tmp_path / "file.pth")
    assert "blocks.1.attn.rope" in refusal(tmp_path / "file.pth")


@pytest.mark.parametrize("change", ["drop", "reshape"])
def test_hugging_face_files_with_half_an_attention_are_refused(change: str, tmp_path: Path) -> None:
    NETWORKS["vit"](64, 2).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if ".1." in name and "key.weight" in name)
    tensors[name] = torch.zeros(64, 63)
    if change == "drop":
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    assert "blocks.1.attn.qkv.weight" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", bytes(range(256)) * 40, b"PK\x03\x04 no zip after all"])
@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_a_file_that_is_no_checkpoint_is_refused(content: bytes, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"file.{ending}"
    path.write_bytes(content)
    message = refusal(path)
    assert str(path) in message and "\n" not in message


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {0: torch.ones(1)}, torch.ones(3), "text"])
def test_a_file_without_named_weights_is_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "file.pth")
    assert str(tmp_path / "file.pth") in refusal(tmp_path / "file.pth")


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("writer", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_code_in_a_pickle_is_not_run(good: Tensors, writer: Callable[..., Any], tmp_path: Path) -> None:
    writer(good | {"trap": Trap(tmp_path / "sprung")}, tmp_path / "file.pth")
    assert "no readable checkpoint" in refusal(tmp_path / "file.pth")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(("size", "hint"), [(33, "32 or 40"), (30, "24 or 32"), (7, "use 8")])
def test_an_image_size_that_patches_do_not_fill_is_refused(good: Tensors, size: int, hint: str, tmp_path: Path) -> None:
    torch.save(good, tmp_path / "file.pth")
    message = refusal(tmp_path / "file.pth", size)
    assert f"data.image_size {size} is no multiple of the backbone's patch size 8" in message and hint in message


def test_a_hub_name_without_a_network_asks_for_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("facebook/dino-vits16", "nobody/has-this", "piko", "a/b/c"):
        message = refusal(name)
        assert f"'{name}'" in message and "give a path instead" in message


@pytest.mark.parametrize("name", ["/nowhere/file.pth", "nowhere.safetensors", "./nowhere", "~/nowhere/at/all"])
def test_a_path_that_does_not_exist_is_refused(name: str) -> None:
    assert f"{name} does not exist" in refusal(name)


def test_folders_that_are_no_model_are_refused(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert "no weights" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    assert str(tmp_path) in refusal(tmp_path)


def test_a_model_of_which_a_part_is_missing_is_refused(tmp_path: Path) -> None:
    resnet(tmp_path)  # transformers would put random numbers there
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["encoder.stages.1.layers.0.layer.0.convolution.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert "encoder.stages.1.layers.0.layer.0.convolution.weight" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ({"pos_embed": torch.tensor(1.0)}, "misshapen"),
        ({"blocks.0.mlp.fc1.weight": torch.tensor(1.0)}, "misshapen"),
        ({"register_tokens": torch.tensor(1.0)}, "misshapen"),
        ({"pos_embed": torch.zeros(1, 0, 64)}, "pos_embed has shape"),
        ({"pos_embed": torch.zeros(1, 1, 64)}, "pos_embed has shape"),
        ({"patch_embed.proj.weight": torch.zeros(64, 3, 0, 0)}, "patch size 0"),
        ({"patch_embed.proj.weight": torch.zeros(0, 3, 8, 8), "pos_embed": torch.zeros(1, 17, 0)}, "width 0"),
        ({"blocks.99999999.norm1.bias": torch.zeros(64)}, "it has 3 up to number 99999999"),
        ({f"blocks.{k}.x": torch.zeros(1) for k in range(5000)}, "at most 1,000, and it has 5,000"),
        ({"norm.bias": torch.zeros(64).to_sparse()}, "norm.bias does not store each of its numbers"),
        ({"norm.bias": torch.zeros(64, device="meta")}, "norm.bias does not store"),
        ({"norm.bias": torch.zeros(64, dtype=torch.complex64)}, "norm.bias does not store"),
        ({"pos_embed": torch.zeros(1).expand(1, 1 + 10**12, 64)}, "pos_embed does not store"),
        ({"norm.bias": torch.full((64,), float("nan"))}, "norm.bias has numbers that are not finite"),
        (
            {"cls_token": torch.full((1, 1, 64), 1e300, dtype=torch.float64)},
            "cls_token has numbers that are not finite",
        ),
    ],
)
def test_a_hostile_checkpoint_is_refused_at_once(good: Tensors, spoilt: Tensors, message: str, tmp_path: Path) -> None:
    torch.save(good | spoilt, tmp_path / "file.pth")
    said = refusal(tmp_path / "file.pth")
    assert message in said and len(said) < 600


def test_weights_and_patches_beyond_memory_are_refused(
    good: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.pth"
    torch.save(good, path)
    stored = sum(tensor.numel() for tensor in good.values()) * 4
    assert "at most 4096" in refusal(path, 4104)
    monkeypatch.setattr(memory, "machine_memory", lambda: stored + 10**5)
    load_backbone(str(path), 32)
    assert "for images of 512 pixels does not fit into memory" in refusal(path, 512)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("file/data/bomb", bytes(10**7))
    assert "file.pth does not fit into memory" in refusal(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([], "holds no settings in braces"),
        ("[" * 10**5, "no readable config.json"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; expected a whole number from 1 to 64"),
        ({"num_attention_heads": "2"}, "num_attention_heads is 2"),
        ({"layer_norm_eps": None}, "layer_norm_eps is None"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps is nan"),
        ({"hidden_act": "relu", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; use at most 1,000"),
    ],
)
def test_a_wrong_config_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    NETWORKS["vit"](64, 2).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    text = json.dumps(json.loads(config.read_text()) | change if isinstance(change, dict) else change)
    config.write_text(change if isinstance(change, str) else text)
    assert message in refusal(tmp_path)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "no regular file" in refusal(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    os.mkfifo(tmp_path / "model.safetensors")
    assert "no regular file" in refusal(tmp_path)


def test_weights_of_any_other_model_have_to_be_finite(tmp_path: Path) -> None:
    resnet(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embedder.embedder.convolution.weight"][0] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert "embedder.embedder.convolution.weight has numbers that are not finite" in refusal(tmp_path)


def test_heads_that_do_not_divide_the_width_are_refused(tmp_path: Path) -> None:
    NETWORKS["vit"](64, 2).save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_attention_heads": 2', '"num_attention_heads": 7'))
    assert "7 heads" in refusal(tmp_path)
