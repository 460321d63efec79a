"""The cache on disk: downloads, and arrays that are costly to compute, such as a frozen backbone's features.

An array is stored under a hash of everything it depends on, so it never goes stale, and any run or
process that needs the same one finds it. It is read memory-mapped. The folder is `$FEDSIEVE_CACHE`
(default `~/.cache/fedsieve`); arrays unused for longest go first when there are more than
`$FEDSIEVE_CACHE_GB` (default 20).
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve.errors import InputError


def cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "fedsieve"
    return Path(os.environ.get("FEDSIEVE_CACHE", default)).expanduser()


def size_limit() -> float:
    """Bytes that the arrays may take."""
    text = os.environ.get("FEDSIEVE_CACHE_GB", "20")
    try:
        return float(text) * 1e9
    except ValueError:
        raise InputError(f"FEDSIEVE_CACHE_GB is '{text}'; give a number of gigabytes, such as 20") from None


def cached_array(
    key: dict[str, Any], rows: int, columns: int, compute: Callable[[int], Iterator[np.ndarray]]
) -> np.ndarray:
    """The float32 array (rows, columns) that belongs to `key`, computed now if it is not there.

    `compute(first)` yields blocks of rows from row `first` on. Blocks already written survive an
    interruption. A second process that wants the same array waits for the first.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_folder() / "arrays"
    path = folder / f"{name}.npy"
    expected = 4 * rows * columns
    if expected > size_limit():
        return np.concatenate(list(compute(0)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock"):
            if _is_whole(path, expected):
                os.utime(path)  # for "unused for longest"
            else:
                _make_room(folder, expected)
                _compute_to(path, rows, columns, compute)
            return np.load(path, mmap_mode="r")
    except OSError:  # no space, or no place to write: the run can do without the cache
        return np.concatenate(list(compute(0)))


def cache_size() -> int:
    return sum(path.stat().st_size for path in cache_folder().rglob("*") if path.is_file())


def clear() -> int:
    """Delete everything in the cache; how many bytes that freed."""
    freed = cache_size()
    shutil.rmtree(cache_folder(), ignore_errors=True)
    return freed


def _is_whole(path: Path, expected: int) -> bool:
    try:
        return path.stat().st_size == expected + HEADER
    except OSError:
        return False


HEADER = 128  # bytes that numpy writes before a plain array


def _compute_to(path: Path, rows: int, columns: int, compute: Callable[[int], Iterator[np.ndarray]]) -> None:
    partial, count = path.with_suffix(".partial"), path.with_suffix(".count")
    first = int(count.read_text() or 0) if count.exists() and _is_whole(partial, 4 * rows * columns) else 0
    array = np.lib.format.open_memmap(partial, "r+" if first else "w+", dtype=np.float32, shape=(rows, columns))
    if hasattr(os, "posix_fallocate"):  # take the space now: a mapped file on a full disk would end the process
        with partial.open("rb+") as file:
            os.posix_fallocate(file.fileno(), 0, 4 * rows * columns + HEADER)
    for block in compute(first):
        array[first : first + len(block)] = block
        first += len(block)
        array.flush()
        count.write_text(str(first))
    del array
    count.unlink(missing_ok=True)
    partial.replace(path)


def _make_room(folder: Path, needed: int) -> None:
    """Delete what was unused for longest, whole or abandoned half-way, until `needed` more bytes fit."""
    arrays = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in folder.glob("*.[np][pa]*"))
    total = sum(size for _, size, _ in arrays) + needed
    for _, size, path in arrays:
        if total <= size_limit():
            break
        if path.suffix == ".partial" and _is_locked(path.with_suffix(".lock")):
            continue
        total -= size
        path.unlink(missing_ok=True)  # a process that has it mapped keeps its copy


def _is_locked(path: Path) -> bool:
    try:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
