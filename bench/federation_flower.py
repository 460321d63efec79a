"""A deployment of Flower on this machine, for bench/federation.py: its own commands, with TLS and registered keys.

A SuperLink, a SuperNode for each client, and `flwr run` of the app in federation_app.py. Everything lies in a temporary
folder, FLWR_HOME too. All processes end with the bench, however it ends (federation_guard.py).
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fedsieve.federation.keys import make_key
from fedsieve.federation.loopback import DIES_WITH_PARENT, HOST, free_ports
from fedsieve.federation.superlink_folder import SuperLinkFolder

LIMIT = 60.0  # seconds until a process must be ready
CONNECTION = "bench"
PROJECT = """
[project]
name = "noop"
version = "1.0.0"
description = "Rounds without training"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "bench"

[tool.flwr.app.components]
serverapp = "federation_app:server"
clientapp = "federation_app:client"

[tool.flwr.app.config]
"""


class Flower:
    """A SuperLink and SuperNodes, as their manual has it."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, nodes
        self.processes: dict[str, int] = {}  # by name
        self.guard = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("federation_guard.py"), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the bench
        )
        self.keys = SuperLinkFolder.make(folder / "keys", [HOST, "localhost"])
        self.port, *self.runtimes = free_ports(1 + nodes)
        config = folder / "home" / "config.toml"
        config.parent.mkdir()
        config.write_text(
            f"[superlink]\ndefault = '{CONNECTION}'\n\n[superlink.{CONNECTION}]\n"
            f"address = '{HOST}:{self.port}'\nroot-certificates = '{self.keys.files[0]}'\n"
        )

    def start(self) -> None:
        """Start all, and wait until they are ready."""
        ca, certificate, key = map(str, self.keys.files)
        tls = ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
        where = ["--host", HOST, "--port", str(self.port)]
        alone = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        self.begin("superlink", "flower-superlink", *where, *tls, *alone)
        self.wait_for("superlink", "Uvicorn running")
        for node, port in enumerate(self.runtimes):
            name = f"node-{node}"
            public = make_key(self.folder / name)
            self.call("flwr", "supernode", "register", str(public), CONNECTION, "--name", name)
            self.begin(
                name,
                *("flower-supernode", "--superlink", f"{HOST}:{self.port}", "--root-certificates", ca),
                *("--auth-supernode-private-key", str(self.folder / name), "--host", HOST, "--port", str(port)),
                *("--node-config", f"partition-id={node}"),
            )
        for node in range(self.nodes):
            self.wait_for(f"node-{node}", "SuperNode ID")

    def run(self, rounds: int, seconds: float, **settings: Any) -> list[float]:
        """The seconds of each round of the app; it has so many seconds for all."""
        app, log = self.folder / "app", self.folder / "rounds.jsonl"
        app.mkdir()
        shutil.copy(Path(__file__).with_name("federation_app.py"), app)
        known = {**settings, "rounds": rounds, "nodes": self.nodes, "log": str(log)}
        lines = [f"{name} = {json.dumps(value)}" for name, value in known.items()]
        (app / "pyproject.toml").write_text(PROJECT + "\n".join(lines) + "\n")
        self.call("flwr", "run", str(app), CONNECTION)
        until = time.monotonic() + seconds
        while not (said := lines_of(log)) or not said[-1].get("done"):
            if time.monotonic() > until or not all(map(self.is_there, self.processes)):
                raise SystemExit(f"Flower's run did not end; its SuperLink said:\n{self.said('superlink')[-4000:]}")
            time.sleep(0.2)
        done = [one for one in said if "round" in one]
        if [one["clients"] for one in done] != [self.nodes] * rounds:
            raise SystemExit(f"not all of Flower's clients replied: {done}")
        return [one["seconds"] for one in done]

    # Processes, by name.

    def environment(self, name: str) -> dict[str, str]:
        commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        home = str(self.folder / ("home" if name in ("superlink", "flwr") else f"home-{name}"))
        return {**os.environ, "PATH": commands, "FLWR_HOME": home} | {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }

    def call(self, *command: str) -> None:
        done = subprocess.run(
            command,
            env=(environment := self.environment("flwr")),
            executable=shutil.which(command[0], path=environment["PATH"]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            preexec_fn=_die_with_parent,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")

    def begin(self, name: str, *command: str) -> None:
        environment = self.environment(name)
        program = shutil.which(command[0], path=environment["PATH"])
        about = {"command": [program, *command[1:]], "environment": environment, "said": str(self.log_of(name))}
        assert self.guard.stdin is not None and self.guard.stdout is not None
        print(json.dumps(about), file=self.guard.stdin, flush=True)
        self.processes[name] = int(self.guard.stdout.readline())

    def is_there(self, name: str) -> bool:
        """Whether a process has not ended."""
        status = Path(f"/proc/{self.processes[name]}/status")
        return status.exists() and "State:\tZ" not in status.read_text()

    def log_of(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def said(self, name: str) -> str:
        return self.log_of(name).read_text(encoding="utf-8", errors="replace")

    def wait_for(self, name: str, text: str) -> None:
        until = time.monotonic() + LIMIT
        while text not in self.said(name):
            if not self.is_there(name) or time.monotonic() > until:
                raise SystemExit(f"{name} did not start:\n{self.said(name)[-4000:]}")
            time.sleep(0.1)

    def close(self) -> None:
        """End all processes; the folder is deleted."""
        self.guard.communicate()


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Whole lines of JSON in a file that may still be written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
