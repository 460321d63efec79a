"""CIFAR-100 itself and a real pretrained backbone, where they are at hand.

They are looked for in `$FEDSIEVE_ASSETS` (default `../shared`): data/cifar-100-python and
weights/dinov2_vits14_focus_fp16.safetensors. Without them these tests are skipped.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsieve.config.data_settings import DataSettings
from fedsieve.config.experiment_file import parse_experiment
from fedsieve.data.load import Dataset, load
from fedsieve.data.transform import Transform
from fedsieve.experiment import run
from fedsieve.model.backbone import load_backbone
from fedsieve.runs.model_file import load_classifier
from fedsieve.sieve.sensitivity import sensitivity

ASSETS = Path(os.environ.get("FEDSIEVE_ASSETS") or Path(__file__).parents[2] / "../shared").resolve()
CIFAR = ASSETS / "data" / "cifar-100-python"
WEIGHTS = ASSETS / "weights" / "dinov2_vits14_focus_fp16.safetensors"
pytestmark = pytest.mark.skipif(not CIFAR.exists() or not WEIGHTS.exists(), reason="no CIFAR-100 and weights at hand")


@pytest.fixture(scope="module")
def cifar() -> Dataset:
    return load(DataSettings(name="cifar100", path=str(CIFAR)))


def test_the_official_files(cifar: Dataset) -> None:
    assert cifar.train.images.shape == (50_000, 3, 32, 32) and cifar.test.images.shape == (10_000, 3, 32, 32)
    assert cifar.train.labels.bincount().tolist() == [500] * 100
    assert cifar.classes[0] == "apple" and cifar.classes[-1] == "worm"
    transform = Transform(DataSettings(image_size=56), cifar.train)
    np.testing.assert_allclose(transform.mean, [0.5071, 0.4865, 0.4409], atol=1e-4)  # as published in many places
    np.testing.assert_allclose(transform.std, [0.2673, 0.2564, 0.2762], atol=1e-4)


def subset(cifar: Dataset, path: Path, train: int, test: int, classes: int) -> Path:
    arrays = {}
    for name, part, count in (("train", cifar.train, train), ("test", cifar.test, test)):
        keep = torch.cat([(part.labels == label).nonzero().flatten()[:count] for label in range(classes)])
        arrays |= {f"x_{name}": part.images[keep].numpy(), f"y_{name}": part.labels[keep].numpy()}
    np.savez(path, **arrays)
    return path


def test_a_pretrained_vit_s_knows_classes_from_few_images(cifar: Dataset, tmp_path: Path) -> None:
    """10 classes, 60 training images of each, a closed-form head: far above the 10% of guessing."""
    data = subset(cifar, tmp_path / "ten.npz", train=60, test=20, classes=10)
    experiment = parse_experiment(f"""
data: {{name: npz, path: {data}, image_size: 56, validation: 0, normalize: imagenet}}
model: {{backbone: {WEIGHTS}, head: {{ridge: {{penalty: 1000}}}}}}
clients: {{count: 10, split: {{kind: classes, per_client: 2}}}}
""")
    assert run(experiment, tmp_path / "run")["test_accuracy"] > 0.55


def test_sensitivity_of_a_pretrained_vit_s(cifar: Dataset) -> None:
    """Whole batches against one backward per sample, on real images and weights."""
    transform = Transform(DataSettings(image_size=56, normalize="imagenet"), cifar.train)
    network = torch.nn.Sequential(load_backbone(str(WEIGHTS), 56), torch.nn.Linear(384, 100))
    inputs, labels = transform.evaluation(cifar.train.images[:3]), cifar.train.labels[:3]
    found, count = sensitivity(network, dict(network.named_parameters()), [(inputs, labels)], "empirical")
    expected = torch.zeros_like(found)
    for one in range(3):
        loss = torch.nn.functional.cross_entropy(network(inputs[one : one + 1]), labels[one : one + 1])
        expected += torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))]) ** 2
    assert count == 3
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_editing_the_last_blocks_of_a_pretrained_vit_s(cifar: Dataset, tmp_path: Path) -> None:
    """Head, then rows of two blocks on the cached output of the others: better, and nothing else has changed."""
    data = subset(cifar, tmp_path / "ten.npz", train=30, test=20, classes=10)
    experiment = parse_experiment(f"""
data: {{name: npz, path: {data}, image_size: 56, validation: 0, normalize: imagenet}}
model: {{backbone: {WEIGHTS}, head: {{ridge: {{penalty: 1000}}}}}}
clients: {{count: 3}}
phases:
  - name: edit
    train: {{blocks: [10, 11]}}
    rounds: 2
    local: {{steps: 3, batch_size: 32, lr: 0.01, clip_norm: 1.0}}
    mask: {{sparsity: 0.9, unit: row, calibration_rounds: 2, fisher: {{samples: 32}}}}
""")
    result = run(experiment, tmp_path / "run")
    head, edit = result["phases"]
    assert edit["test_loss"] < head["test_loss"]
    before, after = load_backbone(str(WEIGHTS), 56), load_classifier(tmp_path / "run").backbone
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        changed = float((old != new).float().mean())
        assert 0 < changed < 1 if name.startswith(("blocks.10.", "blocks.11.")) and old.ndim > 1 else True, name
        assert name.startswith(("blocks.10.", "blocks.11.")) or changed == 0, name


def test_position_embeddings_follow_the_image_size() -> None:
    small, large = load_backbone(str(WEIGHTS), 28), load_backbone(str(WEIGHTS), 56)
    assert small.pos_embed.shape == (1, 5, 384) and large.pos_embed.shape == (1, 17, 384)
    assert torch.equal(small.pos_embed[:, 0], large.pos_embed[:, 0])
