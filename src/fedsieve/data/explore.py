"""A data set before anything is trained on it: balance, likeness of images, spread of classes, colours out of line.

The analysis of report 001, section 4.1. Images are looked at a few thousand at a time, so that 50,000 of 32 x 32 pixels
take a few seconds and no more memory than themselves. Distances are Euclidean, of pixels flattened, from 0 to 1 each.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsieve.config.data_settings import DataSettings
from fedsieve.data.load import Samples, class_names, image_files

AT_A_TIME = 1 << 24  # numbers that are held as floats
CONFIDENCE = 0.975  # of the chi-squared threshold
NEGLIGIBLE = 1e-10  # an eigenvalue of a covariance below this share of the largest is rounding


@dataclass(frozen=True)
class Outliers:
    """How far each image's mean colour is from those of its class, and where that is too far."""

    distances: np.ndarray  # Mahalanobis, one for each image
    degrees: np.ndarray  # of freedom of each class: the rank of its covariance
    thresholds: np.ndarray  # of each class, of distances; infinite without any freedom
    positions: np.ndarray  # of the images that are out of line, the farthest beyond its threshold first


def sizes_in_files(settings: DataSettings) -> np.ndarray | None:
    """(images, 2): width and height of a folder's images as they lie there; None for data that is stored as it is.

    Only the beginning of each file is read. Images that a camera held upright are turned, as `load` does.
    """
    from PIL import ExifTags, Image

    if settings.name != "folder":
        return None
    parts = [part for name in ("train", "test") if (part := Path(settings.path or "") / name).is_dir()]
    sizes = []
    for path in (path for part in parts for name in class_names(part) for path in image_files(part / name)):
        with Image.open(path) as image:
            on_its_side = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
            sizes.append(image.size[::-1] if on_its_side else image.size)
    return np.array(sizes)


def distances_to(samples: Samples, reference: int) -> np.ndarray:
    """The distance of every image to the one at position `reference`."""
    images = _flat(samples)
    squares = np.empty(len(images))
    own = images[reference].astype(np.int32)
    for part in _chunks(len(images), images.shape[1]):
        squares[part] = np.square(images[part].astype(np.int32) - own).sum(axis=1, dtype=np.int64)  # exact
    return np.sqrt(squares) / 255


def nearest_and_farthest(samples: Samples, reference: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(positions of the images most like the reference, of those least like it, all distances); not of itself."""
    distances = distances_to(samples, reference)
    order = np.argsort(distances, kind="stable")
    order = order[order != reference]
    return order[:count], order[::-1][:count], distances


def spread_of_classes(samples: Samples, classes: int) -> np.ndarray:
    """The mean distance of a class's images to their centroid, the mean of them; NaN for a class without images."""
    images, labels = _flat(samples), samples.labels.numpy()
    spread = np.full(classes, np.nan)
    for label in range(classes):
        positions = np.flatnonzero(labels == label)
        if not len(positions):
            continue
        parts = [positions[part] for part in _chunks(len(positions), images.shape[1])]
        centroid = sum(images[part].sum(axis=0, dtype=np.int64) for part in parts) / len(positions)
        total = sum(float(np.linalg.norm(images[part] - centroid, axis=1).sum()) for part in parts)
        spread[label] = total / len(positions) / 255
    return spread


def mean_colours(samples: Samples) -> np.ndarray:
    """The mean of each channel of each image, from 0 to 1: (images, channels)."""
    count, channels = samples.images.shape[:2]
    images = samples.images.numpy().reshape(count, channels, -1)
    means = np.empty((count, channels))
    for part in _chunks(count, images[:1].size):
        means[part] = images[part].sum(axis=2, dtype=np.int64) / (255 * images.shape[2])
    return means


def colour_outliers(colours: np.ndarray, labels: np.ndarray, classes: int) -> Outliers:
    """Images whose mean colour x is far from their class's: (x - mean)' covariance⁺ (x - mean) > chi² at 97.5%.

    The chi-squared distribution has as many degrees of freedom as the covariance has rank: 3 for colours, fewer where
    it is singular (⁺ is the pseudo-inverse), as with grey images in three channels or a class of few images, and none
    for a class whose images are all alike.
    """
    from scipy.special import chdtri  # the point that chi-squared exceeds with some probability; lighter than stats

    distances, degrees = np.zeros(len(colours)), np.zeros(classes, dtype=np.int64)
    for label in range(classes):
        positions = np.flatnonzero(labels == label)
        if len(positions) < 2:
            continue
        away = colours[positions] - colours[positions].mean(axis=0)
        values, vectors = np.linalg.eigh(away.T @ away / (len(positions) - 1))
        real = values > max(NEGLIGIBLE * values[-1], 1e-20)
        degrees[label] = real.sum()
        distances[positions] = np.sqrt(np.square(away @ vectors[:, real] / np.sqrt(values[real])).sum(axis=1))
    free = degrees > 0
    thresholds = np.where(free, np.sqrt(chdtri(np.maximum(degrees, 1), 1 - CONFIDENCE)), np.inf)
    beyond = distances / thresholds[labels]
    order = np.argsort(-beyond, kind="stable")
    return Outliers(distances, degrees, thresholds, order[beyond[order] > 1])


def _flat(samples: Samples) -> np.ndarray:
    return samples.images.numpy().reshape(len(samples), -1)


def _chunks(count: int, width: int) -> list[slice]:
    step = max(1, AT_A_TIME // max(1, width))
    return [slice(first, first + step) for first in range(0, count, step)]
