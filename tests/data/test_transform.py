"""Transforms of whole batches, against slow and obvious ones."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from fedsieve.config.data_settings import DataSettings
from fedsieve.data.load import Samples
from fedsieve.data.transform import Transform, channel_statistics, random_crops, random_resized_crop


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


def torchvisions_crop(
    height: int, width: int, scale: tuple[float, float], uniform: Callable[[], float], attempts: int = 10
) -> tuple[int, int, int, int]:
    """Top, left, height and width: `RandomResizedCrop.get_params` as torchvision documents it, one image at a time."""
    for _ in range(attempts):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * uniform())
        aspect = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * uniform())
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(uniform() * (height - h + 1)), int(uniform() * (width - w + 1)), h, w
    w, h = width, height
    if width / height < 3 / 4:
        h = round(w / (3 / 4))
    elif width / height > 4 / 3:
        w = round(h * (4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize("size", [(32, 32), (24, 40), (20, 90)])
@pytest.mark.parametrize("scale", [(0.5, 1.0), (0.08, 1.0), (1.0, 1.0)])
def test_crops_are_distributed_as_torchvisions(size: tuple[int, int], scale: tuple[float, float]) -> None:
    """Means and deviations of all four numbers, how often it is the fallback, and no crop beyond the border."""
    n = 4_000
    ours = torch.stack(random_crops(n, *size, scale, torch.Generator().manual_seed(3)), dim=1).double()
    uniform = np.random.default_rng(4).random
    theirs = torch.tensor([torchvisions_crop(*size, scale, uniform) for _ in range(n)]).double()
    assert (ours >= 0).all() and (ours[:, :2] + ours[:, 2:] <= torch.tensor(size)).all() and (ours[:, 2:] > 0).all()
    for statistic in (lambda one: one, lambda one: one**2, lambda one: one[:, 2:3] * one[:, 3:4]):
        a, b = statistic(ours), statistic(theirs)
        allowed = 4.5 * ((a.var(dim=0) + b.var(dim=0)) / n).sqrt() + 1e-9
        assert ((a.mean(dim=0) - b.mean(dim=0)).abs() <= allowed).all()
    whole = torch.tensor(torchvisions_crop(*size, scale, uniform, attempts=0)).double()
    shares = [float((one == whole).all(dim=1).double().mean()) for one in (ours, theirs)]
    assert abs(shares[0] - shares[1]) <= 4.5 * math.sqrt(max(shares[1], 1 / n) * 2 / n)


@pytest.mark.parametrize("scale", [(0.5, 1.0), (0.1, 0.2), (1.0, 1.0)])
@pytest.mark.parametrize(("height", "width", "size"), [(11, 11, 9), (64, 31, 9), (9, 12, 30), (20, 90, 17)])
def test_a_random_resized_crop_is_cut_and_resized_with_antialiasing(
    height: int, width: int, size: int, scale: tuple[float, float]
) -> None:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randint(0, 256, (6, 3, height, width), generator=generator).float()
    fast = random_resized_crop(pixels, size, scale, torch.Generator().manual_seed(5))
    crops = torch.stack(random_crops(6, height, width, scale, torch.Generator().manual_seed(5)), dim=1).tolist()
    for image, ours, (top, left, h, w) in zip(pixels, fast, crops, strict=True):
        part = image[None, :, top : top + h, left : left + w]
        slow = F.interpolate(part, size=(size, size), mode="bilinear", align_corners=False, antialias=True)[0]
        assert (ours - slow).abs().max() < 0.01  # of 255; both work in float32


def test_a_crop_that_shrinks_averages_noise() -> None:
    """From 256 to 32 pixels, a triangle over 16 x 16 pixels leaves little of it; four points would leave most."""
    noise = torch.randint(0, 256, (4, 3, 256, 256), generator=torch.Generator().manual_seed(0)).float()
    whole = F.interpolate(noise, size=(32, 32), mode="bilinear", align_corners=False, antialias=True)
    shrunk = random_resized_crop(noise, 32, (0.9, 1.0), torch.Generator().manual_seed(1))
    assert float(shrunk.std()) < 1.1 * float(whole.std())


def test_a_crop_does_not_depend_on_the_other_images() -> None:
    data = samples(count=5).images.float()
    whole = random_resized_crop(data, 9, (0.5, 1.0), torch.Generator().manual_seed(1))
    changed = data.clone()
    changed[1:] = 0
    assert torch.equal(whole[0], random_resized_crop(changed, 9, (0.5, 1.0), torch.Generator().manual_seed(1))[0])
    assert torch.equal(whole, random_resized_crop(data, 9, (0.5, 1.0), torch.Generator().manual_seed(1)))
    assert not torch.equal(whole, random_resized_crop(data, 9, (0.5, 1.0), torch.Generator().manual_seed(2)))
