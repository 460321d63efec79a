"""The two ways a command can fail, and nothing else that a person should see as a traceback."""


class InputError(Exception):
    """What was asked for cannot be done; the message says what would be right (exit code 2)."""


class RunError(Exception):
    """A run that started correctly could not go on (exit code 1)."""


class WorkerError(RunError):
    """It could not because of what happened in a worker process."""
