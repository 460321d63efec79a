"""Data sets: what is read, and what is refused."""

import hashlib
import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from fedsieve.analysis.report.exploration import exploration
from fedsieve.analysis.report.page import page, write_file
from fedsieve.config.data_settings import DataSettings
from fedsieve.data import cifar
from fedsieve.data import load as load_module
from fedsieve.data.load import load
from fedsieve.errors import InputError
from fedsieve.files import memory


def test_digits_are_scikit_learns() -> None:
    data = load(DataSettings(name="digits"))
    assert len(data.train) + len(data.test) == 1797 and data.train.images.shape[1:] == (1, 8, 8)
    reference = load_digits()
    expected = sorted(
        zip(map(bytes, np.round(reference.images * 255 / 16).astype(np.uint8)), reference.target, strict=True)
    )
    ours = [
        (bytes(image.numpy()), int(label))
        for part in (data.train, data.test)
        for image, label in zip(part.images, part.labels, strict=True)
    ]
    assert sorted(ours) == expected


@pytest.mark.parametrize("limit", [1, 7, 10, 333, 1437])
def test_a_limit_keeps_each_class_in_proportion(limit: int) -> None:
    whole = load(DataSettings(name="digits"))
    some = load(DataSettings(name="digits", limit=limit))
    assert len(some.train) == limit and some.classes == whole.classes
    assert some.test.fingerprint == whole.test.fingerprint
    shares = np.bincount(whole.train.labels, minlength=10) * limit / len(whole.train)
    assert np.all(np.abs(np.bincount(some.train.labels, minlength=10) - shares) < 1)
    known, ours = (
        {(bytes(image.numpy()), int(label)) for image, label in zip(data.train.images, data.train.labels, strict=True)}
        for data in (whole, some)
    )
    assert ours <= known and f"data.limit: {limit:,} of 1,438 training images are used" in some.notes
    assert load(DataSettings(name="digits", limit=limit)).train.fingerprint == some.train.fingerprint


def test_a_limit_above_all_changes_nothing() -> None:
    some, whole = load(DataSettings(name="digits", limit=1438)), load(DataSettings(name="digits"))
    assert some.train.fingerprint == whole.train.fingerprint and some.notes == []


def pickled(arrays: dict) -> bytes:
    """A file like CIFAR's: a dictionary of arrays and lists whose keys are bytes."""
    return pickle.dumps({key.encode(): value for key, value in arrays.items()}, protocol=4)


@pytest.fixture
def official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small folder of the official layout, with its own checksums."""
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    generator = np.random.default_rng(0)
    contents = {"meta": pickled({"fine_label_names": [b"apple", b"bee", b"cup"]})}
    for name, count in (("train", 30), ("test", 12)):
        pixels = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
        contents[name] = pickled({"data": pixels, "fine_labels": [i % 3 for i in range(count)]})
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        monkeypatch.setitem(cifar.MD5, name, hashlib.md5(content).hexdigest())
    return folder


def test_cifar_files(official: Path) -> None:
    for path in (official, official.parent):  # the folder, or the one that holds it
        data = load(DataSettings(name="cifar100", path=str(path)))
        assert data.classes == ["apple", "bee", "cup"] and data.train.images.shape == (30, 3, 32, 32)
    raw = pickle.loads((official / "train").read_bytes())
    assert data.train.images[4, 1, 2, 3] == raw[b"data"][4, 1024 + 2 * 32 + 3]
    assert data.train.labels.tolist() == raw[b"fine_labels"]


def test_a_download_is_kept_if_that_is_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = np.zeros((4, 8, 8, 3), np.uint8), np.array([0, 1, 0, 1])
    arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels, "names": np.array(["a", "b"])}
    monkeypatch.setattr(load_module, "_download_cifar100", lambda: arrays)
    settings = DataSettings(name="cifar100")
    monkeypatch.setenv("FEDSIEVE_CACHE", str(tmp_path))
    path = tmp_path / "data" / "fedsieve-cifar100.npz"
    path.parent.write_text("a file where the folder should be")
    (note,) = load(settings).notes
    assert "could not be kept" in note
    path.parent.unlink()
    assert load(settings).notes == [] and path.exists()
    monkeypatch.delattr(load_module, "_download_cifar100")
    assert load(settings).classes == ["a", "b"]
    path.rename(path.with_name("cifar100.npz"))  # as older versions called it
    assert load(settings).classes == ["a", "b"]


def test_a_damaged_cifar_file_is_named(official: Path) -> None:
    content = bytearray((official / "test").read_bytes())
    content[100] ^= 1
    (official / "test").write_bytes(content)
    with pytest.raises(InputError, match="test is damaged"):
        load(DataSettings(name="cifar100", path=str(official)))
    (official / "test").unlink()
    with pytest.raises(InputError, match="no file test"):
        load(DataSettings(name="cifar100", path=str(official)))


@pytest.mark.parametrize("what", [Path, print, eval])
def test_a_pickle_runs_no_code(what: object) -> None:
    with pytest.raises(pickle.UnpicklingError, match="no place in a CIFAR file"):
        cifar.CifarUnpickler(io.BytesIO(pickle.dumps({b"data": what})), encoding="bytes").load()


def picture(path: Path, size: tuple[int, int], colour: tuple[int, int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_folder_of_images(tmp_path: Path) -> None:
    for part, count in (("train", 5), ("test", 2)):
        for number in range(count):
            picture(tmp_path / part / "red" / f"{number}.png", (20 + number, 31), (255, 0, 0))
            picture(tmp_path / part / "blue" / "inner" / f"{number}.JPG", (16, 16), (0, 0, 255))
    data = load(DataSettings(name="folder", path=str(tmp_path), image_size=16))
    assert data.classes == ["blue", "red"] and not data.notes
    assert data.train.images.shape == (10, 3, 16, 16) and len(data.test) == 4
    for image, label in zip(data.train.images, data.train.labels, strict=True):
        assert image.float().mean((1, 2)).argmax() == (2 if label == 0 else 0)


def test_pictures_of_every_kind(tmp_path: Path) -> None:
    """Grey, 16 bits, palette, transparent: the same mid-grey; what starts with a dot is passed over."""
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    Image.new("L", (9, 9), 128).save(folder / "grey.png")
    Image.fromarray(np.full((9, 9), 128 * 257, np.uint16)).save(folder / "deep.png")
    Image.new("RGBA", (9, 9), (128, 128, 128, 255)).save(folder / "clear.png")
    Image.new("L", (9, 9), 128).convert("P").save(folder / "palette.png")
    (folder / "._grey.png").write_bytes(b"what a file manager leaves")
    (tmp_path / "train" / ".hidden").mkdir()
    picture(tmp_path / "train" / "b" / "x.png", (9, 9), (0, 0, 0))
    picture(tmp_path / "test" / "a" / "x.png", (9, 9), (128, 128, 128))
    data = load(DataSettings(name="folder", path=str(tmp_path), image_size=9))
    assert data.classes == ["a", "b"] and len(data.train) == 5
    assert data.train.images[:4].unique().tolist() == [128]


def test_folder_without_a_test_set_says_what_it_does(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        for number in range(10):
            picture(tmp_path / "train" / name / f"{number}.png", (8, 8), (number, 0, 0))
    data = load(DataSettings(name="folder", path=str(tmp_path), image_size=8))
    assert len(data.train) == 24 and data.test.labels.bincount().tolist() == [2, 2, 2]
    assert "6 of 30 images" in data.notes[0]


def test_center_crop_keeps_the_aspect(tmp_path: Path) -> None:
    """A wide picture, red in the middle, green at both sides: the centre crop sees red alone."""
    for name in ("a", "b"):
        image = Image.new("RGB", (90, 30), (0, 255, 0))
        image.paste((255, 0, 0), (30, 0, 60, 30))
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(5):
            image.save(tmp_path / "train" / name / f"{number}.png")
    crop = DataSettings.model_validate({"evaluate_crop": {"resize_center_crop": {"resize": 30}}}).evaluate_crop
    data = load(DataSettings(name="folder", path=str(tmp_path), image_size=20, evaluate_crop=crop))
    assert data.train.images.shape[2:] == (30, 30) and data.train.images[:, 1].max() == 0
    squeezed = load(DataSettings(name="folder", path=str(tmp_path), image_size=30))
    assert squeezed.train.images[:, 1].max() == 255


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"x_train": np.zeros((4, 8, 8))}, "x_train is float64"),
        ({"y_train": np.zeros(3, int)}, "y_train should be one whole number for each image"),
        ({"y_test": np.zeros(2)}, "y_test should be"),
        ({"y_train": np.array([0, 1, -1, 0])}, "count classes from 0"),
        ({"y_train": np.array([0, 1, 7, 0])}, "labels go up to 7"),
        ({"names": np.array(["only one"])}, "names has 1 entries"),
        ({"names": np.array("no list")}, "names has 1 entries"),
        ({"names": np.array([0x7FFFFFFF, 0], np.uint32).view("U1")}, "no readable npz"),
        ({"x_train": np.uint8(3)}, "y_train should be"),
        ({"x_train": np.zeros((4, 0, 8), np.uint8)}, "at least one pixel"),
        ({"x_train": np.zeros((4, 8, 8, 5), np.uint8)}, r"shape \[4, 8, 8, 5\]"),
    ],
)
def test_npz_is_checked(tmp_path: Path, arrays: dict, message: str) -> None:
    good = {"x_train": np.zeros((4, 8, 8), np.uint8), "y_train": np.arange(4) % 2}
    good |= {"x_test": np.zeros((2, 8, 8), np.uint8), "y_test": np.arange(2)}
    np.savez(tmp_path / "good.npz", **good)
    assert load(DataSettings(name="npz", path=str(tmp_path / "good.npz"))).classes == ["0", "1"]
    np.savez(tmp_path / "bad.npz", **(good | arrays))
    with pytest.raises(InputError, match=message):
        load(DataSettings(name="npz", path=str(tmp_path / "bad.npz")))


def test_npz_layouts_are_the_same_images(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 9, 3), dtype=np.uint8)
    labels = np.arange(6) % 2
    fingerprints = []
    for name, stored in (("last", images), ("first", images.transpose(0, 3, 1, 2))):
        np.savez(tmp_path / f"{name}.npz", x_train=stored, y_train=labels, x_test=stored, y_test=labels)
        fingerprints.append(load(DataSettings(name="npz", path=str(tmp_path / f"{name}.npz"))).train.fingerprint)
    assert fingerprints[0] == fingerprints[1]


def written_raw(path: Path, shape: tuple[int, ...], content: bytes) -> Path:
    """An npz file whose x_train has a header of this shape before the content."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    np.savez(path, y_train=np.arange(4) % 2, x_test=np.zeros((2, 8, 8), np.uint8), y_test=np.arange(2))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x_train.npy", header.getvalue() + content)
    return path


@pytest.mark.parametrize("shape", [(4, 10**6, 10**6), (4, 8, 7), (10**9, 10**9, 10**9)])
def test_an_npz_whose_header_lies_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = written_raw(tmp_path / "x.npz", shape, bytes(256))
    with pytest.raises(InputError, match="no readable npz"):
        load(DataSettings(name="npz", path=str(path)))


def test_an_npz_that_unpacks_to_more_than_memory_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written_raw(tmp_path / "x.npz", (4, 1000, 1000), bytes(4 * 10**6))
    assert path.stat().st_size < 20_000 and len(load(DataSettings(name="npz", path=str(path))).train) == 4
    monkeypatch.setattr(memory, "machine_memory", lambda: 3 * 10**6)
    monkeypatch.setattr(np, "load", None)
    with pytest.raises(InputError, match=r"x\.npz does not fit into memory"):
        load(DataSettings(name="npz", path=str(path)))


@pytest.mark.parametrize(("name", "place"), [("npz", "pipe"), ("cifar100", ""), ("folder", "")])
def test_special_files_are_not_waited_for(tmp_path: Path, name: str, place: str) -> None:
    if name == "folder":
        for folder in ("a", "b"):
            picture(tmp_path / "train" / folder / "x.png", (9, 9), (0, 0, 0))
        os.mkfifo(tmp_path / "train" / "a" / "pipe.png")
    else:
        os.mkfifo(tmp_path / (place or "train"))
    with pytest.raises(InputError, match=r"pipe\.png is no regular file|pipe is no file|has no file train"):
        load(DataSettings(name=name, path=str(tmp_path / place)))


def test_more_images_than_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        picture(tmp_path / "train" / name / "x.png", (9, 9), (0, 0, 0))
    monkeypatch.setattr(memory, "machine_memory", lambda: 10**8)
    with pytest.raises(InputError, match=r"2 images of 4096 x 4096 pixels do not fit into memory: 0\.1 GB"):
        load(DataSettings(name="folder", path=str(tmp_path), image_size=4096))


def test_names_that_are_no_text_are_escaped(tmp_path: Path) -> None:
    for name in (b"a\xff", b"b\n", "ü".encode()):
        folder = os.fsencode(tmp_path / "train") + b"/" + name
        for number in range(5):
            picture(Path(os.fsdecode(folder)) / f"{number}.png", (9, 9), (number, 0, 0))
    data = load(DataSettings(name="folder", path=str(tmp_path), image_size=9))
    assert data.classes == ["a\\xff", "b\\x0a", "ü"]
    found = exploration(data, "folder")
    write_file(tmp_path / "page.html", page(found["title"], "explore", found))
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/train/a\xff/0.png")).write_bytes(b"no picture")
    with pytest.raises(InputError) as caught:
        load(DataSettings(name="folder", path=str(tmp_path), image_size=9))
    assert "train/a\\xff/0.png is no readable image" in str(caught.value)


def test_a_path_that_is_too_long_is_one_line() -> None:
    with pytest.raises(InputError, match="cannot be read") as caught:
        load(DataSettings(name="npz", path="x" * 5000))
    assert len(str(caught.value)) < 600


def test_an_npz_with_objects_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x_train=np.array([Path("/")], dtype=object))
    with pytest.raises(InputError, match="no readable npz"):
        load(DataSettings(name="npz", path=str(tmp_path / "x.npz")))
