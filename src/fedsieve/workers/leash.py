"""Processes that end with the main process, however it ends: the nursery and the workers.

    python -m fedsieve.workers.leash PARENT LIFELINE CONTROL ...    (what follows is for the nursery)

It imports nothing that takes time: a nursery whose main process dies while it starts must be gone as well.
"""

import ctypes
import os
import signal
import sys
import threading

DIES_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def tie(lifeline: int, parent: int) -> None:
    """End this process with the main one, in the midst of whatever it does.

    `lifeline` is a socket whose other end only the main process has, and never uses: reading it takes as long as that
    process lives. On Linux the system also kills this process with its parent, even if Python code cannot run. Pass 0
    as `parent` if a thread other than the main one starts this process: Linux sends the signal when that thread ends.
    """
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before
            os._exit(1)


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


def parent_to_die_with() -> int:
    """This process, for the `tie` of one that it starts now; 0 in a thread, which may end before the process does."""
    return os.getpid() if threading.current_thread() is threading.main_thread() else 0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends this one
    parent, lifeline, *rest = map(int, sys.argv[1:])
    tie(lifeline, parent)
    from fedsieve.workers.nursery import serve

    serve(lifeline, *rest)


if __name__ == "__main__":
    main()
