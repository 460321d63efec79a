"""What many tests need: a cache of their own, a small data set and a small pretrained-looking backbone."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from safetensors.torch import save_file

from fedsieve.cli import main
from fedsieve.config.experiment_file import parse_experiment
from fedsieve.config.schema import Experiment
from fedsieve.engine import pace
from fedsieve.engine.worker_pool import Worker, WorkerPool
from fedsieve.model.vit import ViT, ViTShape, initialize

settings.register_profile("fedsieve", deadline=None, max_examples=50)
settings.load_profile("fedsieve")

TINY = ViTShape(image_size=16, patch_size=8, width=64, depth=3, heads=1, hidden=96, layer_scale=True)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["FEDSIEVE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["HF_HUB_OFFLINE"] = "1"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it, as would ours
    os.environ["FEDSIEVE_WORKERS"] = "1"  # starting processes for each of hundreds of tiny runs would take minutes


@pytest.fixture(scope="session")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint file of a ViT of three small blocks, under DINOv2's names."""
    network = ViT(TINY)
    initialize(network, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)  # so that blocks do something
    path = tmp_path_factory.mktemp("backbone") / "tiny.safetensors"
    save_file({name: tensor.clone() for name, tensor in network.state_dict().items()}, path)
    return path


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 + 60 noisy 16 px images of 4 classes that can be told apart, as an npz file."""
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 256, size=(4, 16, 16, 3))
    arrays = {}
    for part, count in (("train", 240), ("test", 60)):
        labels = np.arange(count) % 4
        noisy = patterns[labels] + generator.normal(0, 120, size=(count, 16, 16, 3))
        arrays |= {f"x_{part}": noisy.clip(0, 255).astype(np.uint8), f"y_{part}": labels}
    path = tmp_path_factory.mktemp("images") / "patterns.npz"
    np.savez(path, **arrays)
    return path


@pytest.fixture
def experiment(backbone: Path, images: Path) -> Callable[..., Experiment]:
    """The small experiment with changes: `experiment("clients.count=1", …)`."""
    text = f"""
seed: 7
device: cpu
threads: 1
data: {{name: npz, path: {images}, image_size: 16, validation: 0.25}}
model: {{backbone: {backbone}}}
clients: {{count: 6, fraction: 0.5}}
phases:
  - name: head
    train: head
    rounds: 3
    local: {{epochs: 1, batch_size: 16, lr: 0.05}}
  - name: all
    train: all
    rounds: 2
    local: {{steps: 3, batch_size: 16, lr: 0.005}}
"""
    return lambda *overrides: parse_experiment(text, "test.yaml", overrides)


@pytest.fixture
def by_workers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All jobs are done by workers, also those of runs that would be over before these have started; what they do."""
    made, heard, done = WorkerPool.__init__, WorkerPool._hear, list[str]()

    def wait_first(self: WorkerPool, *arguments: object) -> None:
        made(self, *arguments)
        self.wait()
        assert len({worker.pid for worker in self.workers}) == self.size

    def count(self: WorkerPool, worker: Worker) -> None:
        if worker.ticket is not None:
            done.append(worker.ticket.job.do)
        heard(self, worker)

    monkeypatch.setattr(WorkerPool, "__init__", wait_first)
    monkeypatch.setattr(WorkerPool, "_hear", count)
    monkeypatch.setattr(pace, "TINY", 0.0)
    return done


@pytest.fixture
def fedsieve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable:
    """Run a command in an empty folder: (exit code, what it printed, what it said of errors)."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return command


@pytest.fixture
def file(experiment: Callable[..., Experiment], tmp_path: Path) -> Path:
    """The small experiment as a file."""
    path = tmp_path / "small.yaml"
    path.write_text(experiment().to_yaml())
    return path
