"""Nodes and the server as processes that are killed with -9 in a round."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from federation_nodes import Maker
from fedsieve.experiment import run
from fedsieve.experiment.export_split import export_split
from fedsieve.runs.read import read_result
from small_runs import edit, outcome

CHANGES = [
    "clients.count=2",
    "clients.fraction=1.0",
    "clients.minimum=2",
    edit("scope: client", more=", optimizer_state: carry"),
    "phases.1.rounds=12",
    "phases.1.local.epochs=4",
]
START = 60.0  # seconds that a process may take to begin


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def started(processes: ExitStack, *arguments: str) -> subprocess.Popen[bytes]:
    """A process that is killed at the end, whatever happens."""
    process = subprocess.Popen([sys.executable, "-m", "fedsieve", *arguments], stdout=subprocess.DEVNULL)
    processes.callback(process.wait)
    processes.callback(process.kill)
    return process


def until(condition: Callable[[], bool], *alive: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + START
    while not condition():
        assert time.monotonic() < ends and all(process.poll() is None for process in alive)
        time.sleep(0.01)


def test_killed_and_resumed(experiment: Maker, tmp_path: Path, backbone: Path, processes: ExitStack) -> None:
    """The server and a node are killed in a round: resumed, the run ends in the simulation's model."""
    expected = run(experiment(*CHANGES), tmp_path / "simulated")
    export_split(experiment(*CHANGES), tmp_path / "shards")
    sockets = Path(processes.enter_context(tempfile.TemporaryDirectory(prefix="nodes")))
    out, file = tmp_path / "federated", tmp_path / "experiment.yaml"

    def node(client: int) -> subprocess.Popen[bytes]:
        name = f"client-{client}"
        shard, folder = str(tmp_path / "shards" / f"{name}.npz"), str(sockets / name)
        options = ["--data", shard, "--name", name, "--folder", folder, "--backbone", str(backbone)]
        return started(processes, "node", *options)

    manifest = tmp_path / "shards" / "federation.json"
    engine = f"engine={{sockets: {{folder: {sockets}, manifest: {manifest}, wait: {START}}}}}"
    file.write_text(experiment(*CHANGES, engine).to_yaml())
    nodes = [node(0), node(1)]
    server = started(processes, "run", str(file), "--out", str(out))
    metrics = out / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 4, server, *nodes)
    os.kill(server.pid, signal.SIGKILL)
    os.kill(nodes[1].pid, signal.SIGKILL)
    for process in (server, nodes[1]):
        process.wait()
    assert not (out / "result.json").exists()
    assert list((sockets / "client-1" / "runs").glob("*/clients/edit/*"))  # what it remembers
    nodes[1] = node(1)
    again = started(processes, "run", str(file), "--out", str(out), "--resume")
    assert again.wait(START) == 0
    assert outcome(out, read_result(out)) == outcome(tmp_path / "simulated", expected)
    assert not list(sockets.glob("*/runs/*"))
    for process in nodes:
        process.terminate()
        assert process.wait(START) == 0
    assert not list(sockets.glob("*/node.sock"))
