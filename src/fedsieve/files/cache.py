"""The cache on disk: downloads, and arrays that are costly to compute, such as a frozen backbone's features.

An array is stored under a hash of everything it depends on, so it never goes stale, and any run or
process that needs the same one finds it. It is read memory-mapped, and compared with its digest once in a
run (`array_file.py`). The folder is `$FEDSIEVE_CACHE`
(default `~/.cache/fedsieve`); arrays unused for longest go first when there are more than
`$FEDSIEVE_CACHE_GB` (default 20). Whatever is wrong with the cache, a run can do without it.

The folder may be one that holds other files, too: only files under names that fedsieve gives are counted or deleted.
"""

import fcntl
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve.errors import NO_ROOM, InputError
from fedsieve.files.array_file import Compute, Partial, in_memory, opened

OWN = {  # the names that fedsieve gives to files, by folder
    "arrays": re.compile(r"[0-9a-f]{32}\.(npy|partial|count|lock)"),
    "data": re.compile(r"fedsieve-[0-9a-z]+(\.[0-9]+)?\.npz"),
}


def cache_folder() -> Path:
    """Where the cache is; a variable that is empty counts as not set."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fedsieve"
    try:
        return Path(os.environ.get("FEDSIEVE_CACHE") or default).expanduser()
    except RuntimeError:
        raise InputError("the cache has no place, as there is no home folder; set FEDSIEVE_CACHE to a folder") from None


def size_limit() -> float:
    """Bytes that the arrays may take."""
    text = os.environ.get("FEDSIEVE_CACHE_GB") or "20"
    with suppress(ValueError):
        if (limit := float(text)) >= 0:  # which nan is not
            return limit * 1e9
    raise InputError(f"FEDSIEVE_CACHE_GB is '{text}'; give a number of gigabytes from 0 on, such as 20")


def cached_array(
    key: dict[str, Any], rows: int, columns: int, compute: Compute, note: Callable[[str], None] = lambda text: None
) -> np.ndarray:
    """The float32 array (rows, columns) that belongs to `key`, computed now if it is not there.

    `compute(first)` yields blocks of rows from row `first` on. Blocks already written survive an
    interruption. A second process that wants the same array waits for the first. What cannot be kept is
    computed into memory, and `note` hears why.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    needed = 4 * rows * columns
    try:
        folder = cache_folder() / "arrays"
    except InputError as error:
        note(f"{error}; going on without it")
        return in_memory(np.empty((rows, columns), np.float32), 0, compute(0))
    path = folder / f"{name}.npy"
    if needed > size_limit():
        note(too_large(needed, limit_needed=needed))
        return in_memory(np.empty((rows, columns), np.float32), 0, compute(0))
    if (found := opened(path, rows, columns)) is not None:
        return found
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(folder / f"{name}.lock"))
            if (found := opened(path, rows, columns)) is not None:  # the one who held the lock has made it
                return found
            _make_room(folder, needed, path.with_suffix(".partial"))
            partial = stack.enter_context(Partial(path, rows, columns))
        except OSError as error:
            note(_lost(needed, error))
            return in_memory(np.empty((rows, columns), np.float32), 0, compute(0))
        return partial.fill(compute, lambda error: note(_lost(needed, error)))


def too_large(needed: int, limit_needed: int) -> str:
    """What to say of so many bytes that the cache may not keep, for which its limit would have to be `limit_needed`."""
    return (
        f"{_size(needed)} of outputs of what is frozen are more than the cache may keep; "
        f"going on without it: set FEDSIEVE_CACHE_GB to {math.ceil(limit_needed / 1e8) / 10:g} or more"
    )


def cache_size() -> int:
    """Bytes of all files that fedsieve has put into the cache."""
    return sum(_bytes_in(path) for path in _own_files())


def clear() -> tuple[int, list[str]]:
    """Delete what fedsieve has put into the cache: how many bytes that freed, and what else is in the folder.

    An array that a process is computing stays, too.
    """
    folder, freed = cache_folder(), 0
    for path in _own_files():
        size = _bytes_in(path)
        with suppress(OSError):  # in use, or not ours to delete
            if path.parent.name == "arrays":
                with _locked(path.with_suffix(".lock"), wait=False):
                    path.unlink()
                    path.with_suffix(".lock").unlink(missing_ok=True)
            else:
                path.unlink()
            freed += size
    for name in OWN:
        with suppress(OSError):  # there is something in it
            (folder / name).rmdir()
    left = [path for path in _in(folder) if path.name not in OWN]
    left += [path for name in OWN for path in _in(folder / name)]
    return freed, [str(path.relative_to(folder)) for path in left]


def _own_files() -> list[Path]:
    folder = cache_folder()
    return [path for name, own in OWN.items() for path in _in(folder / name) if own.fullmatch(path.name)]


def _in(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _bytes_in(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _lost(needed: int, error: OSError) -> str:
    fails = f"{'has no room for' if error.errno in NO_ROOM else 'cannot keep'} {_size(needed)}"
    place = "a larger place" if error.errno in NO_ROOM else "a folder that can be written"
    return (
        f"the cache {cache_folder()} {fails} of outputs of what is frozen ({error.strerror or error}); "
        f"going on without it: set FEDSIEVE_CACHE to {place}"
    )


def _size(bytes: int) -> str:
    return f"{bytes / 1e9:,.1f} GB" if bytes >= 1e8 else f"{bytes / 1e6:,.1f} MB"


def _make_room(folder: Path, needed: int, own: Path) -> None:
    """Delete what was unused for longest, whole or abandoned half-way, until `needed` more bytes fit.

    `own` is the half that will go on. Where there was plenty of room a moment ago, nobody looks again: there may be
    a hundred thousand arrays.
    """
    if _known_room.get(folder, 0) >= needed:
        _known_room[folder] -= needed
        return
    arrays = []
    for path in folder.glob("*.[np][pa]*"):
        if not OWN["arrays"].fullmatch(path.name):
            continue
        with suppress(OSError):  # another process may have deleted it
            status = path.stat()
            arrays.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    limit, total = size_limit(), needed + sum(size for _, size, path in arrays if path != own)
    for _, size, path in sorted(arrays):
        if total <= limit:
            break
        if path.suffix == ".partial" and (path == own or _is_locked(path.with_suffix(".lock"))):
            continue
        with suppress(OSError):  # someone else's
            path.unlink()  # a process that has it mapped keeps its copy
            path.with_suffix(".count").unlink(missing_ok=True)
            total -= size
    _known_room[folder] = min(limit - total, limit / 100)  # others take room, too


_known_room: dict[Path, float] = {}  # that need not be looked for


def _is_locked(path: Path) -> bool:
    try:
        with _locked(path, wait=False):
            return False
    except OSError:
        return True


@contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Within it, nobody else has the lock; without `wait`, OSError if somebody has."""
    while True:
        with path.open("w", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _is_at(file.fileno(), path):  # else it was deleted meanwhile, and the next one would take another file
                yield
                return


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
