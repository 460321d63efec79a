"""Data sets that are given as objects: every kind of image, column and label, and one sentence for what is wrong."""

from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset, Subset, TensorDataset

from fedsieve.config.data_settings import DataSettings
from fedsieve.data.given_data import read_given
from fedsieve.errors import InputError
from fedsieve.files import memory

SETTINGS = DataSettings(image_size=8)
NAMES = ["cat", "dog", "owl"]


def pixels(count: int, height: int = 6, width: int = 5) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def labels(count: int) -> list[int]:
    return [place % 3 for place in range(count)]


def hugging_face(count: int, image: str = "image", label: str = "label", **more: Any) -> datasets.Dataset:
    features = {image: datasets.Image(), label: datasets.ClassLabel(names=NAMES), **more}
    columns = {image: [Image.fromarray(one) for one in pixels(count)], label: labels(count)}
    columns |= {name: labels(count) for name in more}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def samples(images: Any, count: int = 9) -> list[tuple[Any, int]]:
    return list(zip(images, labels(count), strict=True))


def test_hugging_face_data_sets() -> None:
    train, test = hugging_face(12), hugging_face(6)
    for given in (
        (train, test),
        datasets.DatasetDict(train=train, test=test),
        {"train": hugging_face(12, "picture", "species"), "test": hugging_face(6, "img", "animal")},
        (hugging_face(12, "img", "fine_label", coarse_label=datasets.ClassLabel(names=NAMES)), test),
        (train.with_format("numpy"), test.with_transform(lambda rows: {"pixel_values": rows["image"]})),
    ):
        data = read_given(given, SETTINGS)
        assert torch.equal(data.train.images, torch.from_numpy(pixels(12)).permute(0, 3, 1, 2))
        assert torch.equal(data.test.images, torch.from_numpy(pixels(6)).permute(0, 3, 1, 2))
        assert data.train.labels.tolist() == labels(12) and data.classes == NAMES and not data.notes


def test_other_parts_are_not_used_and_a_missing_test_set_is_held_out() -> None:
    parts = {"train": hugging_face(30), "test": hugging_face(6), "validation": hugging_face(3)}
    assert read_given(parts, SETTINGS).notes == ["of the data, train and test are used, and not validation"]
    data = read_given(hugging_face(30), SETTINGS)
    assert (len(data.train), len(data.test)) == (24, 6)
    assert data.test.labels.bincount().tolist() == [2, 2, 2]
    assert data.notes == ["no test set: 6 of 30 images (a stratified 20%) are held out as the test set"]
    together = torch.cat([data.train.images, data.test.images]).flatten(1)
    assert sorted(together.tolist()) == sorted(torch.from_numpy(pixels(30)).permute(0, 3, 1, 2).flatten(1).tolist())


def test_every_kind_of_image() -> None:
    """Bytes and floats, channels first, last or missing, PIL and numpy; grey becomes three equal channels."""
    colour = torch.from_numpy(pixels(9))
    grey = colour[..., 0]
    first = colour.permute(0, 3, 1, 2)
    expected = {"colour": first, "grey": grey[:, None].expand(-1, 3, -1, -1)}
    kinds = {
        "colour": [first, colour, first / 255, (first / 255).double(), colour.numpy(), first.numpy() / np.float32(255)],
        "grey": [grey, grey[:, None], grey / 255, grey[..., None].numpy()],
    }
    kinds["colour"].append([Image.fromarray(one) for one in colour.numpy()])
    kinds["grey"].append([Image.fromarray(one) for one in grey.numpy()])
    for name, several in kinds.items():
        for images in several:
            assert torch.equal(read_given((samples(images), samples(images)), SETTINGS).train.images, expected[name])


def test_images_of_several_sizes_become_squares_like_those_of_a_folder() -> None:
    images = [*pixels(8), *pixels(1, 30, 20)]
    data = read_given((samples([Image.fromarray(one) for one in images]), samples(pixels(9))), SETTINGS)
    for place in (0, 8):
        square = Image.fromarray(images[place]).resize((8, 8), Image.Resampling.BILINEAR)
        assert np.array_equal(data.train.images[place].permute(1, 2, 0), np.asarray(square))
    assert data.test.images.shape == (9, 3, 8, 8)


def test_class_names_are_those_of_the_data_set() -> None:
    whole = TensorDataset(torch.from_numpy(pixels(9)), torch.tensor(labels(9)))
    assert read_given((whole, whole), SETTINGS).classes == ["0", "1", "2"]
    whole.classes = tuple(NAMES)
    data = read_given((Subset(whole, [0, 1, 4]), whole), SETTINGS)
    assert data.classes == NAMES and data.train.labels.tolist() == [0, 1, 1]


def test_a_limit_holds_for_objects_too() -> None:
    data = read_given((hugging_face(30), hugging_face(6)), DataSettings(image_size=8, limit=12))
    assert (len(data.train), len(data.test)) == (12, 6)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(samples(pixels(9)))


class Broken:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, place: int) -> Any:
        if place == 3:
            raise OSError("the disk\nis gone")
        return pixels(1)[0], 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            Stream(),
            "data: the training set is of type Stream, which has no length or no numbered samples; give",
        ),
        ("cifar100", "data: the training set is of type str, which has no length or no numbered samples"),
        ({"test": hugging_face(3)}, "data has no part train, but test; give it train and test"),
        (([], []), "data: the training set has no samples; give at least one of each class"),
        (Broken(), "data: the training set fails at sample 3 (OSError: the disk); mend it"),
        (pixels(4), "data: the training set gives samples of type ndarray; each should be a pair of image and label"),
        (
            samples([3] * 9),
            "data: sample 0 of the training set is of type int; images are PIL images, tensors",
        ),
        (samples(torch.randn(9, 3, 4, 4)), "data: sample 0 of the training set has numbers below 0 or above 1; give"),
        (samples(torch.full((9, 3, 4, 4), torch.nan)), "data: sample 0 of the training set has numbers below 0 or"),
        (
            samples(torch.zeros(9, 3, 4, 4, dtype=torch.int64)),
            "data: sample 0 of the training set is int64; give",
        ),
        (
            samples(torch.zeros(9, 4, 4, 4)),
            "data: sample 0 of the training set has shape [4, 4, 4]; expected (C",
        ),
        ([(pixels(1)[0], "cat")], "data: sample 0 of the training set has the label 'cat'; labels are whole numbers"),
        (
            [(pixels(1)[0], -1)],
            "data: sample 0 of the training set has the label '-1'; labels are whole numbers",
        ),
        ([(pixels(1)[0], 1.0)], "data: sample 0 of the training set has the label '1.0'; labels are whole numbers"),
        ([(pixels(1)[0], 700)] * 9, "data: labels go up to 700, more than there are images; number the classes from 0"),
        (
            hugging_face(3, label="a", b=datasets.ClassLabel(names=NAMES)),
            "data: which column holds the labels? There are image, a, b; call the right one label (rename_column)",
        ),
        (
            (hugging_face(3), hugging_face(3).cast_column("label", datasets.ClassLabel(names=NAMES[::-1]))),
            "data: the training and the test set name their classes differently; give both the same order",
        ),
    ],
)
def test_mistakes_are_one_sentence(given: Any, said: str) -> None:
    with pytest.raises(InputError) as raised:
        read_given(given, SETTINGS)
    assert str(raised.value).startswith(said) and "\n" not in str(raised.value)


def test_images_that_do_not_fit_into_memory_are_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: 9 * 6 * 5 * 3 - 1)
    with pytest.raises(InputError, match="9 images of 5 x 6 pixels do not fit into memory"):
        read_given(samples(pixels(9)), SETTINGS)
