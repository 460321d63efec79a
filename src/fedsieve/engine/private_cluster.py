"""A Ray cluster for one process: it ends with that process, however that ends, and leaves nothing behind.

    python -m fedsieve.engine.private_cluster LIFELINE FOLDER CPUS

It is started by a process between it and the driver, because Ray's own processes may outlive a killed driver. The
process between them adopts whatever Ray leaves, ends all of it, and deletes the folder.
"""

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedsieve.errors import RunError

ADOPTS = 36  # prctl's PR_SET_CHILD_SUBREAPER
LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"  # Ray takes the usual one for the network's
ADDRESS = "ray_current_cluster"  # the file in which Ray writes it
LIMIT = 60  # seconds until it must have started
PREFIX = "fedsieve-ray-"
SOONER = {
    "RAY_free_objects_period_milliseconds": "50",  # else the store holds what was taken within the last second
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # a head on this machine that does not answer is dead
}

_token = secrets.token_hex(32)  # of this process's clusters: Ray reads it once


def settings() -> dict[str, str]:
    """Environment variables for all processes of a private cluster, with a token that nobody else has."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _token, **SOONER}


@contextmanager
def private_cluster(cpus: int) -> Iterator[tuple[str, int]]:
    """The address of a cluster of this machine, which lasts as long as this context, or the file that comes second."""
    place = os.environ.get("RAY_TMPDIR", "/tmp")  # a short one: it holds sockets, whose paths are short
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    ours, theirs = socket.socketpair()
    search = os.pathsep.join(path for path in sys.path if path)
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(folder), str(cpus)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": search, **settings()},
        start_new_session=True,  # Ctrl-C is for the driver
    )
    theirs.close()
    try:
        yield _address(keeper, folder), ours.fileno()
    finally:
        ours.close()
        keeper.wait()


def _address(keeper: subprocess.Popen[bytes], folder: Path) -> str:
    started = time.monotonic()
    while time.monotonic() < started + LIMIT:
        with suppress(OSError):
            if address := (folder / ADDRESS).read_text(encoding="utf-8").strip():
                return address
        if keeper.poll() is not None:
            break
        time.sleep(0.05)
    said = _tail(folder / "said")
    raise RunError(f"Ray did not start on this machine ({said}); use engine: local, or look at `ray start --head`")


def _tail(path: Path) -> str:
    with suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
    return "it said nothing"


def main() -> None:
    lifeline, folder, cpus = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    adopt_orphans()
    threading.Thread(target=_end_with, args=(lifeline, folder), daemon=True).start()
    options = [
        "--head",
        "--block",
        "--port=0",
        f"--node-ip-address={LOOPBACK}",
        f"--num-cpus={cpus}",
        f"--ray-client-server-port={_free_port()}",  # else a fixed one, and a second cluster could not start
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        f"--temp-dir={folder}",
    ]
    with (folder / "said").open("wb") as said:
        ray = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *options], stdout=said, stderr=said
        )
    ray.wait()
    time.sleep(1)  # until the driver has read why
    end_all(folder)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((LOOPBACK, 0))
        return one.getsockname()[1]


def _end_with(lifeline: int, folder: Path) -> None:
    os.read(lifeline, 1)  # returns when the driver closes its end, or is gone
    end_all(folder)


def adopt_orphans() -> None:
    """Processes below this one become its children when their parents end (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(ADOPTS, 1)


def end_all(folder: Path) -> None:
    """Kill all processes below this one, delete the folder, and end."""
    while children := _children(os.getpid()):
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)
    if sys.platform != "linux":
        os.killpg(0, signal.SIGKILL)  # nothing was adopted; all are in this session's group
    os._exit(0)


def _children(process: int) -> list[int]:
    """All processes below one; none where the system does not tell."""
    found = list[int]()
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            children = [int(child) for child in path.read_text().split()]
            found += [*children, *(below for child in children for below in _children(child))]
    return found


if __name__ == "__main__":
    main()
