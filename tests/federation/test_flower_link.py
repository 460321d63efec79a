"""Runs over Flower, with TLS and keys: the same bits as a simulation, whatever is killed meanwhile."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fedsieve.errors import RunError
from fedsieve.experiment import run
from fedsieve.runs.read import read_metrics, read_result
from flower_here import Acting, FlowerHere
from listeners import Listener
from small_runs import edit, outcome

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedsieve[flower]'")
pytestmark = pytest.mark.engines

CASES = {
    "dense, evaluated at clients": ["clients.holdout=0.2", "evaluate.clients=true", "evaluate.keep=best"],
    "each client's mask, carried momentum": [edit("scope: client", more=", optimizer_state: carry")],
    "a mask from everybody, each round": [edit("scope: federated, refresh: round, unit: row")],
    "SCAFFOLD": ["phases.1.method=scaffold", "phases.1.local.momentum=0"],
    "8 bits with error feedback": [edit("scope: client"), "wire.values=int8"],
    "in secret": [edit("scope: federated"), "clients.secure=zero_sum"],
    "ridge, mixing": ["model.head={ridge: {penalty: 1.0}}", "phases.*.method={fisher_mixing: {fisher: {samples: 20}}}"],
}
REMEMBERS = [edit("scope: client", more=", optimizer_state: carry"), "phases.1.rounds=5", "wire.values=int8"]


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_the_same_bits_as_a_simulation(changes: list[str], flower: FlowerHere, tmp_path: Path) -> None:
    here, there = Listener(), Listener()
    one = run(flower.experiment("clients.count=5", "clients.fraction=1.0", *changes), tmp_path / "one", callback=here)
    two = run(flower.settings(*changes), tmp_path / "two", callback=there)
    assert outcome(tmp_path / "one", one) == outcome(tmp_path / "two", two)
    assert sorted(here.notes) == sorted(there.notes) and not there.warnings


def test_numbers_by_the_order_of_coming(flower: FlowerHere, tmp_path: Path) -> None:
    """Without a manifest the server has no images, so there are no scores, and it knows nodes by their names."""
    settings = flower.settings("data.normalize=imagenet", "data.validation=0", manifest=False)
    result = run(settings, tmp_path / "run")
    assert result["test_accuracy"] is None and result["bytes_up"] > 0
    roster = (tmp_path / "run" / "roster.json").read_text()
    assert all(name in roster for name in flower.names)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU is the plain one")
def test_a_node_with_another_kind_of_cpu_is_told_of_and_used(
    flower: FlowerHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flower.loopback.kill("node client-1")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    flower.start_nodes("client-1")
    listener = Acting({})
    run(flower.settings(), tmp_path / "run", callback=listener)
    assert [line["failed"] for line in listener.lines] == 5 * [{}]
    assert len(listener.warnings) == 1
    assert listener.warnings[0].startswith("node client-1 computes other last bits than the server (there")
    flower.loopback.kill("node client-1")


# -------------------------------------------------------------------------------- what goes wrong meanwhile


def test_a_node_is_killed_in_a_round_and_comes_back(flower: FlowerHere, tmp_path: Path) -> None:
    """It is left out, then it gets what it lacks."""
    process = flower.loopback.processes["node client-2"]
    within = {
        (3, 0): lambda: process.send_signal(signal.SIGSTOP),  # so that it is at its job when it is killed
        (3, 1): lambda: flower.loopback.kill("node client-2"),
    }
    listener = Acting({4: lambda: flower.start_nodes("client-2")}, within)
    run(flower.settings(*REMEMBERS), tmp_path / "run", callback=listener)
    assert [sorted(line["failed"]) for line in listener.lines] == [[], [], [2], [2], [], []]
    assert [line["failed"][2].partition(" (")[0] for line in listener.lines[2:4]] == 2 * [
        "the relay does not reach the node"
    ]
    assert any("client 2 was left out" in warning for warning in listener.warnings)


def test_a_node_that_hangs_is_left_out_until_it_goes_on(flower: FlowerHere, tmp_path: Path) -> None:
    process = flower.loopback.processes["node client-1"]
    listener = Acting(
        {
            2: lambda: process.send_signal(signal.SIGSTOP),
            3: lambda: process.send_signal(signal.SIGCONT),
        }
    )
    run(flower.settings("phases.1.rounds=4", timeout=8), tmp_path / "run", callback=listener)
    assert [sorted(line["failed"]) for line in listener.lines[:3]] == [[], [], [1]]
    assert "did not reply within 8 s" in listener.lines[2]["failed"][1] and not listener.lines[-1]["failed"]


def test_a_relay_that_is_killed_and_started_again(flower: FlowerHere, tmp_path: Path) -> None:
    """The SuperLink has to notice first that the earlier one is gone; then the run goes on as if nothing had been."""
    expected = flower.simulated(tmp_path / "one", *REMEMBERS)

    def again() -> None:
        flower.loopback.kill("relay client-3")
        flower.loopback.start_relays(["client-3"])

    two = run(flower.settings(*REMEMBERS), tmp_path / "two", callback=Acting({3: again}))
    assert outcome(tmp_path / "one", expected) == outcome(tmp_path / "two", two)


def test_the_superlink_is_killed_and_started_again_in_a_round(flower: FlowerHere, tmp_path: Path) -> None:
    """What is under way is asked for again: nodes have the reply still, and the run goes on as if nothing had been."""
    expected = flower.simulated(tmp_path / "one", *REMEMBERS)
    process = flower.loopback.processes["node client-2"]

    def again() -> None:
        flower.loopback.kill("superlink")
        flower.loopback.start_superlink()
        process.send_signal(signal.SIGCONT)

    within = {(3, 0): lambda: process.send_signal(signal.SIGSTOP), (3, 1): again}
    two = run(flower.settings(*REMEMBERS), tmp_path / "two", callback=Acting({}, within))
    assert outcome(tmp_path / "one", expected) == outcome(tmp_path / "two", two)


def test_the_superlink_is_gone_for_good(flower: FlowerHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends with one line, and goes on once there is a SuperLink again."""
    from fedsieve.federation import flower_link

    monkeypatch.setattr(flower_link, "PATIENCE", 1.0)
    expected = flower.simulated(tmp_path / "one", *REMEMBERS)
    listener = Acting({4: lambda: flower.loopback.kill("superlink")})
    with pytest.raises(
        RunError, match=r"the SuperLink at 127\.0\.0\.1:\d+ does not answer .* `fedsieve superlink start"
    ):
        run(flower.settings(*REMEMBERS), tmp_path / "two", callback=listener)
    flower.restore()
    two = run(flower.settings(*REMEMBERS), tmp_path / "two", resume=True)
    assert outcome(tmp_path / "one", expected) == outcome(tmp_path / "two", two)


def test_the_server_is_killed_and_resumed(flower: FlowerHere, tmp_path: Path) -> None:
    """What nodes remember belongs to the server's last checkpoint."""
    expected = flower.simulated(tmp_path / "one", *REMEMBERS)
    file, out = tmp_path / "experiment.yaml", tmp_path / "two"
    file.write_text(flower.settings(*REMEMBERS).to_yaml())
    command = [sys.executable, "-m", "fedsieve", "run", str(file), "--out", str(out), "--resume"]
    for rounds in (2, 4):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                while _lines(out) < rounds:
                    assert process.poll() is None, "the run ended before it could be killed"
                    time.sleep(0.01)
            finally:
                process.kill()
    assert not (out / "result.json").exists()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert outcome(tmp_path / "one", expected) == outcome(out, read_result(out))


def _lines(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def test_in_secret_a_round_is_done_again_without_a_node_that_is_killed(flower: FlowerHere, tmp_path: Path) -> None:
    """Each attempt has new keys; the sum is that of the four who are left."""
    process = flower.loopback.processes["node client-2"]
    within = {
        (3, 0): lambda: process.send_signal(signal.SIGSTOP),
        (3, 1): lambda: flower.loopback.kill("node client-2"),
    }
    listener = Acting({}, within)
    run(flower.settings("clients.secure=zero_sum", "phases.0.rounds=4"), tmp_path / "run", callback=listener)
    assert [sorted(line["failed"]) for line in listener.lines] == [[], [], *4 * [[2]]]
    assert listener.lines[2]["bytes_up"] > 1.5 * listener.lines[3]["bytes_up"]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="needs root, to make a small disk")
def test_a_node_whose_disk_is_full(flower: FlowerHere, tmp_path: Path) -> None:
    """It cannot keep what it should remember, so it is left out, with the reason; the others go on."""
    name, folder = "client-4", flower.loopback.folder / "nodes" / "client-4"
    flower.loopback.kill(f"node {name}")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("no small disk can be made here")
    try:
        flower.start_nodes(name)
        run(flower.settings(*REMEMBERS), tmp_path / "run")
        lines = read_metrics(tmp_path / "run")
        assert [sorted(line["failed"]) for line in lines] == [[], *5 * [["4"]]]
        assert "No space left" in lines[1]["failed"]["4"]
    finally:
        flower.loopback.kill(f"node {name}")
        subprocess.run(["umount", str(folder)], check=True)
