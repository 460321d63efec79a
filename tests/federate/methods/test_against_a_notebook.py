"""Methods against their slow twin, plain torch with masks by hand (tests/naive.py)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from fedsieve.model.flat import FlatModel
from fedsieve.runs.model_file import load_classifier
from fedsieve.runs.read import read_metrics
from naive import Notebook

Maker = Callable[..., Experiment]
SPLIT = "clients.split={kind: dirichlet, alpha: 0.5, balanced: false}"  # clients of different sizes
MASKS = {
    "dense": "null",
    "own": "{sparsity: 0.6, rule: random}",
    "own each round": "{sparsity: 0.6, rule: random, refresh: round}",
    "own each epoch": "{sparsity: 0.6, rule: random, refresh: epoch}",
    "shared rows": "{sparsity: 0.6, rule: random, unit: row, scope: server}",
    "head dense": "{sparsity: 0.6, rule: random, dense: [head]}",
}


def compare(settings: Experiment, folder: Path, method: str, mu: float = 0.0) -> None:
    run(settings, folder)
    expected = Notebook(settings, folder, method, mu).run()
    found = FlatModel(load_classifier(folder)).tensors()
    assert not any(line["failed"] for line in read_metrics(folder))
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=2e-6)


def phase(train: str, mask: str, local: str, more: str = "") -> str:
    local = f"{{batch_size: 8, {local}}}"
    return f"phases=[{{name: one, train: {train}, rounds: 3, local: {local}, mask: {MASKS[mask]}{more}}}]"


@pytest.mark.parametrize("mask", MASKS)
def test_fedprox(mask: str, experiment: Maker, tmp_path: Path) -> None:
    local = "epochs: 2, lr: 0.02, clip_norm: 0.5"
    settings = experiment(phase("all", mask, local, ", method: {fedprox: {mu: 2.0}}"), SPLIT)
    compare(settings, tmp_path, "fedprox", 2.0)


@pytest.mark.parametrize("mask", MASKS)
def test_scaffold(mask: str, experiment: Maker, tmp_path: Path) -> None:
    local = "epochs: 2, lr: 0.02, clip_norm: 0.5, momentum: 0.0"
    compare(experiment(phase("all", mask, local, ", method: scaffold"), SPLIT), tmp_path, "scaffold")


@pytest.mark.parametrize(
    ("mask", "momentum"),
    [
        ("dense", "momentum: 0.8"),
        ("own", "momentum: 0.0"),
        ("own each round", "momentum: 0.8, nesterov: true"),
        ("shared rows", "momentum: 0.8"),
        ("head dense", "momentum: 0.8, nesterov: true"),
    ],
)
def test_fednova(mask: str, momentum: str, experiment: Maker, tmp_path: Path) -> None:
    local = f"epochs: 2, lr: 0.02, schedule: linear, {momentum}"
    compare(experiment(phase("all", mask, local, ", method: fednova"), SPLIT), tmp_path, "fednova")


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "fednova"])
def test_the_quick_path_for_heads(method: str, experiment: Maker, tmp_path: Path) -> None:
    local = "epochs: 2, lr: 0.3, clip_norm: 0.1, momentum: 0.0"
    compare(
        experiment(phase("head", "dense", local, f", method: {method}"), SPLIT),
        tmp_path,
        method,
        0.01 * (method == "fedprox"),
    )
