"""Processes that end with the main process, however it ends: the fork server and the workers.

    python -m fedsieve.engine.lifeline PARENT LIFELINE CONTROL ...    (what follows is for the fork server)

It imports nothing slow at first: a fork server whose main process dies during its start must end as well.
"""

import ctypes
import os
import signal
import sys
import threading
from functools import partial

DIES_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def tie(lifeline: int, parent: int) -> None:
    """End this process when the main one ends, whatever it is doing.

    `lifeline` is a socket whose other end only the main process has, and never uses, so reading it returns when that
    process ends. On Linux the system also kills this process with its parent, even if Python code cannot run. Pass 0
    as `parent` if a thread other than the main one starts this process: Linux sends the signal when that thread ends.
    """
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:  # the parent had ended before
            os._exit(1)


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


def parent_to_die_with() -> int:
    """The `parent` for `tie` in a process that is started now; 0 in a thread, which may end before this process."""
    return os.getpid() if threading.current_thread() is threading.main_thread() else 0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends this one
    parent, lifeline, *rest = map(int, sys.argv[1:])
    tie(lifeline, parent)
    from fedsieve.engine.fork_server import serve

    serve(partial(tie, lifeline), *rest)


if __name__ == "__main__":
    main()
