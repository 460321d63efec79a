"""Clients on a real Ray cluster of two nodes on this machine: the same bits as here, whatever becomes of nodes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from listeners import Listener
from ray_cluster import SECURITY, RayCluster
from small_runs import edit, outcome

from fedsieve.config.schema import Experiment
from fedsieve.engine import pace
from fedsieve.engine.actor_pool import Actor
from fedsieve.engine.ray_engine import RayEngine
from fedsieve.errors import InputError
from fedsieve.experiment import read_result, run
from fedsieve.observe.callbacks import Callback

pytest.importorskip("ray", reason="needs Ray: pip install 'fedsieve[ray]'")
pytestmark = pytest.mark.engines

Maker = Callable[..., Experiment]
Running = Callable[..., dict]

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
    "SCAFFOLD": ["phases.1.method=scaffold", "clients.fraction=1.0"],
    "in secret": [edit("scope: federated"), "clients.secure=zero_sum"],
    "ridge, mixing, cached tokens": [
        "model.head={ridge: {penalty: 1.0}}",
        "phases.1.train={blocks: [2]}",
        "phases.1.local.steps=20",
        "phases.*.method={fisher_mixing: {fisher: {samples: 20}}}",
    ],
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECURITY.items():
            patch.setenv(name, value)
        one = RayCluster()
        try:
            yield one
        finally:
            one.close()


@pytest.fixture
def two_nodes(cluster: RayCluster) -> RayCluster:
    """The cluster, with its second node, which an earlier test may have killed."""
    cluster.restore()
    return cluster


@pytest.fixture
def by_actors(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """All jobs are done by actors; how many at each node."""
    answered, done = RayEngine._answered, Counter[str]()

    def counted(self: RayEngine, actor: Actor, answer: object) -> None:
        done[actor.node.id] += 1
        answered(self, actor, answer)

    monkeypatch.setattr(RayEngine, "_answered", counted)
    monkeypatch.setattr(pace, "TINY", 0.0)
    return done


def on(cluster: RayCluster, more: str = "") -> list[str]:
    return [f"engine={{ray: {{address: '{cluster.address}', {more}}}}}", "workers=2"]


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_two_nodes_make_no_difference(
    changes: list[str], experiment: Maker, tmp_path: Path, two_nodes: RayCluster, by_actors: Counter[str]
) -> None:
    here, there = Listener(), Listener()
    one = run(experiment(*changes), tmp_path / "one", callback=here)
    assert not by_actors
    two = run(experiment(*changes, *on(two_nodes)), tmp_path / "two", callback=there)
    assert by_actors.keys() == {two_nodes.head, two_nodes.other} and by_actors.total() > 10
    assert outcome(tmp_path / "one", one) == outcome(tmp_path / "two", two)
    assert sorted(here.notes) == sorted(there.notes)
    assert here.warnings == there.warnings
