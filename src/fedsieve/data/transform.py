"""From stored uint8 images to what the network sees, whole batches at a time."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedsieve.config.data_settings import DataSettings, RandomResizedCrop, ResizeCenterCrop
from fedsieve.data.load import Samples, Statistics
from fedsieve.files.memory import must_fit

KNOWN: dict[str, Statistics] = {
    "imagenet": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    "cifar100": ([0.5071, 0.4867, 0.4408], [0.2675, 0.2565, 0.2761]),
}
AT_LEAST_AT_ONCE = 100  # images that evaluation takes together, however small the batches of training are
ASPECT = math.log(4 / 3)  # crops are at most this much wider than high, or higher than wide
ATTEMPTS = 10  # to draw a crop that fits into the image
SMALL = 64  # pixels a side up to which resizing all crops at once, mostly multiplying by zeros, is faster


def channel_statistics(samples: Samples) -> Statistics:
    """Mean and standard deviation of each channel over all pixels, of values in [0, 1]; exact, by counting."""
    values = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(samples.images.shape[1]):
        counts = np.zeros(256)
        for part in samples.images.split(1000):  # bincount makes 8 bytes of each pixel
            counts += np.bincount(part[:, channel].numpy().ravel(), minlength=256)
        mean = float(counts @ values / counts.sum())
        means.append(mean)
        deviations.append(max(1e-6, float(counts @ (values - mean) ** 2 / counts.sum()) ** 0.5))
    return (means * 3, deviations * 3) if len(means) == 1 else (means, deviations)


class Transform:
    """Batches of uint8 (B, 1 or 3, H, W) to normalised float32 (B, 3, size, size)."""

    def __init__(self, settings: DataSettings, train: Samples, statistics: Statistics | None = None) -> None:
        """`statistics` are those of the whole training set, where `train` is only a part of it."""
        assert settings.image_size is not None
        self.size = settings.image_size
        self.crop_from = (
            settings.evaluate_crop.resize_center_crop.resize
            if isinstance(settings.evaluate_crop, ResizeCenterCrop)
            else None
        )
        self.must_fit(min(AT_LEAST_AT_ONCE, len(train)))
        self.flip = "horizontal_flip" in settings.augment
        crops = [one for one in settings.augment if isinstance(one, RandomResizedCrop)]
        self.crop_scale = crops[-1].random_resized_crop.scale if crops else None
        self.mean, self.std = KNOWN.get(settings.normalize) or statistics or channel_statistics(train)

    def must_fit(self, together: int) -> None:
        """InputError if the memory is too small for so many images at a time."""
        must_fit(
            2 * 4 * 3 * together * max(self.size, self.crop_from or 0) ** 2,  # as float32, before and after normalising
            f"data.image_size {self.size} makes {together} images at a time too large for the memory",
            "lower data.image_size or resize_center_crop.resize",
        )

    @property
    def is_random(self) -> bool:
        """Whether training sees another picture each time."""
        return self.flip or self.crop_scale is not None

    @property
    def key(self) -> dict[str, Any]:
        """What the evaluation view depends on."""
        return {"size": self.size, "crop_from": self.crop_from, "mean": self.mean, "std": self.std}

    def evaluation(self, images: Tensor) -> Tensor:
        return self._normalized(self._fitted(images.float()))

    def training(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """The evaluation view, or a random crop where one is asked for, mirrored by a coin's toss."""
        pixels = images.float()
        if self.crop_scale is not None:
            pixels = random_resized_crop(pixels, self.size, self.crop_scale, generator)
        else:
            pixels = self._fitted(pixels)
        if self.flip:
            tossed = torch.rand(len(pixels), generator=generator) < 0.5
            pixels = torch.where(tossed.view(-1, 1, 1, 1).to(pixels.device), pixels.flip(3), pixels)
        return self._normalized(pixels)

    def _fitted(self, pixels: Tensor) -> Tensor:
        if self.crop_from is None:
            return _resized(pixels, self.size, self.size)
        height, width = pixels.shape[2:]
        scale = self.crop_from / min(height, width)
        pixels = _resized(pixels, max(self.size, round(height * scale)), max(self.size, round(width * scale)))
        top, left = ((side - self.size) // 2 for side in pixels.shape[2:])
        return pixels[:, :, top : top + self.size, left : left + self.size]

    def _normalized(self, pixels: Tensor) -> Tensor:
        mean = torch.tensor(self.mean, device=pixels.device).view(1, 3, 1, 1) * 255
        std = torch.tensor(self.std, device=pixels.device).view(1, 3, 1, 1) * 255
        return (pixels.expand(-1, 3, -1, -1) - mean) / std  # grey images become three equal channels here


def _resized(pixels: Tensor, height: int, width: int) -> Tensor:
    if tuple(pixels.shape[2:]) == (height, width):
        return pixels
    return F.interpolate(pixels, size=(height, width), mode="bilinear", align_corners=False, antialias=True)


def random_resized_crop(pixels: Tensor, size: int, scale: tuple[float, float], generator: torch.Generator) -> Tensor:
    """A random part of each image, resized to a square: torchvision's RandomResizedCrop, bilinear and antialiased."""
    height, width = pixels.shape[2:]
    top, left, rows, columns = crops = random_crops(len(pixels), height, width, scale, generator)
    if max(height, width) <= SMALL:  # two products of matrices for each channel of each image, all at once
        down = _resizing(height, top, rows, size).to(pixels.device)
        across = _resizing(width, left, columns, size).to(pixels.device)
        return down[:, None] @ pixels @ across[:, None].mT
    parts = zip(pixels.split(1), torch.stack(crops, dim=1).tolist(), strict=True)
    return torch.cat([_resized(one[:, :, y : y + h, x : x + w], size, size) for one, (y, x, h, w) in parts])


def random_crops(
    count: int, height: int, width: int, scale: tuple[float, float], generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top, left, rows and columns of `count` random parts of images of a size, by torchvision's rule.

    A part has `scale` times the area of the image, drawn uniformly, and an aspect of 3/4 to 4/3, drawn log-uniformly.
    The first of ATTEMPTS draws that fits into the image counts. If none does, the part is the largest one in the
    middle that has such an aspect.
    """
    area, aspect = torch.rand(2, ATTEMPTS, count, generator=generator, dtype=torch.float64)
    area = height * width * (scale[0] + (scale[1] - scale[0]) * area)
    aspect = torch.exp(ASPECT * (2 * aspect - 1))
    columns, rows = (area * aspect).sqrt().round().long(), (area / aspect).sqrt().round().long()
    fits = (columns > 0) & (columns <= width) & (rows > 0) & (rows <= height)
    first = fits.int().argmax(dim=0)[None]  # of several largest, argmax takes the first
    some, columns, rows = fits.any(dim=0), columns.gather(0, first)[0], rows.gather(0, first)[0]
    columns = columns.where(some, min(width, round(height * math.exp(ASPECT))))
    rows = rows.where(some, min(height, round(width * math.exp(ASPECT))))
    down, across = torch.rand(2, count, generator=generator, dtype=torch.float64)
    top = (down * (height - rows + 1)).long().where(some, (height - rows) // 2)
    left = (across * (width - columns + 1)).long().where(some, (width - columns) // 2)
    return top, left, rows, columns


def _resizing(length: int, start: Tensor, extent: Tensor, size: int) -> Tensor:
    """(count, size, length): how much of each pixel of a line is in each pixel of a part of it, resized to `size`.

    The weights are those of F.interpolate(mode="bilinear", antialias=True): a triangle around the middle of the new
    pixel, which reaches to the next pixels when it enlarges, and to the next new pixels when it shrinks.
    """
    ratio = (extent / size).view(-1, 1, 1)
    middle = start.view(-1, 1, 1) + ratio * (torch.arange(size).view(1, -1, 1) + 0.5)
    pixel = torch.arange(length).view(1, 1, -1)
    weights = (1 - (pixel + 0.5 - middle).abs() / ratio.clamp(min=1)).clamp(min=0)
    inside = (pixel >= start.view(-1, 1, 1)) & (pixel < (start + extent).view(-1, 1, 1))
    weights = weights * inside
    return weights / weights.sum(dim=2, keepdim=True)
