"""Data sets, held in memory as uint8: CIFAR-100, scikit-learn's digits, a folder of images, an npz file, users'."""

import gzip
import importlib.util
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128

from fedsieve.config.data_settings import DataSettings
from fedsieve.data import DATASETS
from fedsieve.data.cifar import read_official
from fedsieve.data.holdout import stratified
from fedsieve.data.npz import WANTED, channels_first, read_arrays
from fedsieve.data.pictures import Shape, read_image, shown, stored_side
from fedsieve.errors import InputError
from fedsieve.files.cache import cache_folder
from fedsieve.files.memory import must_fit
from fedsieve.randomness import numpy_generator

TEST_SHARE = 0.2  # where a data set has no test set of its own
Statistics = tuple[list[float], list[float]]  # mean and standard deviation of each channel
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True)
class Samples:
    """Images (N, channels, height, width) uint8 and their labels (N,) int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the images: features computed from them may be kept under it."""
        digest = xxh3_128(repr(tuple(self.images.shape)).encode())
        digest.update(self.images.contiguous().numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Dataset:
    """The official training and test sets, before anything is set aside for validation."""

    train: Samples
    test: Samples
    classes: list[str]
    notes: list[str] = field(default_factory=list)


def load(settings: DataSettings) -> Dataset:
    """Read the data set that the experiment names."""
    try:
        if settings.path is not None and not Path(settings.path).exists():
            raise InputError(f"data.path: {settings.path} does not exist; give the place where the data lies")
        data = _named(settings)
    except (OSError, ValueError, RecursionError) as error:  # of the file system: too long, forbidden, nested too deeply
        if settings.path is None:
            raise
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise InputError(f"data.path: {shown(settings.path)[:200]} cannot be read ({reason})") from None
    return limited(data, settings.limit)


def _named(settings: DataSettings) -> Dataset:
    """The data set with the name that the settings give; a user's function returns plain arrays."""
    name = settings.name
    if name not in DATASETS:
        raise InputError(f"data.name: '{name}' is a plugin's, and no plugin that has it is loaded here")
    found = DATASETS[name](settings)
    if isinstance(found, Dataset):
        return found
    if not isinstance(found, tuple) or len(found) not in (4, 5):
        expected = "training images and labels, test images and labels and, if they have names, those of the classes"
        raise InputError(f"data.name: {name} gives no tuple of four or five arrays; expected {expected}")
    arrays = {key: np.asarray(value) for key, value in zip((*WANTED, "names"), found, strict=False)}
    return from_arrays(arrays, f"data.name: {name}")


def limited(data: Dataset, limit: int | None) -> Dataset:
    """With only so many training images, each class in proportion: the same for every seed, like the test set."""
    if limit is None or limit >= len(data.train):
        return data
    _, kept = stratified(data.train.labels.numpy(), limit, numpy_generator(0, "limit"))
    note = f"data.limit: {limit:,} of {len(data.train):,} training images are used"
    train = Samples(data.train.images[kept], data.train.labels[kept])
    return Dataset(train, data.test, data.classes, [*data.notes, note])


def load_cifar100(settings: DataSettings) -> Dataset:
    """60,000 images of 32 x 32 pixels and 100 classes (Krizhevsky, 2009)."""
    if settings.path is not None:
        train, test, names = read_official(Path(settings.path))
        return Dataset(samples_of(*train), samples_of(*test), names)
    path = cache_folder() / "data" / "fedsieve-cifar100.npz"
    for kept in (path, path.with_name("cifar100.npz")):  # the second is the name that older versions gave it
        with suppress(InputError):  # it is not there, or damaged
            return _from_npz(kept)
    arrays = _download_cifar100()
    data = from_arrays(arrays, "CIFAR-100")
    try:
        _keep(arrays, path)
    except OSError as error:
        data.notes.append(f"CIFAR-100 could not be kept in {path.parent} ({error.strerror}); going on without")
    return data


def _keep(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Write an npz file; processes that do so at the same time do not disturb each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.npz")
    try:
        np.savez(partial, **cast(Any, arrays))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _download_cifar100() -> dict[str, np.ndarray]:
    from datasets import load_dataset
    from huggingface_hub import HfApi, constants

    try:
        if not constants.HF_HUB_OFFLINE:
            HfApi().dataset_info("uoft-cs/cifar100", timeout=20)  # asks once; load_dataset would ask for half a minute
        parts = load_dataset("uoft-cs/cifar100")
    except Exception as error:  # whatever it is, the way out is the same
        raise InputError(
            f"CIFAR-100 could not be downloaded ({type(error).__name__}); "
            "set data.path to a folder with the official files (cifar-100-python: train, test, meta)"
        ) from None
    arrays = {"names": np.asarray(parts["train"].features["fine_label"].names)}
    for name in ("train", "test"):
        arrays[f"x_{name}"] = np.stack([np.asarray(image) for image in parts[name]["img"]])
        arrays[f"y_{name}"] = np.asarray(parts[name]["fine_label"])
    return arrays


def load_digits(_: DataSettings) -> Dataset:
    """1,797 grey 8 x 8 images of 10 digits; a fixed stratified fifth is the test set."""
    package = importlib.util.find_spec("sklearn")  # only its file is needed: importing it takes a second
    assert package is not None and package.origin is not None
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt", encoding="ascii") as file:
        table = np.loadtxt(file, delimiter=",")
    images = np.round(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = table[:, -1].astype(np.int64)
    train, test = hold_out(labels)
    return Dataset(samples_of(images[train], labels[train]), samples_of(images[test], labels[test]), list("0123456789"))


def load_folder(settings: DataSettings) -> Dataset:
    """`train/CLASS/*.png|jpg` and `test/CLASS/…`.

    Each image is stored as a square: of side `image_size`, squeezed to it, or with
    `evaluate_crop: resize_center_crop` of side `resize`, its shorter side scaled to it, centre kept.
    """
    root = Path(settings.path or "")
    if not (root / "train").is_dir():
        raise InputError(f"data.path: {root} has no folder train; expected train/CLASS/*.png or *.jpg")
    names = class_names(root / "train")
    if len(names) < 2:
        raise InputError(f"{root / 'train'} has {len(names)} class folders; expected at least two, one for each class")
    classes = [shown(name) for name in names]
    train = _read_images(root / "train", names, settings)
    if (root / "test").is_dir():
        extra = set(class_names(root / "test")) - set(names)
        if extra:
            raise InputError(f"{root / 'test' / min(extra)} is a class that {root / 'train'} does not have; remove it")
        return Dataset(train, _read_images(root / "test", names, settings), classes)
    rest, held = hold_out(train.labels.numpy())
    note = f"no folder test: {held_out_note(held, rest)}"
    parts = [Samples(train.images[part], train.labels[part]) for part in (rest, held)]
    return Dataset(parts[0], parts[1], classes, [note])


def class_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("[!.]*") if path.suffix.lower() in IMAGE_ENDINGS)


def _read_images(root: Path, names: Sequence[str], settings: DataSettings) -> Samples:
    paths: list[tuple[Path, int]] = []
    for label, name in enumerate(names):
        found = image_files(root / name)
        if not found and root.name == "train":
            raise InputError(f"{root / name} holds no .png or .jpg image; add some or remove the folder")
        paths += [(path, label) for path in found]
    if not paths:
        raise InputError(f"{root} holds no .png or .jpg image; add some or remove the folder")
    return read_pictures(root, paths, settings)


def read_pictures(
    root: Path, paths: Sequence[tuple[Path, int]], settings: DataSettings, shape: Shape | None = None
) -> Samples:
    """Image files and their labels, in this order; `shape` is that of images which are taken as they are."""
    if special := [path for path, _ in paths if not path.is_file()]:  # to open a named pipe would wait for ever
        raise InputError(f"{shown(str(special[0]))} is no regular file; remove it")
    channels, height, width = shape or (3, stored_side(settings), stored_side(settings))
    much = f"{root}: {len(paths):,} images of {width} x {height} pixels do not fit into memory"
    must_fit(channels * height * width * len(paths), much, "lower data.image_size, or use fewer images")
    images = np.empty((len(paths), channels, height, width), dtype=np.uint8)

    def read(place: int) -> None:
        image = read_image(paths[place][0], settings, shape)
        if image.shape != images.shape[1:]:
            what = f"{shown(str(paths[place][0]))} is {image.shape[2]} x {image.shape[1]} pixels as a square"
            raise InputError(f"{what}, and the others are {width} x {height}; give images of that size")
        images[place] = image

    with ThreadPoolExecutor() as pool:
        list(pool.map(read, range(len(paths))))  # a list, so that errors are raised here
    return samples_of(images, np.asarray([label for _, label in paths]))


def load_npz(settings: DataSettings) -> Dataset:
    """Arrays x_train, y_train, x_test, y_test; images (N, H, W), (N, H, W, C) or (N, C, H, W) with C 1 or 3."""
    return _from_npz(Path(settings.path or ""))


def _from_npz(path: Path) -> Dataset:
    return from_arrays(read_arrays(path), str(path))


def from_arrays(arrays: dict[str, np.ndarray], path: str) -> Dataset:
    """The data set in the arrays of an npz file; `path` is what errors call it."""
    for name in WANTED:
        if name not in arrays:
            raise InputError(f"{path} has no array {name}; expected x_train, y_train, x_test and y_test")
    parts = [checked_part(arrays, f"x_{part}", f"y_{part}", path) for part in ("train", "test")]
    labels = np.concatenate([parts[0][1], parts[1][1]])
    if not len(parts[0][1]) or labels.min() < 0:
        raise InputError(f"{path}: y_train and y_test should count classes from 0, and there should be images")
    count = int(labels.max()) + 1
    if count > len(parts[0][1]):
        raise InputError(
            f"{path}: labels go up to {count - 1:,}, more than there are images; number the classes from 0"
        )
    names = [shown(str(name)) for name in arrays.get("names", np.arange(count)).ravel()]
    if len(names) < count:
        raise InputError(f"{path}: names has {len(names)} entries, but labels go up to {count - 1}; name every class")
    return Dataset(samples_of(*parts[0]), samples_of(*parts[1]), names)


def checked_part(arrays: dict[str, np.ndarray], x: str, y: str, path: str) -> tuple[np.ndarray, np.ndarray]:
    """The images (N, C, H, W) in array `x` of an npz file, and their labels in array `y`."""
    images, labels = arrays[x], arrays[y]
    if images.dtype != np.uint8:
        raise InputError(f"{path}: {x} is {images.dtype}; images are stored as uint8 from 0 to 255")
    if images.ndim == 0 or labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) != len(images):
        raise InputError(f"{path}: {y} should be one whole number for each image of {x}")
    return channels_first(images, f"{path}: {x}"), labels.astype(np.int64)


def held_out_note(held: np.ndarray, rest: np.ndarray) -> str:
    return f"{len(held):,} of {len(held) + len(rest):,} images (a stratified 20%) are held out as the test set"


def hold_out(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of (training, test): the same for every seed, so that results stay comparable."""
    return stratified(labels, round(TEST_SHARE * len(labels)), numpy_generator(0, "test set"))


def samples_of(images: np.ndarray, labels: np.ndarray) -> Samples:
    return Samples(torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64)))


def load_given(_: DataSettings) -> Dataset:
    """An object, from Python only: `fedsieve.run(…, data=…)`."""
    raise InputError(
        "data.name: given: the data set was given from Python; give it again with data=… there (fedsieve.run, "
        "fedsieve.load_run), or name one that lies on disk"
    )
