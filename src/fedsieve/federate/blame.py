"""Whether an error is a client's, which is then left out of the round, or the machine's, which ends the run."""

from fedsieve.config.plugins import place_of
from fedsieve.errors import InputError, RunError, machine_error
from fedsieve.wire import WireError


def raise_if_ours(error: Exception) -> None:
    """Raise an error that is no client's fault: a full disk, or too little memory."""
    if (known := machine_error(error)) is not None:
        raise known from error
    if isinstance(error, OSError):
        raise error


def reason_of(error: Exception) -> str:
    """An error in one line, with the line of the plugin that it came through."""
    if isinstance(error, RunError | InputError | WireError):
        return " ".join(str(error).split())
    first, *_ = *str(error).strip().splitlines(), ""
    place = place_of(error)
    return f"{place + ': ' if place else ''}{type(error).__name__}: {first}"
