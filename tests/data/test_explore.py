"""Looking at a data set: against naive loops and scipy."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis
from scipy.stats import chi2

from fedsieve.config.data_settings import DataSettings
from fedsieve.data import explore
from fedsieve.data.explore import (
    colour_outliers,
    distances_to,
    mean_colours,
    nearest_and_farthest,
    spread_of_classes,
)
from fedsieve.data.load import Samples, load


@pytest.fixture(params=[1 << 24, 100])
def samples(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Samples:
    """60 small colour images of 3 classes, of which class 3 has none, seen all at once or a few at a time."""
    monkeypatch.setattr(explore, "AT_A_TIME", request.param)
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, size=(60, 3, 4, 5), dtype=np.uint8)
    return Samples(torch.from_numpy(images), torch.from_numpy(np.arange(60) % 3))


def test_distances_are_those_of_a_naive_loop(samples: Samples) -> None:
    truth = []
    for image in samples.images.numpy() / 255:
        pairs = zip(image.flat, (samples.images[7].numpy() / 255).flat, strict=True)
        truth.append(sum((one - other) ** 2 for one, other in pairs) ** 0.5)
    np.testing.assert_allclose(distances_to(samples, 7), truth, rtol=1e-12)


def test_the_reference_is_not_like_itself(samples: Samples) -> None:
    nearest, farthest, distances = nearest_and_farthest(samples, 7, 5)
    order = sorted((distance, k) for k, distance in enumerate(distances) if k != 7)
    assert nearest.tolist() == [k for _, k in order[:5]]
    assert farthest.tolist() == [k for _, k in order[::-1][:5]]


def test_an_image_that_is_there_twice_is_the_one_most_alike(samples: Samples) -> None:
    samples.images[3] = samples.images[50]
    nearest, _, distances = nearest_and_farthest(samples, 50, 1)
    assert nearest.tolist() == [3] and distances[3] == 0


def test_the_spread_of_a_class_is_the_mean_distance_to_its_centroid(samples: Samples) -> None:
    spread = spread_of_classes(samples, 4)
    for label in range(3):
        own = [image.flatten() / 255 for image in samples.images.numpy()[samples.labels == label]]
        centroid = sum(own) / len(own)
        assert spread[label] == pytest.approx(np.mean([np.sqrt(np.sum((one - centroid) ** 2)) for one in own]))
    assert np.isnan(spread[3])


def test_mean_colours_are_the_means_of_channels(samples: Samples) -> None:
    np.testing.assert_allclose(mean_colours(samples), (samples.images.numpy() / 255).mean(axis=(2, 3)))


def test_outliers_are_those_beyond_scipys_mahalanobis_distance_and_chi_squared() -> None:
    generator = np.random.default_rng(1)
    labels = np.arange(400) % 2
    colours = generator.normal(size=(400, 3)) @ generator.normal(size=(3, 3)) + labels[:, None]
    found = colour_outliers(colours, labels, 2)
    truth = np.empty(400)
    for label in (0, 1):
        own = colours[labels == label]
        inverse = np.linalg.inv(np.cov(own, rowvar=False))
        truth[labels == label] = [mahalanobis(one, own.mean(axis=0), inverse) for one in own]
    np.testing.assert_allclose(found.distances, truth, rtol=1e-9)
    assert set(found.positions) == set(np.flatnonzero(truth**2 > chi2.ppf(0.975, 3))) and len(found.positions) > 3
    assert found.degrees.tolist() == [3, 3]
    assert np.all(np.diff(truth[found.positions]) <= 0)  # the farthest first


def test_grey_images_have_one_degree_of_freedom_however_many_channels_say_so() -> None:
    generator = np.random.default_rng(2)
    grey, labels = generator.random(300), np.zeros(300, dtype=np.int64)
    one, three = (colour_outliers(np.repeat(grey[:, None], count, axis=1), labels, 1) for count in (1, 3))
    truth = np.abs(grey - grey.mean()) / grey.std(ddof=1)
    for found in (one, three):
        np.testing.assert_allclose(found.distances, truth, rtol=1e-9)
        assert found.degrees.tolist() == [1] and found.thresholds[0] == pytest.approx(np.sqrt(chi2.ppf(0.975, 1)))


def test_a_class_of_one_image_or_of_equal_images_has_no_outliers() -> None:
    colours = np.array([[0.1, 0.2, 0.3]] * 5 + [[0.9, 0.9, 0.9]])
    found = colour_outliers(colours, np.array([0, 0, 0, 0, 0, 1]), 3)
    assert not len(found.positions) and found.degrees.tolist() == [0, 0, 0]
    assert not found.distances.any()


def test_digits_are_grey() -> None:
    data = load(DataSettings(name="digits"))
    found = colour_outliers(mean_colours(data.train), data.train.labels.numpy(), 10)
    assert set(found.degrees) == {1} and 0 < len(found.positions) < 0.05 * len(data.train)
