"""Data sets in npz files of numpy: checked before they are unpacked, since a few bytes of zip can hold gigabytes."""

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedsieve.errors import InputError
from fedsieve.files.memory import must_fit

WANTED = ("x_train", "y_train", "x_test", "y_test")


def read_arrays(path: Path, names: Sequence[str] = WANTED) -> dict[str, np.ndarray]:
    """Those of the arrays `names` that are there, and the classes' names; sizes are checked before unpacking."""
    hint = "write it with numpy.savez"
    if not path.is_file():
        raise InputError(f"{path} is no file; {hint}")
    try:
        with zipfile.ZipFile(path) as archive:
            wanted = [name for name in (*names, "names") if f"{name}.npy" in archive.namelist()]
            size = sum(_declared_size(archive, f"{name}.npy") for name in wanted)
        must_fit(size, f"{path} does not fit into memory", "use fewer or smaller images")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in wanted}
        str(arrays.get("names"))  # fails where they have characters that do not exist
        return arrays
    except InputError:
        raise
    except Exception as error:  # zip and numpy raise many kinds for a damaged file
        raise InputError(f"{path} is no readable npz file ({type(error).__name__}); {hint}") from None


def _declared_size(archive: zipfile.ZipFile, member: str) -> int:
    """The bytes of an array, as its header and the archive's both say."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        size = dtype.itemsize * math.prod(shape)
        if archive.getinfo(member).file_size - file.tell() != size:
            raise ValueError("the array is not as large as its header says")
    return size


def channels_first(images: np.ndarray, where: str) -> np.ndarray:
    if 0 in images.shape[1:]:
        raise InputError(f"{where} has shape {list(images.shape)}; images should have at least one pixel")
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[3] in (1, 3):
        return images.transpose(0, 3, 1, 2)
    if images.ndim == 4 and images.shape[1] in (1, 3):
        return images
    raise InputError(
        f"{where} has shape {list(images.shape)}; expected (N, H, W), (N, H, W, C) or (N, C, H, W), C 1 or 3"
    )
