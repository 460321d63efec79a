"""A client's own data, from an npz file or a folder of images, with the federation's classes or its own."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsieve.config.data_settings import DataSettings
from fedsieve.data.shards import read_server_data, read_shard
from fedsieve.errors import InputError
from fedsieve.files import memory

SETTINGS = DataSettings(image_size=12)
CLASSES = ["owl", "cat", "dog"]


def pixels(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)


def npz(place: Path, **arrays: object) -> Path:
    path = place / "shard.npz"
    np.savez(path, **arrays)
    return path


def folder(place: Path, files: dict[str, np.ndarray]) -> Path:
    root = place / "shard"
    for name, image in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / name)
    return root


def test_labels_of_an_npz_file_are_numbered_by_the_federation(tmp_path: Path) -> None:
    images = pixels(4, 12, 12, 3)
    path = npz(tmp_path, x=images, y=[0, 1, 1, 0], names=["dog", "owl"])
    samples, names = read_shard(path, SETTINGS, CLASSES)
    assert samples.labels.tolist() == [2, 0, 0, 2] and names == CLASSES
    assert np.array_equal(samples.images.numpy(), images.transpose(0, 3, 1, 2))
    samples, names = read_shard(path, SETTINGS)
    assert samples.labels.tolist() == [0, 1, 1, 0] and names == ["dog", "owl"]


def test_without_names_labels_count_the_federations_classes(tmp_path: Path) -> None:
    path = npz(tmp_path, x=pixels(3, 12, 12), y=[2, 0, 2])
    assert read_shard(path, SETTINGS, CLASSES)[0].labels.tolist() == [2, 0, 2]
    assert read_shard(path, SETTINGS)[1] == ["0", "1", "2"]
    with pytest.raises(InputError, match="labels go up to 2, and there are 2 classes"):
        read_shard(path, SETTINGS, ["a", "b"])


def test_images_of_a_folder_are_sorted_by_file_name_then_class(tmp_path: Path) -> None:
    images = pixels(4, 12, 12, 3)
    files = dict(zip(["dog/3.png", "cat/1.png", "dog/2.png", "cat/2.png"], images, strict=True))
    samples, names = read_shard(folder(tmp_path, files), SETTINGS, CLASSES)
    assert samples.labels.tolist() == [1, 1, 2, 2] and names == CLASSES  # 1.png, cat's 2.png, dog's, 3.png
    assert np.array_equal(samples.images.numpy(), images[[1, 3, 2, 0]].transpose(0, 3, 1, 2))


def test_images_of_a_folder_become_squares_unless_they_have_the_federations_shape(tmp_path: Path) -> None:
    images = pixels(2, 20, 9, 3)
    root = folder(tmp_path, {"owl/a.png": images[0], "cat/b.png": images[1]})
    squares = read_shard(root, SETTINGS, CLASSES)[0].images
    expected = [np.asarray(Image.fromarray(one).resize((12, 12), Image.Resampling.BILINEAR)) for one in images]
    assert np.array_equal(squares.numpy(), np.stack(expected).transpose(0, 3, 1, 2))
    as_they_are = read_shard(root, SETTINGS, CLASSES, (3, 20, 9))[0].images
    assert np.array_equal(as_they_are.numpy(), images.transpose(0, 3, 1, 2))
    with pytest.raises(InputError, match="is 12 x 12 pixels as a square, and the others are 9 x 21"):
        read_shard(root, SETTINGS, CLASSES, (3, 21, 9))


def test_grey_images_keep_one_channel_if_the_federations_have_one(tmp_path: Path) -> None:
    images = pixels(2, 8, 8)
    root = folder(tmp_path, {"owl/a.png": images[0], "owl/b.png": images[1]})
    assert np.array_equal(read_shard(root, SETTINGS, CLASSES, (1, 8, 8))[0].images.numpy()[:, 0], images)


@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_a_class_that_the_federation_does_not_have(tmp_path: Path, kind: str) -> None:
    if kind == "npz":
        path = npz(tmp_path, x=pixels(1, 12, 12), y=[1], names=["cat", "newt"])
    else:
        path = folder(tmp_path, {"cat/a.png": pixels(1, 12, 12)[0], "newt/a.png": pixels(1, 12, 12)[0]})
    with pytest.raises(InputError, match="has the class newt, which the federation does not have; its classes are owl"):
        read_shard(path, SETTINGS, CLASSES)


@pytest.mark.parametrize(
    ("arrays", "error"),
    [
        ({"y": [0]}, "has no array x"),
        ({"x": pixels(1, 4, 4)}, "has no array y"),
        ({"x": pixels(0, 4, 4), "y": np.empty(0, int)}, "has no samples"),
        ({"x": pixels(2, 4, 4), "y": [0]}, "y should be one whole number for each image of x"),
        ({"x": pixels(1, 4, 4) / 255, "y": [0]}, "x is float64"),
        ({"x": pixels(1, 4, 4), "y": [-1]}, "should count classes from 0"),
        ({"x": pixels(1, 4, 4), "y": [2**62]}, "should count classes from 0"),
        ({"x": pixels(1, 4, 4), "y": [1], "names": ["cat"]}, "labels go up to 1, and there are 1 classes"),
        ({"x": np.array([object()]), "y": [1]}, "is no readable npz file"),
    ],
)
def test_damaged_npz_files(tmp_path: Path, arrays: dict, error: str) -> None:
    for classes in (None, CLASSES):
        with pytest.raises(InputError, match=error):
            read_shard(npz(tmp_path, **arrays), SETTINGS, classes)


def test_nothing_there(tmp_path: Path) -> None:
    for path, error in (
        (tmp_path / "no", "does not exist"),
        (tmp_path, "has no images"),
        ("x" * 5000, "cannot be read"),
        ("a\0b", "(does not exist|cannot be read)"),
    ):
        with pytest.raises(InputError, match=error):
            read_shard(path, SETTINGS, CLASSES)
    (tmp_path / "file.npz").write_bytes(b"PK")
    with pytest.raises(InputError, match="is no readable npz file"):
        read_shard(tmp_path / "file.npz", SETTINGS)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.png").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"a\.png is no readable image"):
        read_shard(tmp_path, SETTINGS, CLASSES)


def test_sizes_are_checked_before_anything_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = npz(tmp_path, x=pixels(10, 10, 10), y=[0] * 10)
    monkeypatch.setattr(memory, "machine_memory", lambda: 1000)
    with pytest.raises(InputError, match="does not fit into memory"):
        read_shard(path, SETTINGS, CLASSES)


def test_the_servers_data_may_lack_a_part(tmp_path: Path) -> None:
    path = tmp_path / "server.npz"
    arrays = {"x_test": pixels(2, 4, 4, 3), "y_test": [1, 0], "names": ["dog", "cat"]}
    np.savez(path, x_train=pixels(0, 4, 4, 3), y_train=np.empty(0, int), **arrays)
    data = read_server_data(path, CLASSES)
    assert not len(data.train) and data.test.labels.tolist() == [1, 2] and data.classes == CLASSES
    np.savez(path, **arrays)
    with pytest.raises(InputError, match="has no array x_train"):
        read_server_data(path, CLASSES)
    with pytest.raises(InputError, match="is no file"):
        read_server_data(tmp_path, CLASSES)
