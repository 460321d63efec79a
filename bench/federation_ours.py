"""Experiments without training over fedsieve's nodes, for bench/federation.py: models of random weights, and runs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from federation_flower import lines_of
from safetensors.torch import save_file
from workload import as_experiment

from fedsieve.experiment.export_split import export_split
from fedsieve.federation.loopback import Loopback
from fedsieve.model.vit import ViT, ViTShape, initialize

PLUGIN = Path(__file__).with_name("federation_noop.py")
EACH = 8  # images of a client
CLASSES, SIDE = 10, 28
SERVER = "server"  # the process of `fedsieve run`, by its name in Loopback


@dataclass(frozen=True)
class Size:
    """A model by the bytes of its weights."""

    width: int
    depth: int

    @property
    def shape(self) -> ViTShape:
        heads = self.width // 64
        return ViTShape(SIDE, 14, self.width, self.depth, heads, 4 * self.width, layer_scale=True)

    @property
    def network(self) -> torch.nn.Module:
        return torch.nn.Sequential(ViT(self.shape), torch.nn.Linear(self.width, CLASSES))

    @property
    def tensors(self) -> list[int]:
        """The lengths of all tensors that are trained, with the head's."""
        return [one.numel() for one in self.network.parameters()]


SIZES = {"tiny": Size(64, 1), "9 MB": Size(192, 5), "87 MB": Size(384, 12)}


def backbone(folder: Path, size: Size) -> Path:
    """A checkpoint file in which all weights are random."""
    path = folder / "backbone.safetensors"
    network, generator = ViT(size.shape), torch.Generator().manual_seed(0)
    initialize(network, generator)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.02, generator=generator)
    save_file({name: tensor.clone() for name, tensor in network.state_dict().items()}, path)
    return path


def experiment(folder: Path, size: Size, clients: int, rounds: int) -> dict[str, Any]:
    """All weights of a model, at so many clients; nothing is evaluated."""
    generator = np.random.default_rng(0)
    images = folder / "images.npz"
    x = generator.integers(0, 256, (clients * EACH, SIDE, SIDE, 3), dtype=np.uint8)
    y = np.arange(len(x)) % CLASSES
    np.savez(images, x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    local = {"steps": 1, "batch_size": EACH, "lr": 0.01}
    return {
        "data": {
            "name": "npz",
            "path": str(images),
            "image_size": SIDE,
            "validation": 0.0,
            "normalize": "imagenet",
        },
        "model": {"backbone": str(backbone(folder, size))},
        "clients": {"count": clients, "fraction": 1.0, "split": "iid"},
        "phases": [{"name": "all", "train": "all", "rounds": rounds, "local": local}],
        "evaluate": {"test": "never"},
        "analyze": {"level": "none"},
    }


class Ours:
    """A federation on this machine, with an experiment; nodes and relays are started by whoever needs them."""

    def __init__(self, folder: Path, size: Size, clients: int, rounds: int, kind: type[Loopback] = Loopback) -> None:
        self.folder, self.rounds = folder, rounds
        self.settings = experiment(folder, size, clients, rounds)
        export_split(as_experiment(self.settings), folder / "shards")
        self.loopback = kind(folder / "shards")

    def start_nodes(self) -> None:
        """Real nodes, which know the plugin, and relays."""
        self.settings["phases"][0]["method"] = "no_op"
        self.settings["plugins"] = [str(PLUGIN)]
        options = ["--backbone", self.settings["model"]["backbone"], "--plugin", str(PLUGIN)]
        self.loopback.start_superlink()
        self.loopback.start_nodes(self.loopback.clients, *options)
        self.loopback.start_relays(self.loopback.clients)

    def begin(self) -> None:
        """Start `fedsieve run`, as a process of its own."""
        file = self.folder / "experiment-to-run.yaml"
        file.write_text(yaml.safe_dump(self.settings))
        out = str(self.folder / "run")
        self.loopback.start_process(SERVER, "run", str(file), self.loopback.engine, "--out", out)

    def end(self, seconds: float) -> list[dict[str, Any]]:
        """Wait until the run is over, in so many seconds at most; the lines of its metrics."""
        if self.loopback.processes[SERVER].wait(seconds):
            raise SystemExit(f"fedsieve failed:\n{self.loopback.said(SERVER).read_text()[-4000:]}")
        lines = lines_of(self.folder / "run" / "metrics.jsonl")
        if len(lines) != self.rounds or any(line["failed"] for line in lines):
            raise SystemExit(f"not all of fedsieve's clients replied: {json.dumps(lines)[-4000:]}")
        return lines
