"""Clients on a real Ray cluster of two nodes on this machine: the same bits as here, whatever becomes of nodes."""

import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsieve.config.schema import Experiment
from fedsieve.engine.actor_pool import Actor
from fedsieve.engine.dispatch import Ticket
from fedsieve.engine.ray_engine import RayEngine
from fedsieve.experiment import run
from fedsieve.runs.read import read_result
from listeners import Listener
from ray_cluster import RayCluster
from small_runs import edit, outcome

pytest.importorskip("ray", reason="needs Ray: pip install 'fedsieve[ray]'")
pytestmark = pytest.mark.engines

Maker = Callable[..., Experiment]

CASES = {
    "dense, evaluated at clients": [
        "clients.fraction=1.0",
        "clients.holdout=0.2",
        "evaluate.clients=true",
        "evaluate.keep=best",
    ],
    "each client's mask, 8 bits, carried momentum, failures": [
        edit("scope: client", more=", optimizer_state: carry"),
        "wire.values=int8",
        "clients.fail_rate=0.3",
        "clients.fraction=1.0",
    ],
    "the server's mask": [edit("scope: server")],
    "a mask from everybody, each round": [
        edit("scope: federated, refresh: round, unit: row"),
        "clients.select={high_loss: {candidates: 5}}",
    ],
    "SCAFFOLD": ["phases.1.method=scaffold", "phases.1.local.momentum=0", "clients.fraction=1.0"],
    "in secret": [edit("scope: federated"), "clients.secure=zero_sum"],
    "ridge, mixing, cached tokens": [
        "model.head={ridge: {penalty: 1.0}}",
        "phases.1.train={blocks: [2]}",
        "phases.1.local.steps=20",
        "phases.*.method={fisher_mixing: {fisher: {samples: 20}}}",
    ],
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_two_nodes_make_no_difference(
    changes: list[str], experiment: Maker, tmp_path: Path, two_nodes: RayCluster, by_actors: Counter[str]
) -> None:
    here, there = Listener(), Listener()
    one = run(experiment(*changes), tmp_path / "one", callback=here)
    assert not by_actors
    two = run(experiment(*changes, *two_nodes.engine()), tmp_path / "two", callback=there)
    assert by_actors.keys() == {two_nodes.head, two_nodes.other} and by_actors.total() > 10
    assert outcome(tmp_path / "one", one) == outcome(tmp_path / "two", two)
    assert sorted(here.notes) == sorted(there.notes)
    assert here.warnings == there.warnings


ALTERNATING = """
import fedsieve
import torch

@fedsieve.rule
def alternating(evidence):
    return (torch.arange(evidence.weights.numel()) % 2).float().view(evidence.weights.shape)
"""


def test_a_plugin_is_used_by_actors_that_cannot_read_its_file(
    experiment: Maker, tmp_path: Path, two_nodes: RayCluster, by_actors: Counter[str], after_planning: Callable
) -> None:
    plugin = tmp_path / "alternating.py"
    plugin.write_text(ALTERNATING, encoding="utf-8")
    changes = [f"plugins=[{plugin}]", edit("rule: alternating, scope: client"), "clients.fraction=1.0"]
    expected = run(experiment(*changes), tmp_path / "one")["model_sha256"]
    settings = experiment(*changes, *two_nodes.engine())
    after_planning(lambda: plugin.write_text("raise SystemExit('this is another machine')", encoding="utf-8"))
    assert run(settings, tmp_path / "two")["model_sha256"] == expected and len(by_actors) == 2


# -------------------------------------------------------------------------------- nodes come and go


def test_a_node_that_is_killed_in_a_round_and_one_that_joins(
    experiment: Maker,
    tmp_path: Path,
    two_nodes: RayCluster,
    by_actors: Counter[str],
    engines: list[RayEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second node is killed while it does a job. In a later round another one is added, and used."""
    changes = [edit("scope: client", more=", optimizer_state: carry"), "clients.fraction=1.0", "phases.1.rounds=4"]
    expected = run(experiment(*changes), tmp_path / "one")
    victim, given, joined = two_nodes.other, RayEngine._give, list[str]()

    def then_kill(self: RayEngine, actor: Actor, ticket: Ticket) -> None:
        given(self, actor, ticket)
        if by_actors[victim] >= 8 and actor.node.id == victim and two_nodes.other:
            two_nodes.kill(victim)

    class Adding(Listener):
        def round(self, line: dict) -> None:
            if line["phase"] == "edit" and line["round"] == 3:
                joined.append(two_nodes.add())
                pool = engines[0].pool
                while {actor.node.id for actor in pool.actors if actor.is_ready} != {two_nodes.head, *joined}:
                    pool.listen(None)

    monkeypatch.setattr(RayEngine, "_give", then_kill)
    listener = Adding()
    result = run(experiment(*changes, *two_nodes.engine()), tmp_path / "two", callback=listener)
    assert outcome(tmp_path / "one", expected) == outcome(tmp_path / "two", result)
    assert by_actors[victim] == 8 and by_actors[joined[0]]
    assert [f"({victim[:6]})" in text.replace("127.0.0.2, ", "") for text in listener.warnings] == [True]
    assert "what it was doing is done again" in listener.warnings[0]
    two_nodes.other = joined[0]


def test_a_node_of_idle_actors_that_dies_between_rounds(
    experiment: Maker,
    tmp_path: Path,
    two_nodes: RayCluster,
    by_actors: Counter[str],
    engines: list[RayEngine],
) -> None:
    """Actors that were idle when their node died are no reason to blame the next job."""
    changes = ["clients.fraction=0.17", "phases.0.rounds=1"]  # one client in a round
    expected = run(experiment(*changes), tmp_path / "one")["model_sha256"]
    large = two_nodes.add(cpus=4)

    class Killing(Listener):
        def round(self, line: dict) -> None:
            if line["phase"] == "head":
                engines[0].wait()
                two_nodes.kill(large)

    changes += [*two_nodes.engine(), "workers=6"]
    result = run(experiment(*changes), tmp_path / "two", callback=Killing())
    assert result["model_sha256"] == expected and by_actors.total() > by_actors[large]


def test_the_driver_is_killed_and_the_run_goes_on_with_another_engine(
    experiment: Maker, tmp_path: Path, two_nodes: RayCluster
) -> None:
    changes = [edit("scope: client", more=", optimizer_state: carry"), "clients.fraction=1.0", "phases.1.rounds=5"]
    file, out = tmp_path / "experiment.yaml", tmp_path / "killed"
    file.write_text(experiment(*changes).to_yaml())
    expected = run(experiment(*changes), tmp_path / "whole")

    def command(folder: Path, *more: str) -> list[str]:
        return [sys.executable, "-m", "fedsieve", "run", str(file), *more, "--out", str(folder), "--resume"]

    with subprocess.Popen(command(out, *two_nodes.engine()), stdout=subprocess.DEVNULL) as process:
        try:
            while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_bytes().count(b"\n") < 3:
                assert process.poll() is None, "the run ended before it could be killed"
                time.sleep(0.01)
        finally:
            process.kill()
    assert not (out / "result.json").exists()
    shutil.copytree(out, tmp_path / "here")
    for folder, engine in ((out, two_nodes.engine()), (tmp_path / "here", [])):
        subprocess.run(command(folder, *engine), check=True, stdout=subprocess.DEVNULL)
        assert outcome(folder, read_result(folder)) == outcome(tmp_path / "whole", expected)
