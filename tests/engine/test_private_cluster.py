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

from ray_cluster import processes_below

pytest.importorskip("ray", reason="needs Ray: pip install 'fedsieve[ray]'")
pytestmark = pytest.mark.engines


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where clusters make their folders."""
    folder = Path(tempfile.mkdtemp(prefix="fst-", dir="/tmp"))  # short: it holds sockets
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def is_left(place: Path) -> bool:
    return any(place.iterdir()) or bool(processes_below(place / "fedsieve-"))


def ends_soon(place: Path) -> bool:
    """Processes need a moment to end."""
    until = time.monotonic() + 10
    while is_left(place) and time.monotonic() < until:
        time.sleep(0.1)
    return not is_left(place)


@pytest.mark.parametrize(("how", "code"), [("SIGKILL", -9), ("SIGINT", 130), ("SIGTERM", -15)])
def test_a_private_cluster_ends_with_its_driver(how: str, code: int, file: Path, tmp_path: Path, place: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "fedsieve", "run", str(file), "engine={ray: {}}", "phases.1.rounds=1000"]
    process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not (out / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    (folder,) = place.iterdir()
    assert len(processes_below(folder)) > 3
    process.send_signal(getattr(signal, how))
    _, said = process.communicate(timeout=20)
    assert process.returncode == code
    assert said.count(b"\n") == (how == "SIGINT")  # the advice to resume
    assert ends_soon(place)


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
    (folder,) = (path for path in place.iterdir() if path.is_dir())
    folder.with_suffix(".log").unlink()
    assert ends_soon(place)
