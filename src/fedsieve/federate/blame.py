"""Whether an error is a client's, which is left out of the round, or ends the run: the machine's, or a plugin's."""

from fedsieve.config.plugins import place_of
from fedsieve.errors import InputError, PartError, RunError, machine_error
from fedsieve.wire import WireError

DELIBERATE = (RunError, InputError, WireError)  # raised to say what is wrong with what a client does or sends


def raise_if_ours(error: Exception) -> None:
    """Raise an error that is no client's fault: a full disk, too little memory, or a mistake in a plugin."""
    if isinstance(error, PartError):
        raise error
    if place_of(error) is not None and not isinstance(error, DELIBERATE):
        raise PartError(reason_of(error)) from error
    if (known := machine_error(error)) is not None:
        raise known from error
    if isinstance(error, OSError):
        raise error


def reason_of(error: Exception) -> str:
    """An error in one line, with the line of the plugin that it came through."""
    if isinstance(error, DELIBERATE):
        return " ".join(str(error).split())
    first, *_ = *str(error).strip().splitlines(), ""
    place = place_of(error)
    return f"{place + ': ' if place else ''}{type(error).__name__}: {first}"
