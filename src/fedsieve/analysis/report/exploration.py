"""What the page about a data set shows, as plain data with the images in it."""

import base64
import io
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve import __version__
from fedsieve.config.data_settings import DataSettings
from fedsieve.config.experiment_file import load_experiment
from fedsieve.data import DATASETS
from fedsieve.data.explore import CONFIDENCE, colour_outliers, mean_colours, nearest_and_farthest, spread_of_classes
from fedsieve.data.load import Dataset, Samples
from fedsieve.errors import InputError
from fedsieve.randomness import numpy_generator

GRID, LIKE, OUTLIERS = 16, 8, 24  # images shown: at random, most and least alike, out of line
SIDE = 96  # pixels of a larger image's thumbnail


def data_settings(data: str, path: str | None) -> DataSettings:
    """The data set with this name or at this place, or that of the experiment (a preset or a file) with this name."""
    if data not in DATASETS and path is None and (kind := _kind_of_data_at(data)):
        data, path = kind, data
    if data not in DATASETS:
        return load_experiment(data, [f"data.path={json.dumps(path)}"] if path else []).resolved().data
    if path is None and data in ("folder", "npz"):
        raise InputError(f"{data}: where does it lie? Add --path PATH")
    return DataSettings.model_validate({"name": data, "path": path and str(Path(path).expanduser())})


def _kind_of_data_at(place: str) -> str | None:
    """What `data.name` should be for data that lies there; None: it is no data."""
    with suppress(OSError, RuntimeError, ValueError):  # no possible path, so it is another name
        path = Path(place).expanduser()
        if path.is_dir():
            return "cifar100" if (path / "meta").is_file() and (path / "train").is_file() else "folder"
        if path.suffix == ".npz" and path.is_file():
            return "npz"
    return None


def exploration(
    data: Dataset, name: str, seed: int = 0, reference: int | None = None, sizes: np.ndarray | None = None
) -> dict[str, Any]:
    """All that the page shows; `reference` is the training image that others are compared with, None for any.

    `sizes` are those of the images before they were made squares, where they were.
    """
    train, classes = data.train, data.classes
    chosen = numpy_generator(seed, "explore").permutation(len(train))[:GRID]
    reference = int(chosen[0]) if reference is None else reference
    if not 0 <= reference < len(train):
        raise InputError(f"--reference {reference}: there is no such image; use 0 to {len(train) - 1}")
    labels = train.labels.numpy()
    nearest, farthest, distances = nearest_and_farthest(train, reference, LIKE)
    spread = spread_of_classes(train, len(classes))
    counts = [np.bincount(part.labels.numpy(), minlength=len(classes)) for part in (train, data.test)]

    def shown(positions: Iterable[int], figures: np.ndarray | None = None) -> list[dict[str, Any]]:
        return [
            {"position": int(k), "label": classes[labels[k]], "image": picture(train, int(k))}
            | ({} if figures is None else {"figure": round(float(figures[k]), 3)})
            for k in positions
        ]

    return {
        "title": f"{name}: what is in it",
        "version": __version__,
        "seed": seed,
        "notes": data.notes,
        "shape": list(train.images.shape[1:]),
        "sizes": None if sizes is None else {"smallest": sizes.min(0).tolist(), "largest": sizes.max(0).tolist()},
        "classes": classes,
        "train": counts[0].tolist(),
        "test": counts[1].tolist(),
        "samples": shown(chosen),
        "reference": shown([reference])[0],
        "nearest": shown(nearest, distances),
        "farthest": shown(farthest, distances),
        "spread": [None if np.isnan(value) else round(float(value), 4) for value in spread],
        "outliers": _outliers(train, labels, classes, shown),
    }


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """The page's figures by class, without images."""
    names = ("classes", "shape", "sizes", "train", "test", "spread")
    return {name: found[name] for name in names} | {"outliers": found["outliers"]["by_class"]}


def _outliers(train: Samples, labels: np.ndarray, classes: list[str], shown: Any) -> dict[str, Any]:
    found = colour_outliers(mean_colours(train), labels, len(classes))
    return {
        "confidence": CONFIDENCE,
        "count": len(found.positions),
        "by_class": np.bincount(labels[found.positions], minlength=len(classes)).tolist(),
        "degrees": found.degrees.tolist(),
        "thresholds": sorted({round(float(one), 3) for one in found.thresholds[np.isfinite(found.thresholds)]}),
        "images": shown(found.positions[:OUTLIERS], found.distances),
    }


def picture(samples: Samples, position: int) -> str:
    """An image as a PNG in a data URI, made smaller if it is large."""
    from PIL import Image

    pixels = samples.images[position].numpy()
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    if max(image.size) > SIDE:
        image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
