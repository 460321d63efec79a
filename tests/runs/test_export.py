"""Runs in Hugging Face format: transformers' scores and its view of an image are the run's."""

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    Dinov2ForImageClassification,
    Dinov2WithRegistersForImageClassification,
    ResNetConfig,
    ResNetModel,
    ViTForImageClassification,
)

from fedsieve.config.experiment_file import parse_experiment
from fedsieve.config.schema import Experiment
from fedsieve.data.load import load
from fedsieve.data.transform import Transform
from fedsieve.errors import InputError, RunError
from fedsieve.model.backbone import Backbone, HuggingFaceBackbone, pooled
from fedsieve.model.classifier import Classifier, make_head
from fedsieve.model.flat import FlatModel
from fedsieve.model.vit import ViT, ViTShape
from fedsieve.runs import export
from fedsieve.runs.export import export_run
from fedsieve.runs.folder import RunFolder
from fedsieve.runs.model_file import load_classifier

DIGITS = """
device: cpu
threads: 1
data: {name: digits, image_size: 32}
phases: [{name: all, train: all, rounds: 1, local: {steps: 1, lr: 0.1}}]
"""
FIGURES = ("test_accuracy", "test_loss", "val_accuracy", "val_loss", "best_val_accuracy", "best_val_loss", "best_round")
RESULT: dict[str, Any] = dict.fromkeys(FIGURES) | {"bytes_up": 1, "bytes_down": 1, "seconds": 1.0, "seed": 42}
RESULT["phases"] = [{**RESULT, "name": "all", "rounds": 1}]
CLASSES = [f"digit {k}" for k in range(10)]
SHAPES = {
    ViTForImageClassification: ViTShape(32, 8, width=64, depth=2, heads=4, hidden=96, epsilon=1e-5),
    Dinov2ForImageClassification: ViTShape(32, 8, width=64, depth=2, heads=2, hidden=256, layer_scale=True),
    Dinov2WithRegistersForImageClassification: ViTShape(
        32, 8, width=64, depth=2, heads=2, hidden=256, layer_scale=True, registers=3
    ),
}


def experiment(*overrides: str) -> Experiment:
    return parse_experiment(DIGITS, "digits.yaml", overrides).resolved()


@torch.no_grad()
def classifier(backbone: Backbone, hidden: int | None = None) -> Classifier:
    """With weights that all make a difference."""
    torch.manual_seed(0)
    model = Classifier(backbone, make_head(backbone.width, 10, hidden), CLASSES)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            noise = 0.3 * torch.randn(tensor.shape)
            tensor.copy_((1 + noise).abs() if tensor.ndim == 1 else 3 * noise / tensor[0].numel() ** 0.5)
    return model.eval()


def vit() -> Classifier:
    return classifier(ViT(SHAPES[ViTForImageClassification]))


def resnet() -> HuggingFaceBackbone:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return HuggingFaceBackbone(ResNetModel(config), 16)


def finished(path: Path, model: Classifier, settings: Experiment | None = None) -> Path:
    """The folder that a run with this model would leave."""
    folder = RunFolder(path, settings or experiment(), resume=False)
    folder.start()
    flat = FlatModel(model)
    folder.save_result({**RESULT, "model_sha256": folder.save_model(flat, flat.vector)})
    folder.close()
    return path


random_images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def scores(model: Any) -> Tensor:
    output = model(random_images)
    return output if isinstance(output, Tensor) else output.logits


# ---------------------------------------------------------------------------------- opening a run's model


@pytest.mark.parametrize("hidden", [None, 12])
@pytest.mark.parametrize("backbone", [*SHAPES.values(), None])
def test_a_saved_model_opens_again(backbone: ViTShape | None, hidden: int | None, tmp_path: Path) -> None:
    model = classifier(ViT(backbone) if backbone else resnet(), hidden)
    again = load_classifier(finished(tmp_path / "run", model))
    assert again.classes == CLASSES and not again.training
    assert torch.equal(scores(again), scores(model))


def test_something_else_than_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no")
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(InputError, match="finished run"):
            load_classifier(path)
        with pytest.raises(InputError, match="finished run"):
            export_run(path, tmp_path / "to")
    assert not (tmp_path / "to").exists()


# ------------------------------------------------------------------------------------------ classifiers


@pytest.mark.parametrize("kind", SHAPES)
def test_a_linear_head_gives_a_transformers_classifier(kind: type[Any], tmp_path: Path) -> None:
    model = classifier(ViT(SHAPES[kind]))
    line = export_run(finished(tmp_path / "run", model), tmp_path / "to")
    exported = AutoModelForImageClassification.from_pretrained(tmp_path / "to")
    assert type(exported) is kind
    assert float((scores(exported) - scores(model)).abs().max()) < 1e-4
    assert exported.config.id2label == dict(enumerate(CLASSES))
    assert exported.config.label2id["digit 7"] == 7 and exported.config.num_labels == 10
    assert f"AutoModelForImageClassification.from_pretrained('{tmp_path / 'to'}')" in line and "\n" not in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "to"]


def test_the_patches_half_of_dinov2s_classifier_is_zero(tmp_path: Path) -> None:
    model = classifier(ViT(SHAPES[Dinov2ForImageClassification]))
    export_run(finished(tmp_path / "run", model), tmp_path / "to")
    weight = load_file(tmp_path / "to" / "model.safetensors")["classifier.weight"]
    assert isinstance(model.head, nn.Linear)
    assert torch.equal(weight, torch.cat((model.head.weight, torch.zeros(10, 64)), dim=1))


def test_exported_files_are_as_readable_as_any(tmp_path: Path) -> None:
    export_run(finished(tmp_path / "run", vit()), tmp_path / "to")
    (tmp_path / "usual").touch()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (*(tmp_path / "to").iterdir(), tmp_path / "usual")}
    assert len(modes) == 1


def test_transformers_keeps_silent(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    export_run(finished(tmp_path / "run", vit()), tmp_path / "to")
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------- backbone and head


def head_of(folder: Path, *layers: nn.Module) -> nn.Module:
    head = nn.Sequential(*layers) if len(layers) > 1 else layers[0]
    head.load_state_dict(load_file(folder / "head.safetensors"))
    with safe_open(folder / "head.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == CLASSES
    return head


@pytest.mark.parametrize("kind", SHAPES)
@torch.no_grad()
def test_an_mlp_head_is_written_beside_its_backbone(kind: type[Any], tmp_path: Path) -> None:
    model = classifier(ViT(SHAPES[kind]), hidden=12)
    line = export_run(finished(tmp_path / "run", model), tmp_path / "to")
    name = kind.__name__.replace("ForImageClassification", "Model")
    assert f"transformers.{name}.from_pretrained" in line and "Linear(64, 12), ReLU(), Linear(12, 10)" in line
    backbone = getattr(transformers, name).from_pretrained(tmp_path / "to" / "backbone")
    head = head_of(tmp_path / "to", nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    theirs = head(backbone(random_images).last_hidden_state[:, 0])
    assert float((theirs - scores(model)).abs().max()) < 1e-4
    assert not [name for name in load_file(tmp_path / "to" / "backbone" / "model.safetensors") if "pooler" in name]


@torch.no_grad()
def test_another_network_is_written_as_it_is(tmp_path: Path) -> None:
    model = classifier(resnet())
    line = export_run(finished(tmp_path / "run", model), tmp_path / "to")
    assert "transformers.ResNetModel.from_pretrained" in line and "torch.nn.Linear(16, 10)" in line
    backbone = ResNetModel.from_pretrained(tmp_path / "to" / "backbone")
    theirs = head_of(tmp_path / "to", nn.Linear(16, 10))(pooled(backbone(random_images)))
    assert float((theirs - scores(model)).abs().max()) < 1e-4


# ---------------------------------------------------------------------------------------------- images


def levels(folder: Path, image: Image.Image, settings: Experiment) -> Tensor:
    """How far the exported transform's pixels are from our own, in steps of 1/255."""
    data = settings.data
    transform = Transform(data, load(data).train)
    pixels = torch.from_numpy(np.array(image))
    pixels = pixels[None, None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)[None]
    theirs = AutoImageProcessor.from_pretrained(folder)(image, return_tensors="pt")["pixel_values"]
    ours = transform.evaluation(pixels)
    assert theirs.shape == ours.shape == (1, 3, 32, 32)
    return (theirs - ours).abs() * torch.tensor(transform.std).view(1, 3, 1, 1) * 255


@pytest.mark.parametrize("normalize", ["dataset", "imagenet", "cifar100"])
@pytest.mark.parametrize("crop", ["resize", "{resize_center_crop: {resize: 40}}", "{resize_center_crop: {resize: 20}}"])
def test_the_image_processor_is_the_evaluation_transform(normalize: str, crop: str, tmp_path: Path) -> None:
    settings = experiment(f"data.normalize={normalize}", f"data.evaluate_crop={crop}")
    export_run(finished(tmp_path / "run", vit(), settings), tmp_path / "to")
    noise = np.random.default_rng(0).integers(0, 256, size=(60, 60, 3), dtype=np.uint8)
    digit = load(settings.data).test.images[0, 0].numpy()
    for image in (Image.fromarray(noise), Image.fromarray(digit)):
        # Pillow rounds to whole levels after each of its two passes
        assert float(levels(tmp_path / "to", image, settings).max()) <= 1.05


def test_longish_images_are_squeezed_or_cropped_alike(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, size=(60, 40, 3), dtype=np.uint8))
    for number, crop in enumerate(("resize", "{resize_center_crop: {resize: 36}}")):
        settings = experiment(f"data.evaluate_crop={crop}")
        run = finished(tmp_path / f"run{number}", vit(), settings)
        export_run(run, tmp_path / f"to{number}")
        assert float(levels(tmp_path / f"to{number}", noise, settings).max()) <= 1.05


# --------------------------------------------------------------------------------------------- refusals


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return finished(tmp_path / "run", vit())


def test_a_folder_with_something_in_it_is_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "precious").write_text("data")
    (tmp_path / "file").write_text("data")
    for to in (tmp_path / "to", tmp_path / "file", run):
        with pytest.raises(InputError, match="exists already"):
            export_run(run, to)
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["precious"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run", "to"]


def test_an_empty_folder_and_a_new_one_in_new_ones_are_fine(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for to in (tmp_path / "empty", tmp_path / "some" / "new" / "place"):
        export_run(run, to)
        assert {"config.json", "model.safetensors", "preprocessor_config.json"} <= {path.name for path in to.iterdir()}


def test_a_place_where_nothing_can_be_made_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("data")
    with pytest.raises(InputError, match="cannot be made"):
        export_run(run, tmp_path / "file" / "to")


def test_an_unfinished_run_is_refused(run: Path, tmp_path: Path) -> None:
    (run / "result.json").unlink()
    with pytest.raises(InputError, match="no finished run"):
        export_run(run, tmp_path / "to")


def test_data_that_are_gone_are_missed_only_if_their_statistics_are_needed(tmp_path: Path) -> None:
    for normalize in ("dataset", "imagenet"):
        place = ["data.name=folder", f"data.path={tmp_path}/gone", f"data.normalize={normalize}"]
        finished(tmp_path / normalize, vit(), experiment(*place))
    with pytest.raises(InputError, match="does not exist"):
        export_run(tmp_path / "dataset", tmp_path / "to")
    assert not (tmp_path / "to").exists()
    export_run(tmp_path / "imagenet", tmp_path / "to")


def test_other_scores_are_noticed_and_nothing_stays(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "fill_from_ours", lambda network, tensors: None)
    with pytest.raises(RunError, match="differ"):
        export_run(run, tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_shape_that_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    shape = ViTShape(32, 8, width=64, depth=1, heads=2, hidden=256, registers=2)  # registers, but no LayerScale
    with pytest.raises(RunError, match="cannot hold this model"):
        export_run(finished(tmp_path / "run", classifier(ViT(shape))), tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
