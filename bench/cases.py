"""The cases of the side-by-side benchmark: the experiment of each, who takes part, and the bars."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import VIT_S
from safetensors.torch import save_file

from fedsieve.config.data_settings import DataSettings
from fedsieve.data.load import load
from fedsieve.model.vit import ViT, initialize

ASSETS = Path(os.environ.get("FEDSIEVE_ASSETS") or Path(__file__).parents[2] / "shared").resolve()
CIFAR = ASSETS / "data" / "cifar-100-python"
WEIGHTS = ASSETS / "weights" / "dinov2_vits14_focus_fp16.safetensors"

Settings = dict[str, Any]
ONE_BY_TWO, TWO_BY_ONE, ONE_BY_ONE = (
    {"processes": processes, "threads": threads} for processes, threads in ((1, 2), (2, 1), (1, 1))
)


@dataclass(frozen=True)
class Bar:
    """A bound on the ratio of two contenders."""

    what: str
    to: str | None  # None: the bound is on the value itself
    at_most: float | None = None
    at_least: float | None = None

    def is_met(self, ratio: float) -> bool:
        return ratio <= self.at_most if self.at_most is not None else ratio >= (self.at_least or 0.0)

    def __str__(self) -> str:
        return f"≤ {self.at_most}" if self.at_most is not None else f"≥ {self.at_least}"


@dataclass(frozen=True)
class Contender:
    """Who does it, and how; with `settings` an experiment of its own instead of the case's."""

    kind: str  # a name in contenders.py
    options: dict[str, Any] = field(default_factory=dict)  # those of contenders.py
    settings: Callable[[Path], Settings] | None = None
    warm: bool = False  # whether a run that is not counted fills fedsieve's cache first


@dataclass(frozen=True)
class Case:
    title: str
    settings: Callable[[Path], Settings]  # the experiment, with its data written to the folder if need be
    contenders: dict[str, Contender]
    bars: tuple[Bar, ...] = ()
    on_features: bool = False  # everybody starts from the backbone's output
    cold: bool = False  # fedsieve's cache is empty in every run
    on_request: bool = False  # only with --only


# --------------------------------------------------------------------------------- data and weights


def images(folder: Path, per_class: int) -> str:
    """A file with so many CIFAR-100 training images of each class; noise of their shape where there is no CIFAR-100."""
    path = folder / f"images-{per_class}.npz"
    if not path.exists():
        count = 100 * per_class
        if CIFAR.exists():
            train = load(DataSettings(name="cifar100", path=str(CIFAR))).train
            kept = torch.cat([(train.labels == label).nonzero().flatten()[:per_class] for label in range(100)])
            x, y = train.images[kept].numpy(), train.labels[kept].numpy()
        else:
            x = np.random.default_rng(0).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
            y = np.arange(count) % 100
        np.savez(path, x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    return str(path)


def vit_s(folder: Path) -> str:
    """The ViT-S stand-in, or random weights of its shape."""
    if WEIGHTS.exists():
        return str(WEIGHTS)
    path = folder / "random.safetensors"
    if not path.exists():
        network = ViT(VIT_S)
        initialize(network, torch.Generator().manual_seed(0))
        save_file(network.state_dict(), path)
    return str(path)


def provenance(settings: Settings) -> str:
    """What data and weights an experiment really has."""
    if settings["model"]["backbone"] == "pico":
        return "digits, pico" if settings["data"]["name"] == "digits" else "random images, pico"
    pictures = "CIFAR-100" if CIFAR.exists() else "random images (no CIFAR-100 at hand)"
    return f"{pictures}, {'the focus stand-in' if WEIGHTS.exists() else 'random weights (no pretrained ones at hand)'}"


# -------------------------------------------------------------------------------------- experiments

CLIENTS = {"count": 100, "fraction": 0.1, "split": "iid"}
LOCAL = {"momentum": 0.9, "weight_decay": 1e-4, "schedule": "constant"}
EVALUATE = {"every": 1, "test": "never"}
ANALYZE = {"level": "none"}  # nobody else measures how clients disagree


def head(folder: Path) -> Settings:
    return {
        "data": {
            "name": "npz",
            "path": images(folder, 20),
            "image_size": 56,
            "validation": 0.02,
            "normalize": "imagenet",
        },
        "model": {"backbone": vit_s(folder)},
        "clients": CLIENTS,
        "phases": [
            {
                "name": "head",
                "train": "head",
                "rounds": 20,
                "local": {"epochs": 4, "batch_size": 32, "lr": 0.01, **LOCAL},
            }
        ],
        "evaluate": EVALUATE,
        "analyze": ANALYZE,
    }


def dense(folder: Path, train: Any = "all", mask: Settings | None = None, batch: int = 32, steps: int = 4) -> Settings:
    local = {"steps": steps, "batch_size": batch, "lr": 1e-4, **LOCAL}
    phase = {"name": "edit", "train": train, "rounds": 1, "local": local} | ({"mask": mask} if mask else {})
    return {
        "data": {
            "name": "npz",
            "path": images(folder, 128),
            "image_size": 56,
            "validation": 0.0,
            "normalize": "imagenet",
        },
        "model": {"backbone": vit_s(folder)},
        "clients": CLIENTS,
        "phases": [phase],
        "evaluate": EVALUATE,
        "analyze": ANALYZE,
    }


def small_rounds(_: Path) -> Settings:
    return {
        "data": {"name": "digits", "image_size": 32, "validation": 0.2},
        "model": {"backbone": "pico"},
        "clients": CLIENTS,
        "phases": [
            {
                "name": "head",
                "train": "head",
                "rounds": 100,
                "local": {"epochs": 1, "batch_size": 16, "lr": 0.1, **LOCAL},
            }
        ],
        "evaluate": EVALUATE,
        "analyze": ANALYZE,
    }


# -------------------------------------------------------------------------------------------- cases

ROWS = {"unit": "row", "sparsity": 0.9, "rule": "random", "scope": "server"}
LAST_BLOCKS = {"blocks": [8, 9, 10, 11]}
FEDSIEVE = Contender("fedsieve")
FLOWER, PFL = Contender("flower", TWO_BY_ONE), Contender("pfl", TWO_BY_ONE)  # one by two was not faster
ON_FEATURES = {  # too little work for two cores
    "fedsieve": Contender("fedsieve", warm=True),
    "bare": Contender("bare", ONE_BY_ONE),
    "notebook": Contender("notebook", ONE_BY_ONE),
    "Flower": FLOWER,
    "pfl": Contender("pfl", ONE_BY_ONE),
}


def faster_than(bars: dict[str, float]) -> tuple[Bar, ...]:
    return tuple(Bar(name, "fedsieve", at_least=bar) for name, bar in bars.items())


def workers(count: int, threads: int) -> Contender:
    return Contender("fedsieve", {"overrides": f"workers={count} threads={threads}"})


def two_by_one(engine: str, warm: bool = False, **options: int) -> Contender:
    """fedsieve with two workers or actors of one thread, in a new process each time, as Ray prefers it."""
    overrides = f"engine={engine} workers=2 threads=1"
    return Contender("fedsieve", {**TWO_BY_ONE, "overrides": overrides, **options}, warm=warm)


CASES: dict[str, Case] = {
    "dense": Case(
        "All weights of ViT-S: 1 round of 10 clients, 4 steps of 32 images each",
        dense,
        {
            "fedsieve": FEDSIEVE,
            "fedsieve, 10% of rows": Contender("fedsieve", settings=lambda folder: dense(folder, mask=ROWS)),
            "fedsieve, blocks 8-11": Contender(
                "fedsieve", settings=lambda folder: dense(folder, train=LAST_BLOCKS), warm=True
            ),
            "fedsieve, blocks 8-11, 10% of rows": Contender(  # finds the same outputs of blocks 0-7 in the cache
                "fedsieve", settings=lambda folder: dense(folder, train=LAST_BLOCKS, mask=ROWS)
            ),
            "bare": Contender("bare", ONE_BY_TWO),
            "notebook": Contender("notebook", ONE_BY_TWO),
            "Flower": FLOWER,
            "pfl": PFL,
        },
        (
            Bar("fedsieve", "bare", at_most=1.05),
            *faster_than({"notebook": 1.0, "Flower": 1.0, "pfl": 1.0}),
            Bar("fedsieve, 10% of rows", "bare", at_most=0.80),
            Bar("fedsieve, blocks 8-11", "bare", at_most=0.40),
            Bar("fedsieve, blocks 8-11, 10% of rows", "bare", at_most=0.32),
        ),
    ),
    "head": Case(
        "Head of a frozen ViT-S: 20 rounds of 10 clients, 4 epochs of their 20 images in one batch, cold cache",
        head,
        {
            "fedsieve": FEDSIEVE,
            "one forward pass": Contender("forward", ONE_BY_TWO),
            "notebook": Contender("notebook", ONE_BY_TWO),
            "Flower": FLOWER,
            "pfl": PFL,
        },
        (
            Bar("fedsieve", "one forward pass", at_most=1.15),
            *faster_than({"notebook": 8.0, "Flower": 8.0, "pfl": 8.0}),
        ),
        cold=True,
    ),
    "features": Case(
        "The same with the same features for everybody",
        head,
        ON_FEATURES,
        faster_than({"Flower": 5.0, "pfl": 1.0}),
        on_features=True,
    ),
    "small": Case(
        "100 small rounds: head of pico on digits, 10 clients, 1 epoch of about 12 images each, features for everybody",
        small_rounds,
        ON_FEATURES,
        faster_than({"Flower": 20.0, "pfl": 3.0}),
        on_features=True,
    ),
    "workers": Case(
        "fedsieve's workers: all weights of ViT-S, 1 round of 10 clients, 2 steps of 16 images each",
        lambda folder: dense(folder, batch=16, steps=2),
        {
            "1 worker of 2 threads": workers(1, 2),
            "2 workers of 1 thread": workers(2, 1),
            "1 worker of 1 thread": workers(1, 1),
        },
    ),
    "ray": Case(
        "fedsieve on Ray: all weights of ViT-S as in `dense`, two actors beside two workers of one thread",
        dense,
        {"fedsieve": two_by_one("local"), "fedsieve on Ray": two_by_one("ray")},
        (Bar("fedsieve on Ray", "fedsieve", at_most=1.10),),
    ),
    "ray-small": Case(
        "100 small rounds as in `small`, on Ray",
        small_rounds,
        {
            "fedsieve": two_by_one("local", warm=True),
            "fedsieve on Ray": two_by_one("ray"),
            "fedsieve on Ray, all jobs travel": two_by_one("ray", all_travel=1),
            "Flower": FLOWER,
        },
        (
            Bar("Flower", "fedsieve on Ray", at_least=3.0),
            Bar("Flower", "fedsieve on Ray, all jobs travel", at_least=3.0),
        ),
        on_features=True,
    ),
    "floor": Case(
        "All weights of ViT-S as in `dense`, beside two processes of one thread that do nothing but steps",
        dense,
        {"fedsieve": FEDSIEVE, "bare, two processes": Contender("bare", TWO_BY_ONE), "pfl": PFL},
        (Bar("fedsieve", "bare, two processes", at_most=1.05), *faster_than({"pfl": 1.0})),
        on_request=True,
    ),
}
