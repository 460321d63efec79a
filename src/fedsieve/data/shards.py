"""The data of one process in a federation: a client's own samples, or the validation and test images of the server."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedsieve.config.data_settings import DataSettings
from fedsieve.data.load import Dataset, Samples, checked_part, class_names, image_files, read_pictures, samples_of
from fedsieve.data.npz import WANTED, read_arrays
from fedsieve.data.pictures import Shape, shown
from fedsieve.errors import InputError

KINDS = "a .npz file with arrays x and y, or a folder CLASS/*.png or *.jpg"
MOST_CLASSES = 10**6


def read_shard(
    path: str | Path, settings: DataSettings, classes: Sequence[str] | None = None, shape: Shape | None = None
) -> tuple[Samples, list[str]]:
    """A client's own samples, and the names of the classes by which their labels count.

    These are `classes`, if the federation names them, or else the data's own. Images of a folder are sorted by file
    name, then class. They are stored as squares, like those of `data.name: folder`, unless they have the `shape` of
    the federation's images.
    """
    path = Path(path)
    where = shown(str(path))[:200]
    try:
        if not path.exists():
            raise InputError(f"{where} does not exist; give {KINDS}")
        if path.is_dir():
            return _from_folder(path, settings, classes, shape)
        arrays = read_arrays(path, ("x", "y"))
        return _part_of(arrays, "x", "y", where, classes)
    except (OSError, ValueError, RecursionError) as error:  # of the file system: too long, forbidden, nested too deeply
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise InputError(f"{where} cannot be read ({reason}); give {KINDS}") from None


def read_server_data(path: str | Path, classes: Sequence[str]) -> Dataset:
    """The server's data: validation images as `train`, and test images; an npz file like that of a data set."""
    path = Path(path)
    where = shown(str(path))[:200]
    try:
        arrays = read_arrays(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{where} cannot be read ({type(error).__name__}); give server.npz") from None
    parts = [_part_of(arrays, *names, where, classes, may_be_empty=True)[0] for names in (WANTED[:2], WANTED[2:])]
    return Dataset(parts[0], parts[1], list(classes))


def write_npz(path: Path, parts: Mapping[str, Samples], classes: Sequence[str]) -> None:
    """Arrays x and y of each part, each name followed by the part's, and the classes' names."""
    arrays: dict[str, np.ndarray] = {"names": np.asarray(classes, dtype=np.str_)}
    for name, samples in parts.items():
        # Channels last, since of four axes the reader takes the last for channels if it can.
        arrays[f"x{name}"] = samples.images.permute(0, 2, 3, 1).contiguous().numpy()
        arrays[f"y{name}"] = samples.labels.numpy()
    with path.open("wb") as file:  # numpy would add .npz to other names
        np.savez(file, **cast(Any, arrays))


def _part_of(
    arrays: dict[str, np.ndarray],
    x: str,
    y: str,
    where: str,
    classes: Sequence[str] | None,
    may_be_empty: bool = False,
) -> tuple[Samples, list[str]]:
    """The samples in two arrays of an npz file, and the classes by which their labels count."""
    for name in (x, y):
        if name not in arrays:
            raise InputError(f"{where} has no array {name}; expected {x}, {y} and, with the classes' names, names")
    images, labels = checked_part(arrays, x, y, where)
    if not len(labels) and not may_be_empty:
        raise InputError(f"{where} has no samples; give at least one")
    lowest, count = int(labels.min(initial=0)), int(labels.max(initial=-1)) + 1
    if lowest < 0 or count > MOST_CLASSES:
        raise InputError(f"{where}: {y} should count classes from 0, to {MOST_CLASSES:,} at most")
    if "names" in arrays:
        names = [shown(str(name)) for name in arrays["names"].ravel()]
    else:
        names = list(classes) if classes is not None else [str(number) for number in range(count)]
    if len(names) < count:
        raise InputError(f"{where}: labels go up to {count - 1}, and there are {len(names)} classes; name every class")
    if classes is not None:
        labels = _renumbered(labels, names, classes, where)
    return samples_of(images, labels), list(names if classes is None else classes)


def _from_folder(
    root: Path, settings: DataSettings, classes: Sequence[str] | None, shape: Shape | None
) -> tuple[Samples, list[str]]:
    """The images in CLASS/*.png or *.jpg, and the classes by which their labels count."""
    folders = class_names(root)
    found = [
        (path.relative_to(root / name).parts, label, path)
        for label, name in enumerate(folders)
        for path in image_files(root / name)
    ]
    where = shown(str(root))[:200]
    if not found:
        raise InputError(f"{where} has no images; expected CLASS/*.png or *.jpg")
    names = [shown(name) for name in folders]
    labels = np.array([label for _, label, _ in sorted(found)])
    if classes is not None:
        labels = _renumbered(labels, names, classes, where)
    paths = [path for _, _, path in sorted(found)]
    samples = read_pictures(root, list(zip(paths, labels.tolist(), strict=True)), settings, shape)
    return samples, list(names if classes is None else classes)


def _renumbered(labels: np.ndarray, names: Sequence[str], classes: Sequence[str], where: str) -> np.ndarray:
    """Labels that count the classes `names`, as those that count `classes`."""
    if list(names) == list(classes):
        return labels
    numbers = {name: number for number, name in enumerate(classes)}
    new = np.zeros(len(names), dtype=np.int64)
    for label in np.unique(labels).tolist():
        name = names[label]
        if name not in numbers:
            known = ", ".join(classes[:5]) + ", …" * (len(classes) > 5)
            what = f"{where} has the class {name[:60]}, which the federation does not have"
            raise InputError(f"{what}; its classes are {known[:200]}")
        if classes.count(name) > 1:
            raise InputError(f"{where}: several classes are called {name[:60]}; name classes as the federation does")
        new[label] = numbers[name]
    return new[labels]
