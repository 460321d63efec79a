"""Pretrained backbones: a hub name, a local folder, a checkpoint file, or `pico`.

ViT, DINO and DINOv2 become the network of `vit.py`, whatever format they come in. Any other model of
transformers that gives one feature vector per image is used as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsieve.config.model_settings import Positions, is_given
from fedsieve.errors import InputError
from fedsieve.model.given_module import GivenBackbone, describe_given
from fedsieve.model.pretrained import (
    MOST_BLOCKS,
    check_finite,
    check_image_size,
    read_hugging_face_config,
    read_tensors,
    rename_hugging_face,
    shape_of,
    shape_of_config,
    vit_from_tensors,
)
from fedsieve.model.vit import ViT, ViTShape

OUR_VIT = ("vit", "dinov2", "dinov2_with_registers")  # model types that vit.py covers


class HuggingFaceBackbone(nn.Module):
    """Any other transformers vision model; its feature is the pooled output."""

    def __init__(self, network: nn.Module, width: int) -> None:
        super().__init__()
        self.network: Any = network  # a PreTrainedModel, with its config
        self.width = width

    def forward(self, images: Tensor) -> Tensor:
        return pooled(self.network(images))


Backbone = ViT | HuggingFaceBackbone | GivenBackbone
FROM_PYTHON = "was given from Python; give it again with model=… there (fedsieve.run, fedsieve.load_run)"


def load_backbone(name: str, image_size: int, positions: Positions = "hugging_face") -> Backbone:
    """The backbone that `model.backbone` names, ready for images of `image_size` pixels.

    `positions` is whose way its position embeddings are interpolated, see `vit_from_tensors`.
    """
    if is_given(name):
        raise InputError(f"model.backbone: {name}: the model {FROM_PYTHON}, or name a backbone")
    if name == "pico":
        path = Path(str(resources.files("fedsieve") / "model" / "pico.safetensors"))
        return _from_file(path, image_size, "pico", positions)
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(path, image_size, positions)
    if path.is_file():
        return _from_file(path, image_size, str(path), positions)
    if path.suffix in (".pth", ".pt", ".bin", ".safetensors") or name.startswith((".", "/", "~")):
        raise InputError(f"model.backbone: {name} does not exist; give a checkpoint file, a folder or a hub name")
    return _from_folder(_download(name), image_size, positions)


def _from_file(path: Path, image_size: int, source: str, positions: Positions) -> ViT:
    tensors = read_tensors(path)
    if "patch_embed.proj.weight" in tensors:
        return vit_from_tensors(tensors, shape_of(tensors, source), image_size, source, positions)
    tensors = rename_hugging_face(tensors)
    shape = shape_of(tensors, source)
    if path.with_name("config.json").exists():  # it knows the number of heads, which the tensors do not show
        shape = shape_of_config(read_hugging_face_config(path.parent), tensors, source)
    return vit_from_tensors(tensors, shape, image_size, source, positions)


def _from_folder(folder: Path, image_size: int, positions: Positions) -> Backbone:
    config = read_hugging_face_config(folder)
    plain = config.get("hidden_act", "gelu") == "gelu" and config.get("qkv_bias", True)
    if config.get("model_type") not in OUR_VIT or not plain or config.get("use_swiglu_ffn"):
        if positions != "hugging_face":
            raise InputError(
                f"model.positions: {positions} is for ViT, DINO and DINOv2; {folder} is none, use hugging_face"
            )
        _check_depth(config, str(folder))
        return _from_transformers(folder, image_size)
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise InputError(f"{folder} holds no weights; expected model.safetensors or pytorch_model.bin")
    tensors = rename_hugging_face({name: tensor for file in files for name, tensor in read_tensors(file).items()})
    shape = shape_of_config(config, tensors, str(folder))
    return vit_from_tensors(tensors, shape, image_size, str(folder), positions)


def _check_depth(config: dict[str, Any], source: str) -> None:
    """A number of layers that would take minutes to build before transformers sees that the weights do not fit."""
    for key, value in config.items():
        if isinstance(value, dict):  # of a model's part
            _check_depth(value, source)
        elif "layer" in key or "depth" in key:
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(number, int | float) and number > MOST_BLOCKS for number in numbers):
                raise InputError(f"{source}: in config.json {key} is {str(value)[:60]}; use at most {MOST_BLOCKS:,}")


def _from_transformers(folder: Path, image_size: int) -> HuggingFaceBackbone:
    from transformers import AutoModel

    try:
        with quiet_transformers():
            network, info = AutoModel.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
            )
    except Exception as error:  # a folder can be wrong in many ways
        raise InputError(f"{folder} is no vision model that transformers can load ({_first_line(error)})") from None
    if missing := sorted(info["missing_keys"]):  # transformers would go on with random numbers
        raise InputError(f"{folder} does not fit: it has no tensor {missing[0]}; give a folder made by save_pretrained")
    return _wrapped(network, image_size, str(folder))


def _wrapped(network: nn.Module, image_size: int, source: str) -> HuggingFaceBackbone:
    patch_size: Any = getattr(network.config, "patch_size", None)
    if isinstance(patch_size, int) and patch_size > 0:
        check_image_size(image_size, patch_size)
    check_finite(network, source)
    network.eval()
    try:
        with torch.no_grad():
            width = pooled(network(torch.zeros(1, 3, image_size, image_size))).shape[1]
    except Exception as error:
        reason = _first_line(error)
        raise InputError(f"{source} does not turn {image_size} px images into features ({reason})") from None
    return HuggingFaceBackbone(network, width)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice from transformers while it loads or saves something."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def pooled(output: Any) -> Tensor:
    """One vector per image: the model's own pooled output, else the mean over positions."""
    feature = getattr(output, "pooler_output", None)
    if feature is None:
        hidden = output.last_hidden_state
        feature = hidden.mean(dim=1) if hidden.ndim == 3 else hidden.mean(dim=(2, 3))
    return feature.flatten(1)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors", "pytorch_model*.bin"]))
    except Exception as error:
        raise InputError(
            f"model.backbone: '{name}' is no local file or folder and could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}); "
            "give a path instead, such as model.backbone=PATH/TO/dino_deitsmall16_pretrain.pth"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# A finished run must open without the file its backbone came from, so its model file describes it.


def describe(backbone: Backbone) -> dict[str, Any]:
    if isinstance(backbone, ViT):
        return {"vit": vars(backbone.shape)}
    if isinstance(backbone, GivenBackbone):
        return describe_given(backbone)
    return {"transformers": backbone.network.config.to_dict(), "width": backbone.width}


def from_description(description: dict[str, Any]) -> Backbone:
    """An empty backbone of the described shape."""
    if "vit" in description:
        return ViT(ViTShape(**description["vit"]))
    if "given" in description:
        raise InputError(f"the model {description['given']} {FROM_PYTHON}")
    from transformers import AutoConfig, AutoModel

    config = dict(description["transformers"])
    network = AutoModel.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    return HuggingFaceBackbone(network, description["width"])
