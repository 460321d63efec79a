"""The cache on disk: downloads, and arrays that are costly to compute, such as a frozen backbone's features.

An array is stored under a hash of everything it depends on, so it never goes stale, and any run or
process that needs the same one finds it. It is read memory-mapped. The folder is `$FEDSIEVE_CACHE`
(default `~/.cache/fedsieve`); arrays unused for longest go first when there are more than
`$FEDSIEVE_CACHE_GB` (default 20). Whatever is wrong with the cache, a run can do without it.
"""

import errno
import fcntl
import hashlib
import io
import itertools
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve.errors import InputError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Compute = Callable[[int], Iterator[np.ndarray]]


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
    key: dict[str, Any], rows: int, columns: int, compute: Compute, note: Callable[[str], None] = lambda text: None
) -> np.ndarray:
    """The float32 array (rows, columns) that belongs to `key`, computed now if it is not there.

    `compute(first)` yields blocks of rows from row `first` on. Blocks already written survive an
    interruption. A second process that wants the same array waits for the first. What cannot be kept is
    computed into memory, and `note` hears why.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_folder() / "arrays"
    path, needed = folder / f"{name}.npy", 4 * rows * columns
    if needed > size_limit():
        note(too_large(needed, limit_needed=needed))
        return _in_memory(np.empty((rows, columns), np.float32), 0, compute(0))
    if (found := _opened(path, rows, columns)) is not None:
        return found
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(folder / f"{name}.lock"))
            if (found := _opened(path, rows, columns)) is not None:  # the one who held the lock has made it
                return found
            _make_room(folder, needed, path.with_suffix(".partial"))
            partial = stack.enter_context(_Partial(path, rows, columns))
        except OSError as error:
            note(_lost(needed, error))
            return _in_memory(np.empty((rows, columns), np.float32), 0, compute(0))
        return partial.fill(compute, lambda error: note(_lost(needed, error)))


def too_large(needed: int, limit_needed: int) -> str:
    """What to say of so many bytes that the cache may not keep, for which its limit would have to be `limit_needed`."""
    return (
        f"{_size(needed)} of outputs of what is frozen are more than the cache may keep; "
        f"going on without it: set FEDSIEVE_CACHE_GB to {math.ceil(limit_needed / 1e8) / 10:g} or more"
    )


def cache_size() -> int:
    return sum(path.stat().st_size for path in cache_folder().rglob("*") if path.is_file())


def clear() -> int:
    """Delete everything in the cache; how many bytes that freed."""
    freed = cache_size()
    shutil.rmtree(cache_folder(), ignore_errors=True)
    return freed


def _lost(needed: int, error: OSError) -> str:
    fails = f"{'has no room for' if error.errno in NO_ROOM else 'cannot keep'} {_size(needed)}"
    place = "a larger place" if error.errno in NO_ROOM else "a folder that can be written"
    return (
        f"the cache {cache_folder()} {fails} of outputs of what is frozen ({error.strerror or error}); "
        f"going on without it: set FEDSIEVE_CACHE to {place}"
    )


def _size(bytes: int) -> str:
    return f"{bytes / 1e9:,.1f} GB" if bytes >= 1e8 else f"{bytes / 1e6:,.1f} MB"


def _opened(path: Path, rows: int, columns: int) -> np.ndarray | None:
    """The array in a file, memory-mapped; None if there is none, or not a whole one of this shape."""
    header = _header(rows, columns)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(header)) != header or size != len(header) + 4 * rows * columns:
                return None
            array = np.memmap(file, dtype=np.float32, mode="r", offset=len(header), shape=(rows, columns))
    except OSError:
        return None
    with suppress(OSError):  # a folder that can only be read is good enough for reading
        os.utime(path)  # for "unused for longest"
    return array


def _in_memory(array: np.ndarray, done: int, blocks: Iterator[np.ndarray]) -> np.ndarray:
    for block in blocks:
        array[done : done + len(block)] = block
        done += len(block)
    return array


class _Partial:
    """An array under way: its file, and beside it a list of the blocks that are in it, with their checksums.

    Blocks are written, not assigned to a mapped file: where there is no room, that would end the process.
    """

    def __init__(self, path: Path, rows: int, columns: int) -> None:
        self.path, self.shape, self.row_bytes = path, (rows, columns), 4 * columns
        self.file_path, self.list_path = path.with_suffix(".partial"), path.with_suffix(".count")
        self.header = _header(rows, columns)
        self.blocks: list[tuple[int, int]] = []  # the rows and the checksum of each block in the file

    def __enter__(self) -> "_Partial":
        """Take the room for the whole array now, so that nothing is computed in vain; find what is there already."""
        self.file = self.file_path.open("r+b" if self.file_path.exists() else "w+b", buffering=0)
        try:
            self._reserve(len(self.header) + self.shape[0] * self.row_bytes)
            self.blocks = self._whole(self._listed())
            self.list_path.write_text("".join(f"{rows} {checksum}\n" for rows, checksum in self.blocks))
        except OSError:
            self._drop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def fill(self, compute: Compute, failed: Callable[[OSError], None]) -> np.ndarray:
        """The array, in its file; if it cannot be written, in memory, and `failed` hears why."""
        blocks = compute(self.rows)
        for block in blocks:
            try:
                self._append(block)
            except OSError as error:
                failed(error)
                return self._in_memory(compute, itertools.chain([block], blocks))
        try:
            return self._finished()
        except OSError as error:
            failed(error)
            return self._in_memory(compute, iter(()))

    @property
    def rows(self) -> int:
        """How many rows are in the file."""
        return sum(rows for rows, _ in self.blocks)

    def _reserve(self, size: int) -> None:
        with suppress(AttributeError):  # not on every system
            try:
                os.posix_fallocate(self.file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # such a disk tells when blocks are written
                    raise
        if os.fstat(self.file.fileno()).st_size > size:
            self.file.truncate(size)

    def _append(self, block: np.ndarray) -> None:
        data = np.ascontiguousarray(block, dtype=np.float32).reshape(-1).view(np.uint8).data
        self._write(data, len(self.header) + self.rows * self.row_bytes)
        self.blocks.append((len(block), zlib.crc32(data)))
        with suppress(OSError), self.list_path.open("a") as file:  # without it, an interruption costs more
            file.write("{} {}\n".format(*self.blocks[-1]))

    def _write(self, data: memoryview, place: int) -> None:
        while data:  # a disk that is nearly full takes a part, and says no the next time
            written = os.pwrite(self.file.fileno(), data, place)
            data, place = data[written:], place + written

    def _listed(self) -> list[tuple[int, int]]:
        """The blocks that an interrupted process says it has written."""
        try:
            lines = [line.split() for line in self.list_path.read_text().splitlines()]
            return [(int(rows), int(checksum)) for rows, checksum in lines]
        except (FileNotFoundError, ValueError):
            return []

    def _whole(self, blocks: list[tuple[int, int]], into: np.ndarray | None = None) -> list[tuple[int, int]]:
        """The blocks up to the first that is not in the file as it was written, also copied to `into`."""
        done = 0
        for number, (rows, checksum) in enumerate(blocks):
            if rows < 1 or done + rows > self.shape[0]:
                return blocks[:number]
            data = os.pread(self.file.fileno(), rows * self.row_bytes, len(self.header) + done * self.row_bytes)
            if len(data) < rows * self.row_bytes or zlib.crc32(data) != checksum:
                return blocks[:number]
            if into is not None:
                into[done : done + rows] = np.frombuffer(data, dtype=np.float32).reshape(rows, -1)
            done += rows
        return blocks

    def _finished(self) -> np.ndarray:
        self._write(memoryview(self.header), 0)
        os.fsync(self.file.fileno())
        self.file_path.replace(self.path)
        self.list_path.unlink(missing_ok=True)
        array = _opened(self.path, *self.shape)
        if array is None:
            raise OSError("what was written cannot be read")
        return array

    def _in_memory(self, compute: Compute, rest: Iterator[np.ndarray]) -> np.ndarray:
        """The blocks of the file, then the `rest`; nothing is left in the cache."""
        array, expected = np.empty(self.shape, np.float32), self.rows
        with suppress(OSError):
            self.blocks = self._whole(self.blocks, array)
        self._drop()
        return _in_memory(array, self.rows, rest if self.rows == expected else compute(self.rows))

    def _drop(self) -> None:
        self.file.close()
        for path in (self.file_path, self.list_path):
            with suppress(OSError):
                path.unlink()


def _header(rows: int, columns: int) -> bytes:
    """What numpy writes before such an array."""
    file = io.BytesIO()
    about = {"descr": "<f4", "fortran_order": False, "shape": (rows, columns)}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()


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
        with suppress(OSError):  # another process may have deleted it
            status = path.stat()
            arrays.append((status.st_mtime, status.st_size, path))
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
