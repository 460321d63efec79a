"""The two ways a command can fail, each reported to the user without a traceback."""

import errno

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_ROOM_TEXTS = ("No space left on device", "Disk quota exceeded", "File too large", "disk is full")
NO_MEMORY_TEXTS = ("not enough memory", "out of memory", "allocate memory", "DefaultCPUAllocator")
INTERRUPTED_ADVICE = "interrupted; the same command with --out (and --resume, for a run) goes on"
STORES = ("sqlite3", "sqlalchemy", "optuna")  # whose own errors come from the file with a sweep's trials


class InputError(Exception):
    """The input is wrong; the message says what would be right (exit code 2)."""


class RunError(Exception):
    """A run that started correctly could not go on (exit code 1)."""


class MachineError(RunError):
    """A run failed because of the machine: a full disk, for example, or too little memory. Later it may work."""


class PartError(RunError):
    """A part of the user's own (docs/extend.md) is wrong. That ends the run; it is no client's fault."""


class WorkerError(RunError):
    """A run failed because of an error in a worker process."""


def machine_error(error: BaseException, what: str = "") -> MachineError | None:
    """The MachineError for an error that the machine caused, whatever its type; None if it did not.

    `what` says what could not be done.
    """
    if isinstance(error, MachineError):
        return error
    while _is_of_files(error) and error.__cause__ is not None:  # SQLite's message says more than optuna's
        error = error.__cause__
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    about = f"{what}: {text}" if what else text
    if _is(error, NO_ROOM, NO_ROOM_TEXTS):
        return MachineError(f"the disk is full ({about}); make room, and go on with the same command (a run: --resume)")
    if isinstance(error, MemoryError) or _is(error, (errno.ENOMEM,), NO_MEMORY_TEXTS):
        return MachineError(f"there is too little memory ({about}); use a smaller experiment, or fewer workers")
    return MachineError(about) if _is_of_files(error) else None


def _is(error: BaseException, numbers: tuple[int, ...], texts: tuple[str, ...]) -> bool:
    if isinstance(error, OSError):
        return error.errno in numbers
    may_be = isinstance(error, RuntimeError) or _is_of_files(error)  # RuntimeError: torch's memory errors
    return may_be and any(text in str(error) for text in texts)


def _is_of_files(error: BaseException) -> bool:
    return type(error).__name__ == "SafetensorError" or type(error).__module__.split(".")[0] in STORES
