"""A federation on this machine: a SuperLink, and a node and a relay for each client. To try one, and for tests.

All are processes as on real machines, with certificates and keys. They end with the process that started them, however
that ends, and their folder goes with them.
"""

import ctypes
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fedsieve.data.manifest import MANIFEST, read_federation
from fedsieve.errors import RunError
from fedsieve.federation.keys import make_key
from fedsieve.federation.superlink_folder import SuperLinkFolder

HOST = "127.0.0.1"
DIES_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
LIMIT = 60.0  # seconds until a process must be ready
FAREWELL = 5.0  # seconds that processes have to end by themselves
PLACE = "/tmp"  # a short name: sockets lie below it, whose paths are short
# Deletes a folder when the process that holds the other end of its stdin is gone, and so are those that it started.
JANITOR = "import shutil, sys, time; sys.stdin.read(); time.sleep(0.5); shutil.rmtree(sys.argv[1], ignore_errors=True)"


class Loopback:
    """`shards` is what `fedsieve split --export` has written; everything else goes to a temporary folder."""

    def __init__(self, shards: Path, insecure: bool = False) -> None:
        self.shards, self.insecure = shards, insecure
        self.folder = folder = Path(tempfile.mkdtemp(prefix="fedsieve-", dir=PLACE))
        self._janitor = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", JANITOR, str(folder)], stdin=subprocess.PIPE, start_new_session=True
        )
        self.manifest = shards / MANIFEST
        self.clients = {one.name: shards / str(one.file) for one in read_federation(self.manifest).clients}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports = free_ports(2)  # for nodes, for the server
        for name in ("keys", "nodes", "said"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.superlink = SuperLinkFolder.make(folder / "superlink", [HOST, "localhost"])
        for name in self.clients:
            self.superlink.add(make_key(folder / "keys" / name))

    @property
    def engine(self) -> str:
        """A change to an experiment, so that it runs here."""
        where = f"folder: {self.superlink.path}, superlink: '{HOST}:{self.ports[1]}', manifest: {self.manifest}"
        return f"engine={{flower: {{{where}, wait: 60}}}}"

    @property
    def place(self) -> str:
        """Where relays find the SuperLink."""
        return f"{HOST}:{self.ports[0]}"

    # Processes, by name.

    def start(self) -> None:
        """Start all, and wait until they are ready."""
        self.start_superlink()
        self.start_nodes(self.clients)
        self.start_relays(self.clients)

    def start_superlink(self) -> None:
        nodes, server = map(str, self.ports)
        how = ["--insecure"] if self.insecure else []
        ports = ["--port", nodes, "--server-port", server]
        self.start_process("superlink", "superlink", "start", str(self.superlink.path), *ports, *how)
        self.wait_for("superlink", "nodes at")

    def start_nodes(self, names: Iterable[str], *options: str) -> None:
        names = list(names)
        for name in names:
            place = str(self.folder / "nodes" / name)
            data = str(self.clients[name])
            self.start_process(f"node {name}", "node", "--data", data, "--name", name, "--folder", place, *options)
        for name in names:
            self.wait_for(f"node {name}", "ready at")

    def start_relays(self, names: Iterable[str]) -> None:
        names = list(names)
        for name in names:
            how = ["--ca", str(self.superlink.files[0]), "--key", str(self.folder / "keys" / name)]
            how = ["--insecure"] if self.insecure else how
            node = str(self.folder / "nodes" / name)
            self.start_process(f"relay {name}", "relay", "start", "--superlink", self.place, "--node", node, *how)
        for name in names:
            self.wait_for(f"relay {name}", "connected")

    def start_process(self, name: str, *arguments: str) -> None:
        with self.said(name).open("ab") as said:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "fedsieve", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                preexec_fn=_die_with_parent,
                start_new_session=True,  # Ctrl-C is for the process that started them, which ends them
            )

    def said(self, name: str) -> Path:
        """The file with what a process says."""
        return self.folder / "said" / f"{name.replace(' ', '-')}.log"

    def wait_for(self, name: str, text: str) -> None:
        """Until a process has said a text, since it was started; RunError if it ends before."""
        until, process, path = time.monotonic() + LIMIT, self.processes[name], self.said(name)
        while text not in (said := path.read_text(encoding="utf-8", errors="replace")):
            if process.poll() is not None or time.monotonic() > until:
                raise RunError(f"{name} did not start: {said.strip()[-300:] or 'it said nothing'}")
            time.sleep(0.05)

    def kill(self, *names: str) -> None:
        """End processes at once, as a power cut would."""
        for name in names:
            process = self.processes.pop(name)
            process.kill()
            process.wait()
            self.said(name).rename(self.said(f"{name} {process.pid}"))  # the next one of this name begins anew

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        until = time.monotonic() + FAREWELL
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()
        self.processes.clear()
        self._janitor.communicate()

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Ports at which nobody listens."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
