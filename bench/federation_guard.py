"""Starts the processes of bench/federation_flower.py, and ends them and all that they start when the bench is gone.

Flower's commands start others in sessions of their own, some of which outlive them by minutes. This process adopts
all orphans below it, so none gets lost. A line of JSON on its stdin starts a command; at the end of stdin, which comes
however the bench ends, all are killed, and the folder that is its argument is deleted.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from observed import with_children

ADOPTS_ORPHANS = 36  # prctl's PR_SET_CHILD_SUBREAPER


def main() -> None:
    ctypes.CDLL(None).prctl(ADOPTS_ORPHANS, 1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with the bench
    started = []
    try:
        for line in sys.stdin:
            started.append(start(**json.loads(line)))
            print(started[-1].pid, flush=True)
    finally:
        end_all()
        shutil.rmtree(sys.argv[1], ignore_errors=True)


def start(command: list[str], environment: dict[str, str], said: str) -> "subprocess.Popen[bytes]":
    with Path(said).open("wb") as file:
        about: dict[str, Any] = {"env": environment, "stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        return subprocess.Popen(command, **about)


def end_all() -> None:
    """Orphans become children of this process while it goes on."""
    while below := with_children(os.getpid())[1:]:
        for number in below:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        for number in below:
            with suppress(ChildProcessError):
                os.waitpid(number, 0)


if __name__ == "__main__":
    main()
