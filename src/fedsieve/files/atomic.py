"""Files that are either there as a whole or not at all, whatever happens while they are written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsieve.errors import machine_error


@contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """A name to write to; it becomes `path` when the block ends without an error. A link to a file stays one.

    MachineError if there is no room for it.
    """
    if path.exists() and not path.is_file():  # a pipe or a device: written to, for it must not be replaced by a file
        yield path
        return
    path = path.resolve()
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        flush_to_disk(partial)
        partial.chmod(0o666 & ~_umask())  # some writers make files that only their owner may read
        partial.replace(path)
        flush_to_disk(path.parent)  # the new name, too
    except Exception as error:  # libraries have errors of their own for a full disk
        if (known := machine_error(error, f"{path} cannot be written")) is not None:
            raise known from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Wait until the file's content, or the folder's names, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def write_text(path: Path, text: str) -> None:
    """In UTF-8, whatever the locale; what is left of a name that is not UTF-8 is escaped."""
    with written_atomically(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
