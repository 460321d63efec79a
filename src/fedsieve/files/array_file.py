"""The file of a cached array: as numpy writes it, with a digest behind, so that damage is noticed.

A file is read as a whole and compared with its digest once in a run: processes share a list of the files that
they have checked. Reading takes about a second for each 10 GB that are in memory already.
"""

import errno
import io
import itertools
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from xxhash import xxh3_128

Compute = Callable[[int], Iterator[np.ndarray]]
DIGEST = xxh3_128().digest_size
AT_ONCE = 1 << 22  # bytes that are read at a time


class Verified:
    """Which versions of files were compared with their digests, here and in the processes that this is shared with."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()
        self._fd: int | None = None
        self._taken = 0  # bytes of the shared file that are known

    def share(self, fd: int | None) -> None:
        """From now on with all processes that inherited this file descriptor; None: with nobody."""
        self._fd, self._taken = fd, 0
        if fd is not None and self._known:
            os.write(fd, b"".join(self._known))

    def add(self, version: bytes) -> None:
        self._known.add(version)
        if self._fd is not None:
            os.write(self._fd, version)  # appends: who inherited the descriptor writes at the same place

    def __contains__(self, version: bytes) -> bool:
        if version not in self._known and self._fd is not None:
            news = os.pread(self._fd, max(0, os.fstat(self._fd).st_size - self._taken), self._taken)
            whole = len(news) - len(news) % DIGEST
            self._known.update(news[start : start + DIGEST] for start in range(0, whole, DIGEST))
            self._taken += whole
        return version in self._known


verified = Verified()


def opened(path: Path, rows: int, columns: int) -> np.ndarray | None:
    """The array in a file, memory-mapped; None if there is none, or not a whole and undamaged one of this shape."""
    header = _header(rows, columns)
    length = len(header) + 4 * rows * columns
    try:
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if status.st_size != length + DIGEST or file.read(len(header)) != header:
                return None
            version = xxh3_128(f"{status.st_dev} {status.st_ino} {status.st_mtime_ns}".encode()).digest()
            if version not in verified:
                if _digest_of(file.fileno(), length) != os.pread(file.fileno(), DIGEST, length):
                    return None
                verified.add(version)
            array = np.memmap(file, dtype=np.float32, mode="r", offset=len(header), shape=(rows, columns))
    except OSError:
        return None
    with suppress(OSError):  # a folder that can only be read is good enough for reading
        os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))  # for "unused for longest"
    return array


def _digest_of(fd: int, length: int) -> bytes:
    """Of the first bytes of a file. They are read, not mapped, so that they do not count as this process's memory."""
    digest = xxh3_128()
    for start in range(0, length, AT_ONCE):
        digest.update(os.pread(fd, min(AT_ONCE, length - start), start))
    return digest.digest()


def in_memory(array: np.ndarray, done: int, blocks: Iterator[np.ndarray]) -> np.ndarray:
    for block in blocks:
        array[done : done + len(block)] = block
        done += len(block)
    return array


class Partial:
    """An array under way: its file, and beside it a list of the blocks that are in it, with their checksums.

    Blocks are written, not assigned to a mapped file: where there is no room, that would end the process.
    """

    def __init__(self, path: Path, rows: int, columns: int) -> None:
        self.path, self.shape, self.row_bytes = path, (rows, columns), 4 * columns
        self.file_path, self.list_path = path.with_suffix(".partial"), path.with_suffix(".count")
        self.header = _header(rows, columns)
        self.digest = xxh3_128(self.header)
        self.blocks: list[tuple[int, int]] = []  # the rows and the checksum of each block in the file

    def __enter__(self) -> "Partial":
        """Take the room for the whole array now, so that nothing is computed in vain; find what is there already."""
        self.file = self.file_path.open("r+b" if self.file_path.exists() else "w+b", buffering=0)
        try:
            self._reserve(len(self.header) + self.shape[0] * self.row_bytes + DIGEST)
            self.blocks = self._whole(self._listed(), lambda _, data: self.digest.update(data))
            self.list_path.write_text(
                "".join(f"{rows} {checksum}\n" for rows, checksum in self.blocks), encoding="utf-8"
            )
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
        self.digest.update(data)
        self.blocks.append((len(block), zlib.crc32(data)))
        with (
            suppress(OSError),
            self.list_path.open("a", encoding="utf-8") as file,
        ):  # without it, an interruption costs more
            file.write("{} {}\n".format(*self.blocks[-1]))

    def _write(self, data: memoryview, place: int) -> None:
        while data:  # a disk that is nearly full takes a part, and says no the next time
            written = os.pwrite(self.file.fileno(), data, place)
            data, place = data[written:], place + written

    def _listed(self) -> list[tuple[int, int]]:
        """The blocks that an interrupted process says it has written."""
        try:
            lines = [line.split() for line in self.list_path.read_text(encoding="utf-8").splitlines()]
            return [(int(rows), int(checksum)) for rows, checksum in lines]
        except (FileNotFoundError, ValueError):
            return []

    def _whole(self, blocks: list[tuple[int, int]], use: Callable[[int, bytes], None]) -> list[tuple[int, int]]:
        """The blocks up to the first that is not in the file as it was written; `use` gets their rows' data."""
        done = 0
        for number, (rows, checksum) in enumerate(blocks):
            if rows < 1 or done + rows > self.shape[0]:
                return blocks[:number]
            data = os.pread(self.file.fileno(), rows * self.row_bytes, len(self.header) + done * self.row_bytes)
            if len(data) < rows * self.row_bytes or zlib.crc32(data) != checksum:
                return blocks[:number]
            use(done, data)
            done += rows
        return blocks

    def _finished(self) -> np.ndarray:
        self._write(memoryview(self.header), 0)
        self._write(memoryview(self.digest.digest()), len(self.header) + self.shape[0] * self.row_bytes)
        os.fsync(self.file.fileno())
        self.file_path.replace(self.path)
        self.list_path.unlink(missing_ok=True)
        array = opened(self.path, *self.shape)
        if array is None:
            raise OSError("what was written cannot be read")
        return array

    def _in_memory(self, compute: Compute, rest: Iterator[np.ndarray]) -> np.ndarray:
        """The blocks of the file, then the `rest`; nothing is left in the cache."""
        array, expected = np.empty(self.shape, np.float32), self.rows
        flat = array.reshape(-1).view(np.uint8)

        def copy(row: int, data: bytes) -> None:
            start = row * self.row_bytes
            flat[start : start + len(data)] = np.frombuffer(data, np.uint8)

        with suppress(OSError):
            self.blocks = self._whole(self.blocks, copy)
        self._drop()
        return in_memory(array, self.rows, rest if self.rows == expected else compute(self.rows))

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
