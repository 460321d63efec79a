"""Transforms of whole batches, against slow and obvious ones."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedsieve.config import DataSettings
from fedsieve.data.load import Samples
from fedsieve.data.transform import Transform, channel_statistics, random_resized_crop


def samples(channels: int = 3, size: int = 20, count: int = 8) -> Samples:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, channels, size, size), generator=generator, dtype=torch.uint8)
    return Samples(images, torch.arange(count) % 2)


def transform(data: Samples, **settings: object) -> Transform:
    return Transform(DataSettings.model_validate({"image_size": 20, **settings}), data)


def test_statistics_are_those_of_the_pixels() -> None:
    data = samples()
    mean, std = channel_statistics(data)
    pixels = data.images.double() / 255
    np.testing.assert_allclose(mean, pixels.mean((0, 2, 3)), atol=1e-12)
    np.testing.assert_allclose(std, pixels.std((0, 2, 3), correction=0), atol=1e-12)
    normalised = transform(data).evaluation(data.images)
    assert normalised.mean().abs() < 1e-5 and abs(normalised.std() - 1) < 1e-3


def test_grey_becomes_three_channels() -> None:
    data = samples(channels=1)
    seen = transform(data, image_size=16).evaluation(data.images)
    assert seen.shape == (8, 3, 16, 16) and torch.equal(seen[:, 0], seen[:, 2])


@pytest.mark.parametrize("size", [12, 20, 33])
def test_resizing_is_pillows(size: int) -> None:
    """Bilinear with antialiasing, up and down, as a person would get it from Pillow."""
    data = samples()
    seen = transform(data, image_size=size, normalize="imagenet").evaluation(data.images)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    ours = (seen * std.view(3, 1, 1) + mean.view(3, 1, 1)) * 255
    for image, ours_one in zip(data.images, ours, strict=True):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        theirs = np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
        assert np.abs(ours_one.numpy() - theirs).max() < 1.6  # Pillow rounds twice


def test_center_crop() -> None:
    data = samples(size=30)
    settings = {"image_size": 20, "evaluate_crop": {"resize_center_crop": {"resize": 30}}, "normalize": "imagenet"}
    cropped = transform(data, **settings).evaluation(data.images)
    plain = transform(samples(size=20), normalize="imagenet").evaluation(data.images[:, :, 5:25, 5:25])
    assert torch.equal(cropped, plain)


def test_flips_are_addressed_and_fair() -> None:
    data = samples(count=400)
    flipping = transform(data, augment=["horizontal_flip"])
    plain = flipping.evaluation(data.images)
    seen = flipping.training(data.images, torch.Generator().manual_seed(1))
    same = (seen == plain).all(dim=(1, 2, 3)) if torch.__version__ >= "2.2" else (seen == plain).flatten(1).all(1)
    mirrored = (seen == plain.flip(3)).flatten(1).all(1)
    assert (same ^ mirrored).all() and 150 < mirrored.sum() < 250
    assert torch.equal(seen, flipping.training(data.images, torch.Generator().manual_seed(1)))
    assert not torch.equal(seen, flipping.training(data.images, torch.Generator().manual_seed(2)))
    assert flipping.is_random and not transform(data).is_random


def slow_crop(pixels: Tensor, size: int, scale: tuple[float, float], generator: torch.Generator) -> Tensor:
    """One pixel at a time: the source position of each output pixel's centre, then bilinear by hand."""
    n, channels, height, width = pixels.shape
    areas, aspects, rows, columns = torch.rand(4, n, generator=generator, dtype=torch.float64)
    out = torch.zeros(n, channels, size, size)
    for i in range(n):
        area = scale[0] + (scale[1] - scale[0]) * areas[i].item()
        aspect = math.exp(math.log(4 / 3) * (2 * aspects[i].item() - 1))
        w, h = min(1, math.sqrt(area * aspect)) * width, min(1, math.sqrt(area / aspect)) * height
        left, top = (width - w) * columns[i].item(), (height - h) * rows[i].item()
        for r in range(size):
            for c in range(size):
                y = min(max(top + (r + 0.5) * h / size - 0.5, 0), height - 1)
                x = min(max(left + (c + 0.5) * w / size - 0.5, 0), width - 1)
                y0, x0 = min(int(y), height - 2), min(int(x), width - 2)
                dy, dx = y - y0, x - x0
                corner = pixels[i, :, y0 : y0 + 2, x0 : x0 + 2]
                top_row = corner[:, 0, 0] * (1 - dx) + corner[:, 0, 1] * dx
                bottom_row = corner[:, 1, 0] * (1 - dx) + corner[:, 1, 1] * dx
                out[i, :, r, c] = top_row * (1 - dy) + bottom_row * dy
    return out


@pytest.mark.parametrize("scale", [(0.5, 1.0), (0.1, 0.2), (1.0, 1.0)])
def test_random_resized_crop_is_bilinear(scale: tuple[float, float]) -> None:
    pixels = samples(size=11, count=3).images.float()
    fast = random_resized_crop(pixels, 9, scale, torch.Generator().manual_seed(5))
    slow = slow_crop(pixels, 9, scale, torch.Generator().manual_seed(5))
    assert (fast - slow).abs().max() < 0.05  # of 255; grid_sample works in float32
