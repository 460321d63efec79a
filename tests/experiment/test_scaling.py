"""What many clients and large rounds cost in memory. Each figure is the peak of a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedsieve.model.vit import ViT, ViTShape, initialize

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")

# Each run is a fork, so that importing is done once and the peaks begin at the same height. VmHWM is the fork's own;
# the maximum of getrusage would be inherited.
PROGRAM = """
import json, os, sys
from pathlib import Path
from fedsieve.experiment import run
from fedsieve.config.experiment_file import load_experiment
path, out, settings = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
for number, overrides in enumerate(settings):
    if (fork := os.fork()) == 0:
        run(load_experiment(path, overrides), out / str(number))
        print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")), flush=True)
        os._exit(0)
    os.waitpid(fork, 0)
"""


def peaks(experiment: Path, out: Path, *settings: list[str]) -> list[int]:
    """The most bytes that runs of an experiment took, with these overrides each."""
    command = [sys.executable, "-c", PROGRAM, str(experiment), str(out), json.dumps(settings)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert len(found.stdout.split()) == len(settings), found.stderr
    return [1024 * int(line) for line in found.stdout.split()]


def backbone(path: Path, shape: ViTShape) -> Path:
    network = ViT(shape)
    initialize(network, torch.Generator().manual_seed(0))
    save_file({name: tensor.clone() for name, tensor in network.state_dict().items()}, path)
    return path


@pytest.fixture(scope="module")
def many_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with 200,000 images of 8 x 8."""
    folder = tmp_path_factory.mktemp("many")
    images = np.random.default_rng(0).integers(0, 256, size=(200_000, 8, 8), dtype=np.uint8)
    labels = np.arange(200_000) % 100
    np.savez(folder / "many.npz", x_train=images, y_train=labels, x_test=images[:100], y_test=labels[:100])
    shape = ViTShape(image_size=8, patch_size=8, width=64, depth=1, heads=1, hidden=64, layer_scale=True)
    (folder / "many.yaml").write_text(f"""
device: cpu
threads: 1
data: {{name: npz, path: {folder / "many.npz"}, image_size: 8, validation: 0.001}}
model: {{backbone: {backbone(folder / "tiny.safetensors", shape)}}}
evaluate: {{sample: 50}}
phases:
  - {{name: all, train: all, rounds: 3, local: {{steps: 1, batch_size: 2, lr: 0.001}}}}
""")
    return folder / "many.yaml"


@pytest.mark.parametrize(
    "settings",
    [[], ["clients.holdout=0.5", "clients.select=by_size"]],
)
def test_a_client_costs_its_samples_only(many_images: Path, tmp_path: Path, settings: list[str]) -> None:
    ways = [[f"clients.count={count}", f"clients.fraction={10 / count}", *settings] for count in (100, 100_000)]
    few, many = peaks(many_images, tmp_path, *ways)
    assert many - few < 200 * 100_000


def test_a_round_holds_one_update_at_a_time(tmp_path: Path) -> None:
    """Whatever is kept of each of 90 more updates of 5.1 MB would show."""
    images, labels = np.zeros((400, 8, 8), dtype=np.uint8), np.arange(400) % 4
    np.savez(tmp_path / "few.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    shape = ViTShape(image_size=8, patch_size=8, width=256, depth=2, heads=4, hidden=768, layer_scale=True)
    (tmp_path / "wide.yaml").write_text(f"""
device: cpu
threads: 1
data: {{name: npz, path: {tmp_path / "few.npz"}, image_size: 8}}
model: {{backbone: {backbone(tmp_path / "wide.safetensors", shape)}}}
clients: {{count: 100}}
analyze: {{level: blocks}}
phases:
  - {{name: all, train: all, rounds: 1, local: {{steps: 1, batch_size: 2, lr: 0.001}}}}
""")
    few, many = peaks(tmp_path / "wide.yaml", tmp_path, ["clients.fraction=0.1"], ["clients.fraction=1.0"])
    assert many < 1.1 * few
