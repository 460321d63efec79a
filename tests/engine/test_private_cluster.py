"""Clusters that are started for one run, or for tests, leave nothing behind, however it ends."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_cluster import commands_below, processes_below

pytest.importorskip("ray", reason="needs Ray: pip install 'fedsieve[ray]'")
pytestmark = pytest.mark.engines
LONG = ["phases.0.rounds=1", "phases.1.rounds=1000", "phases.1.local.steps=100"]  # shorter jobs are done by the driver


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where clusters make their folders."""
    folder = Path(tempfile.mkdtemp(prefix="fst-", dir="/tmp"))  # short: it holds sockets
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def process(file: Path, tmp_path: Path, place: Path) -> Iterator[subprocess.Popen]:
    """A run on a private cluster, after its first round."""
    command = [sys.executable, "-m", "fedsieve", "run", str(file), "engine={ray: {}}", *LONG]
    out = tmp_path / "run"
    with subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            while not (out / "metrics.jsonl").exists():
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


def is_left(place: Path) -> bool:
    return any(place.iterdir()) or bool(processes_below(place / "fedsieve-"))


def ends_soon(place: Path) -> bool:
    """Processes need a moment to end."""
    until = time.monotonic() + 10
    while is_left(place) and time.monotonic() < until:
        time.sleep(0.1)
    return not is_left(place)


@pytest.mark.parametrize(("how", "code"), [("SIGKILL", -9), ("SIGINT", 130), ("SIGTERM", -15)])
def test_a_private_cluster_ends_with_its_driver(how: str, code: int, process: subprocess.Popen, place: Path) -> None:
    (folder,) = place.iterdir()
    assert len(processes_below(folder)) > 3
    process.send_signal(getattr(signal, how))
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.count(b"\n") == (how == "SIGINT")  # the advice to resume
    assert ends_soon(place)


def test_a_run_says_why_when_its_node_dies(process: subprocess.Popen, place: Path) -> None:
    """Ray ends the driver without a word."""
    (folder,) = place.iterdir()
    (raylet,) = (pid for pid, command in commands_below(folder).items() if "/raylet/raylet " in command)
    os.kill(raylet, signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and said.startswith(b"error: the Ray node of this machine ended")
    assert b"--resume" in said and said.count(b"\n") == 1 and ends_soon(place)


USES_RAY_ITSELF = """
import os, signal, sys, yaml
import fedsieve, ray
before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
with open(sys.argv[1]) as file:
    settings = yaml.safe_load(file)
fedsieve.run({**settings, "engine": {"ray": {}}}, sys.argv[2], progress=False)
assert signal.getsignal(signal.SIGTERM) is handler
changed = {key for key in os.environ if key.startswith("RAY_") and os.environ[key] != before.get(key)}
assert changed <= {"RAY_CLIENT_MODE"}, changed  # by importing Ray
ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")
assert ray.get(ray.remote(lambda: 1).remote()) == 1
ray.shutdown()
"""


def test_the_process_can_use_ray_for_itself_afterwards(file: Path, tmp_path: Path, place: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(USES_RAY_ITSELF, encoding="utf-8")
    done = subprocess.run([sys.executable, script, file, tmp_path / "run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_on_a_private_cluster_ends_as_one_without(file: Path, tmp_path: Path, place: Path) -> None:
    models = set()
    for engine in ("local", "{ray: {}}"):
        command = [sys.executable, "-m", "fedsieve", "run", str(file), f"engine={engine}", "workers=2"]
        done = subprocess.run([*command, "--out", str(tmp_path / engine)], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        models.add((tmp_path / engine / "model.safetensors").read_bytes())
        assert not is_left(place)
    assert len(models) == 1


def test_a_cluster_for_tests_ends_with_them(place: Path) -> None:
    killed = "import os; from ray_cluster import RayCluster; RayCluster(); os.kill(os.getpid(), 9)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", killed], env=environment).returncode == -9
    assert ends_soon(place)
