"""Data sets that are given from Python: a torch data set, one of Hugging Face, or a pair of training and test sets.

All images are read once, before the run begins. From then on they are what `load` makes of files: uint8 in memory.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from fedsieve.config.data_settings import DataSettings
from fedsieve.data.load import Dataset, from_arrays, held_out_note, hold_out, limited
from fedsieve.data.pictures import as_square, in_colour, stored_side
from fedsieve.errors import InputError
from fedsieve.files.memory import must_fit

IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img"), ("label", "fine_label")
KINDS = "a torch data set of (image, label), a Hugging Face data set, or a (train, test) pair of them"
SOME = 100  # samples after which their size is taken for that of all
PARTS = {"train": "training", "test": "test"}


def read_given(given: Any, settings: DataSettings) -> Dataset:
    """The data set in an object; without a test set, a stratified fifth of the training images becomes one."""
    parts, notes = _parts_of(given)
    names = _class_names(parts)
    arrays: dict[str, np.ndarray] = {"names": np.asarray(names)} if names is not None else {}
    for name, (images, labels) in _read(parts, settings).items():
        arrays |= {f"x_{name}": images, f"y_{name}": labels}
    if "test" not in parts:
        rest, held = hold_out(arrays["y_train"])
        for kind in "xy":
            arrays[f"{kind}_test"], arrays[f"{kind}_train"] = (arrays[f"{kind}_train"][some] for some in (held, rest))
        notes.append(f"no test set: {held_out_note(held, rest)}")
    data = from_arrays(arrays, "data")
    return limited(Dataset(data.train, data.test, data.classes, data.notes + notes), settings.limit)


def _parts_of(given: Any) -> tuple[dict[str, Any], list[str]]:
    """The training set and, if there is one, the test set; and what to tell the user."""
    notes = []
    if isinstance(given, Mapping):  # a DatasetDict, or a dict like one
        if "train" not in given:
            there = ", ".join(map(str, given)) or "nothing"
            raise InputError(f"data has no part train, but {there}; give it train and test")
        if unused := [str(name) for name in given if name not in PARTS]:
            notes.append(f"of the data, train and test are used, and not {', '.join(unused)}")
        parts = {name: given[name] for name in PARTS if name in given}
    elif isinstance(given, list | tuple) and _is_pair(given):
        parts = dict(zip(PARTS, given, strict=True))
    else:
        parts = {"train": given}
    for name, part in parts.items():
        if not hasattr(part, "__len__") or not hasattr(part, "__getitem__") or isinstance(part, str | bytes):
            what = f"data: the {PARTS[name]} set is of type {type(part).__name__}"
            raise InputError(f"{what}, which has no length or no numbered samples; give {KINDS}")
        if not len(part):
            raise InputError(f"data: the {PARTS[name]} set has no samples; give at least one of each class")
    return parts, notes


def _is_pair(given: list[Any] | tuple[Any, ...]) -> bool:
    """Whether this is a pair of data sets; a list of two tuples is a data set of two samples."""
    return len(given) == 2 and (isinstance(given, tuple) or not any(isinstance(one, tuple) for one in given))


# ------------------------------------------------------------------------------------------------ columns and classes


def _is_of_hugging_face(part: Any) -> bool:
    return hasattr(part, "features") and hasattr(part, "column_names")


def _column(part: Any, kind: str, names: tuple[str, ...]) -> str:
    """The only column of a kind (Image or ClassLabel), or the one with a usual name."""
    columns = list(part.column_names)
    found = [name for name in columns if type(part.features[name]).__name__ == kind]
    if len(found) != 1:
        found = [name for name in found or columns if name in names]
    if len(found) != 1:
        what = "images" if kind == "Image" else "labels"
        raise InputError(
            f"data: which column holds the {what}? There are {', '.join(columns)}; call the right one {names[0]} "
            "(rename_column), and leave out others of its kind (remove_columns)"
        )
    return found[0]


def _class_names(parts: Mapping[str, Any]) -> list[str] | None:
    """The names of the classes, as the data sets say; None: they have only numbers."""
    names = {part: _names_in(given) for part, given in parts.items()}
    if names["train"] and names.get("test") and names["train"] != names["test"]:
        raise InputError("data: the training and the test set name their classes differently; give both the same order")
    return names["train"] or names.get("test")


def _names_in(part: Any) -> list[str] | None:
    if _is_of_hugging_face(part):
        names = getattr(part.features[_column(part, "ClassLabel", LABEL_COLUMNS)], "names", None)
    else:
        while not hasattr(part, "classes") and hasattr(part, "dataset"):  # a Subset
            part = part.dataset
        names = getattr(part, "classes", None)
    return [str(name) for name in names] if isinstance(names, list | tuple) and names else None


# ----------------------------------------------------------------------------------------------------------- samples


def _read(parts: Mapping[str, Any], settings: DataSettings) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images (N, H, W, 3) and labels of each part; as squares, like those of a folder, if their sizes differ."""
    images: dict[str, list[np.ndarray]] = {name: [] for name in parts}
    labels: dict[str, list[int]] = {name: [] for name in parts}
    count, side = sum(map(len, parts.values())), stored_side(settings)
    size, are_squares = None, False
    for name, part in parts.items():
        for place, (image, label) in enumerate(_samples(part, f"data: the {PARTS[name]} set")):
            where = f"data: sample {place} of the {PARTS[name]} set"
            pixels = _pixels(image, where)
            size = size or pixels.shape
            if not are_squares and pixels.shape != size:
                are_squares = True
                _must_fit(count, side, side)
                images = {part: [_square(one, settings) for one in some] for part, some in images.items()}
            elif not are_squares and place == min(SOME, len(part) - 1):  # by then, other sizes would have been seen
                _must_fit(count, *size[:2])
            images[name].append(_square(pixels, settings) if are_squares else pixels)
            labels[name].append(_label(label, where))
    return {name: (np.stack(images[name]), np.asarray(labels[name], dtype=np.int64)) for name in parts}


def _must_fit(count: int, height: int, width: int) -> None:
    much = f"data: {count:,} images of {width} x {height} pixels do not fit into memory"
    must_fit(3 * height * width * count, much, "use fewer or smaller images")


def _samples(part: Any, what: str) -> Iterator[tuple[Any, Any]]:
    """(image, label) of each sample of a data set."""
    place = 0
    try:
        if _is_of_hugging_face(part):
            columns = [_column(part, "Image", IMAGE_COLUMNS), _column(part, "ClassLabel", LABEL_COLUMNS)]
            for row in part.with_format(None).select_columns(columns):  # without transforms: they may be random
                yield row[columns[0]], row[columns[1]]
                place += 1
            return
        for place in range(len(part)):
            sample = part[place]
            if not isinstance(sample, list | tuple) or len(sample) != 2:
                kind = type(sample).__name__
                raise InputError(f"{what} gives samples of type {kind}; each should be a pair of image and label")
            yield sample[0], sample[1]
    except (InputError, MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # whatever the user's own code raises
        reason = (str(error).splitlines() or [""])[0][:200]
        raise InputError(f"{what} fails at sample {place} ({type(error).__name__}: {reason}); mend it") from error


def _pixels(image: Any, where: str) -> np.ndarray:
    """One image as (H, W, 3), uint8."""
    from PIL import Image

    if isinstance(image, Image.Image):
        return np.asarray(in_colour(image))
    if isinstance(image, torch.Tensor):
        image = (image.float() if image.is_floating_point() else image).detach().cpu().numpy()
    if not isinstance(image, np.ndarray):
        raise InputError(f"{where} is of type {type(image).__name__}; images are PIL images, tensors or arrays")
    if image.ndim == 3 and image.shape[0] in (1, 3):
        image = image.transpose(1, 2, 0)
    if image.ndim == 2:
        image = image[:, :, None]
    if image.ndim != 3 or image.shape[2] not in (1, 3) or 0 in image.shape:
        raise InputError(f"{where} has shape {list(image.shape)}; expected (C, H, W), (H, W, C) or (H, W), C 1 or 3")
    if image.dtype.kind == "f":
        if not ((image >= 0) & (image <= 1)).all():
            raise InputError(f"{where} has numbers below 0 or above 1; give images before they are normalised")
        image = np.round(image.astype(np.float64) * 255).astype(np.uint8)
    elif image.dtype != np.uint8:
        raise InputError(f"{where} is {image.dtype}; give uint8 from 0 to 255, or floats from 0 to 1")
    return np.array(np.broadcast_to(image, (*image.shape[:2], 3)))  # a copy: a data set may use one array for all


def _square(pixels: np.ndarray, settings: DataSettings) -> np.ndarray:
    from PIL import Image

    return np.asarray(as_square(Image.fromarray(np.ascontiguousarray(pixels)), settings))


def _label(label: Any, where: str) -> int:
    if isinstance(label, torch.Tensor | np.ndarray | np.generic) and label.ndim == 0:
        label = label.item()
    if isinstance(label, bool) or not isinstance(label, int) or label < 0:
        raise InputError(f"{where} has the label {str(label)[:60]!r}; labels are whole numbers from 0")
    return label
