"""The model of a finished run: `model.safetensors`, which can be opened without the experiment."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedsieve.errors import InputError
from fedsieve.model.backbone import Backbone, describe, from_description
from fedsieve.model.classifier import Classifier, make_head
from fedsieve.model.given_module import Model, split_module
from fedsieve.model.pretrained import fill
from fedsieve.runs.read import check_model, read_experiment


def parts_of(model: Classifier) -> dict[str, Any]:
    """What `classifier_from` makes an equal model from, but for its weights."""
    hidden = model.head[0].out_features if isinstance(model.head, nn.Sequential) else None
    return {"backbone": describe(model.backbone), "hidden": hidden, "classes": model.classes}


def description(model: Classifier) -> dict[str, str]:
    """The metadata of the file, with which it can be opened without the experiment."""
    return {"fedsieve": json.dumps(parts_of(model), sort_keys=True)}


def read_classifier_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the description in a run's model.safetensors, which must be as the run wrote it."""
    check_model(path)
    try:
        with safe_open(path, framework="pt") as file:
            parts = json.loads((file.metadata() or {})["fedsieve"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        if parts.keys() == {"backbone", "hidden", "classes"}:
            return tensors, parts
    except (OSError, SafetensorError, KeyError, ValueError, AttributeError, RecursionError):
        pass
    raise InputError(f"{path} is no model of a finished run; give the folder of one")


def load_classifier(run: Path, given: Model | None = None) -> Classifier:
    """The model of a finished run's folder; a model that was given from Python must be given again."""
    tensors, parts = read_classifier_file(run / "model.safetensors")
    if given is not None and "given" not in parts["backbone"]:
        raise InputError(f"{run} has a model of its own; leave out the one that you give")
    model = classifier_from(parts, given, read_experiment(run).data.image_size if given is not None else None)
    fill(model, tensors, str(run))
    return model.eval()


def classifier_from(parts: dict[str, Any], given: Model | None, image_size: int | None) -> Classifier:
    """A classifier as described, with weights still to be filled in; `given` is the module of a caller from Python."""
    about, classes = parts["backbone"], parts["classes"]
    backbone: Backbone
    head: nn.Module
    if given is not None:
        assert image_size is not None
        backbone, head = split_module(Model(given.module, about["head"]), image_size, len(classes))
    else:
        backbone = from_description(about)
        head = make_head(backbone.width, len(classes), parts["hidden"])
    return Classifier(backbone, head, classes)


def start_from_run(model: Classifier, run: str) -> None:
    """Give a model the weights of a finished run, for `model.init`."""
    path = Path(run) / "model.safetensors"
    try:
        tensors, parts = read_classifier_file(path)
    except InputError as error:
        raise InputError(f"model.init: {error}") from None
    fill(model, tensors, f"model.init: {path}")
    if parts["classes"] != model.classes:
        raise InputError(f"model.init: {path} was trained for other classes, or in another order; use it with its data")
