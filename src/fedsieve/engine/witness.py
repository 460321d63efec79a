"""Says why a run ended, where Ray ended its driver: it does so without a word when the driver's node or the head dies.

    python -I -S witness.py LINE SOCKET HOST:PORT

It imports nothing but sockets, so that it starts in milliseconds.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ALL_IS_WELL = b"1"
PATIENCE = 5  # seconds
ADVICE = "go on with the same command and --resume once it is up again"


@contextmanager
def witness(raylet: str, head: str, *open_files: int) -> Iterator[None]:
    """Watch this process as long as this context lasts. The files stay open until the witness has said its word."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-I", "-S", __file__, str(theirs.fileno()), raylet, head]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno(), *open_files],
        start_new_session=True,  # Ctrl-C is for the driver
    )
    theirs.close()
    try:
        yield
    finally:
        with suppress(OSError):  # it is gone
            ours.send(ALL_IS_WELL)
        ours.close()
        process.wait()


def main() -> None:
    line, raylet, head = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3]
    if line.recv(1) == ALL_IS_WELL:
        return
    host, _, port = head.rpartition(":")
    if not _answers(socket.AF_UNIX, raylet):
        print(f"error: the Ray node of this machine ended, and the run with it; {ADVICE}", file=sys.stderr)
    elif not _answers(socket.AF_INET6 if ":" in host else socket.AF_INET, (host.strip("[]"), int(port))):
        print(f"error: the cluster's head at {head} ended, and the run with it; {ADVICE}", file=sys.stderr)


def _answers(family: int, place: str | tuple[str, int]) -> bool:
    with socket.socket(family) as one:
        one.settimeout(PATIENCE)
        try:
            one.connect(place)
        except OSError:
            return False
    return True


if __name__ == "__main__":
    main()
