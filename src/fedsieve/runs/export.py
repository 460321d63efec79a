"""A finished run's model in Hugging Face format.

Our vision transformer with a linear head becomes one of transformers' classifiers, anything else a backbone
with the head in a separate file. A converted model must give the same scores as the run's, which is checked first.
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedsieve.config.data_settings import DataSettings, ResizeCenterCrop
from fedsieve.config.experiment_file import elsewhere
from fedsieve.data import DATASETS
from fedsieve.data.load import Dataset, Statistics, load
from fedsieve.data.transform import KNOWN, channel_statistics
from fedsieve.errors import InputError, RunError
from fedsieve.model.backbone import quiet_transformers
from fedsieve.model.classifier import Classifier
from fedsieve.model.given_module import GivenBackbone, Model, whole_module
from fedsieve.model.pretrained import our_name
from fedsieve.model.vit import ViT, ViTShape
from fedsieve.runs.model_file import load_classifier
from fedsieve.runs.read import read_experiment, read_result
from fedsieve.runs.roster import federation_of
from fedsieve.runs.same_plugins import with_same_plugins

TOLERANCE = 1e-4  # between our scores and those of the exported model, for scores around 1


def export_run(
    run: Path,
    to: Path,
    overrides: Sequence[str] = (),
    given: Model | None = None,
    dataset: Callable[[DataSettings], Dataset | None] = lambda _: None,
    plugins: Sequence[str | Path] = (),
) -> str:
    """Write the run's model and its evaluation transform to the folder `to`; returns a line on how to load them.

    Callers from Python give again what they gave the run: the model, and a function to its data set. `plugins` are
    needed only if the data set is a plugin's and the transform depends on its images.
    """
    recorded = read_result(run)  # only a finished run has a model
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"--to {to} exists already; give the name of a new folder")
    model = load_classifier(run, given)
    experiment = elsewhere(read_experiment(run), overrides)
    theirs = federation_of(run).statistics if experiment.federation is not None else None  # nodes have the images
    needs_plugin = experiment.data.normalize not in KNOWN and experiment.data.name not in DATASETS
    with (
        with_same_plugins(run, experiment, recorded, plugins) if plugins or needs_plugin else nullcontext(experiment)
    ) as known:
        processor = preprocessor_config(known.data, theirs, dataset)
    target = to.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise InputError(f"--to {to} cannot be made ({error.strerror}); give another folder") from None
    with scratch as name, quiet_transformers():  # on any error, nothing half-written is left
        folder = Path(name) / "export"
        folder.mkdir()
        text = write_model(model, folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n", encoding="utf-8")
        for file in folder.rglob("*.safetensors"):  # they are made readable only by their owner
            file.chmod((folder / "preprocessor_config.json").stat().st_mode)
        folder.replace(target)
    return text.format(to=to)


def write_model(model: Classifier, folder: Path) -> str:
    """Write the network, and the head separately if transformers has no classifier like ours; returns how to load."""
    backbone, head = model.backbone, model.head
    if isinstance(backbone, GivenBackbone):
        return write_module(whole_module(backbone, head), folder)
    network = as_transformers(model, backbone.shape) if isinstance(backbone, ViT) else backbone.network
    if isinstance(backbone, ViT) and isinstance(head, nn.Linear):
        network.save_pretrained(folder)
        return (
            "load it with transformers: AutoModelForImageClassification.from_pretrained('{to}'), "
            "and AutoImageProcessor.from_pretrained('{to}') for the images"
        )
    network.save_pretrained(folder / "backbone")
    tensors = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / "head.safetensors", {"classes": json.dumps(model.classes)})
    linears = [f"Linear({one.in_features}, {one.out_features})" for one in head.modules() if isinstance(one, nn.Linear)]
    layers = linears[0] if len(linears) == 1 else f"Sequential({', ReLU(), '.join(linears)})"
    feature = "last_hidden_state[:, 0]" if isinstance(backbone, ViT) else "pooler_output (flat; if none, the mean)"
    return (
        f"load it in two parts: transformers.{type(network).__name__}.from_pretrained('{{to}}/backbone') gives the "
        f"feature, its {feature}; torch.nn.{layers} with the tensors of {{to}}/head.safetensors makes it scores"
    )


def write_module(module: nn.Module, folder: Path) -> str:
    """Write a module that was given from Python, under its own names; returns how to load it."""
    name = type(module).__name__
    if callable(getattr(module, "save_pretrained", None)):
        module.save_pretrained(folder)  # type: ignore[operator]
        return f"load it with {name}.from_pretrained('{{to}}')"
    tensors = {key: tensor.detach().clone().contiguous() for key, tensor in module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return f"load it into your {name}: load_state_dict(safetensors.torch.load_file('{{to}}/model.safetensors'))"


def as_transformers(model: Classifier, shape: ViTShape) -> Any:
    """The transformers network with our weights: a classifier if the head is linear, else the backbone."""
    from transformers import AutoConfig, AutoModelForImageClassification

    try:
        config = AutoConfig.for_model(**hub_config(shape, model.classes))
        classifier = AutoModelForImageClassification.from_config(config).eval()
        fill_from_ours(classifier.base_model, model.backbone.state_dict())
    except Exception as error:  # which one depends on the release
        raise RunError(f"transformers cannot hold this model ({type(error).__name__}: {error})") from None
    backbone, size = classifier.base_model, shape.image_size
    if not isinstance(model.head, nn.Linear):
        check_scores(model, lambda images: model.head(backbone(images).last_hidden_state[:, 0]), size)
        return backbone
    with torch.no_grad():
        classifier.classifier.weight.zero_()  # DINOv2's also has weights for the mean of the patches, ours does not
        classifier.classifier.weight[:, : shape.width] = model.head.weight
        classifier.classifier.bias.copy_(model.head.bias)
    check_scores(model, lambda images: classifier(images).logits, size)
    return classifier


def hub_config(shape: ViTShape, classes: list[str]) -> dict[str, Any]:
    """The config.json of a ViT, or of a DINOv2 where there are LayerScale or registers."""
    config: dict[str, Any] = {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": shape.epsilon,
        "image_size": shape.image_size,
        "patch_size": shape.patch_size,
        "qkv_bias": True,
        "id2label": dict(enumerate(classes)),
        "label2id": {name: label for label, name in enumerate(classes)},
    }
    if not shape.layer_scale and not shape.registers:
        return config | {"model_type": "vit", "intermediate_size": shape.hidden}
    ratio = shape.hidden / shape.width
    config |= {"model_type": "dinov2", "mlp_ratio": int(ratio) if ratio.is_integer() else ratio}
    if shape.registers:
        config |= {"model_type": "dinov2_with_registers", "num_register_tokens": shape.registers}
    return config


@torch.no_grad()
def fill_from_ours(network: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy our tensors to where they belong in a transformers network; qkv is three tensors there."""
    for name, target in network.state_dict().items():
        ours = our_name(name)
        if ours.endswith("mask_token"):
            target.zero_()  # serves pretraining only
        elif found := re.search(r"\.attn\.([qkv])\.", ours):
            fused = tensors[ours.replace(found[0], ".attn.qkv.")]
            target.copy_(fused.chunk(3)["qkv".index(found[1])])
        else:
            target.copy_(tensors[ours])


@torch.no_grad()
def check_scores(model: Classifier, exported: Callable[[Tensor], Tensor], image_size: int) -> None:
    """RunError unless both models give some random images the same scores."""
    images = torch.randn(4, 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    ours = model(images)
    difference = float((ours - exported(images)).abs().max())
    if not difference < TOLERANCE * max(1.0, float(ours.abs().max())):
        raise RunError(f"the exported model's scores would differ from the run's by {difference:.1e}; none is written")


def preprocessor_config(
    settings: DataSettings, statistics: Statistics | None, dataset: Callable[[DataSettings], Dataset | None]
) -> dict[str, Any]:
    """The config with which AutoImageProcessor prepares images as the evaluation does.

    `statistics` are those of all training images, where they are known without these.
    """
    assert settings.image_size is not None
    known = KNOWN.get(settings.normalize)
    mean, std = known or statistics or channel_statistics((dataset(settings) or load(settings)).train)
    square = size = {"height": settings.image_size, "width": settings.image_size}
    if isinstance(settings.evaluate_crop, ResizeCenterCrop):
        size = {"shortest_edge": max(settings.image_size, settings.evaluate_crop.resize_center_crop.resize)}
    return {
        "image_processor_type": "BitImageProcessor",  # the one that can do both kinds
        "do_convert_rgb": True,
        "do_resize": True,
        "size": size,
        "resample": 2,  # bilinear
        "do_center_crop": size is not square,
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }
