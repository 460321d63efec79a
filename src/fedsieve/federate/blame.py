"""Whether an error is a client's, which is then left out of the round, or the machine's, which ends the run."""

from fedsieve.errors import InputError, RunError, machine_error
from fedsieve.wire import WireError


def raise_if_ours(error: Exception) -> None:
    """Raise an error that is no client's fault: a full disk, or too little memory."""
    if (known := machine_error(error)) is not None:
        raise known from error
    if isinstance(error, OSError):
        raise error


def reason_of(error: Exception) -> str:
    is_ours = isinstance(error, RunError | InputError | WireError)
    return str(error) if is_ours else f"{type(error).__name__}: {error}"
