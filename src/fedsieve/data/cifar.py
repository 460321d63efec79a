"""CIFAR-100 (Krizhevsky 2009): the official Python files, or a download through Hugging Face."""

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve.errors import InputError

MD5 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}
LARGEST = 1 << 28  # bytes of a file; the largest official one has 155,249,918
ALLOWED = {("numpy", "ndarray"), ("numpy", "dtype")}  # what the official files are made of, and nothing else


class CifarUnpickler(pickle.Unpickler):
    """Reads arrays, numbers, text and containers; any other class in the file is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]  # the same function, wherever this numpy keeps it
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a CIFAR file")


def read_official(folder: Path) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], list[str]]:
    """((train images, labels), (test images, labels), class names) of `cifar-100-python`.

    `folder` is that folder or the one that holds it. Images are uint8 (N, 3, 32, 32).
    """
    if not (folder / "train").exists() and (folder / "cifar-100-python").is_dir():
        folder = folder / "cifar-100-python"
    parts = {}
    for name, md5 in MD5.items():
        try:
            if not (folder / name).is_file() or (folder / name).stat().st_size > LARGEST:
                raise OSError
            content = (folder / name).read_bytes()
        except OSError:
            raise InputError(f"data.path: {folder} has no file {name}; give the folder cifar-100-python") from None
        if hashlib.md5(content).hexdigest() != md5:
            raise InputError(f"{folder / name} is damaged (its md5 is not {md5}); fetch CIFAR-100 again")
        parts[name] = CifarUnpickler(io.BytesIO(content), encoding="bytes").load()
    names = [name.decode() for name in parts["meta"][b"fine_label_names"]]

    def arrays(part: dict[bytes, Any]) -> tuple[np.ndarray, np.ndarray]:
        return part[b"data"].reshape(-1, 3, 32, 32), np.asarray(part[b"fine_labels"], dtype=np.int64)

    return arrays(parts["train"]), arrays(parts["test"]), names
