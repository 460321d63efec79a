"""Whether what is asked for fits into this machine's memory: to be checked before it is allocated."""

import os

from fedsieve.errors import InputError


def must_fit(size: int, what: str, remedy: str) -> None:
    """Refuse what takes more bytes than the machine has; Linux would hand them out and later end the process."""
    memory = machine_memory()
    if size > memory:
        raise InputError(f"{what}: {size / 1e9:,.1f} GB, and this machine has {memory / 1e9:,.1f} GB; {remedy}")


def machine_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
