"""The machine's memory: whether what is asked for fits into it, and what becomes of memory that was freed."""

import ctypes
import os
import sys

from fedsieve.errors import InputError

TRIM_THRESHOLD, MMAP_THRESHOLD, NEVER = -1, -3, (1 << 31) - 1  # of glibc's mallopt


def must_fit(size: int, what: str, remedy: str) -> None:
    """Refuse what takes more bytes than the machine has; Linux would hand them out and later end the process."""
    memory = machine_memory()
    if size > memory:
        raise InputError(f"{what}: {size / 1e9:,.1f} GB, and this machine has {memory / 1e9:,.1f} GB; {remedy}")


def machine_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def keep_freed_memory() -> None:
    """Let glibc keep large blocks of freed memory, since they are soon needed again.

    Giving them back to the system and getting them anew, page by page, would take some 3% of a training step, and more
    than half of the time of adding up the updates.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if change is not None:
        change(TRIM_THRESHOLD, NEVER)
        change(MMAP_THRESHOLD, NEVER)
