"""Resolves what an experiment leaves open for the machine it runs on."""

import os
from pathlib import Path

from fedsieve.errors import InputError


def workers_allowed(places: int) -> int:
    """The most workers that `workers: auto` may use: $FEDSIEVE_WORKERS, or as many as there are places."""
    text = os.environ.get("FEDSIEVE_WORKERS") or str(places)
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"FEDSIEVE_WORKERS is '{text}'; give a whole number from 1 on, such as 2")
    return int(text)


def absolute(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        absolute = Path(path).expanduser().resolve()
        absolute.exists()
        return str(absolute)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"'{path[:60]}' is no possible path ({error})") from None
