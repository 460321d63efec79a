"""Clients on a real Ray cluster of two nodes on this machine: the same bits as here, whatever becomes of nodes."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import fedsieve
from fedsieve.config.schema import Experiment
from fedsieve.engine import pace
from fedsieve.engine.actor_pool import Actor
from fedsieve.engine.dispatch import Ticket
from fedsieve.engine.ray_engine import RayEngine
from fedsieve.errors import InputError
from fedsieve.experiment import run
from fedsieve.runs.read import read_result
from listeners import Listener
from ray_cluster import SECURITY, RayCluster, processes_below
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
        assert not one.folder.exists() and not processes_below(one.folder)


@pytest.fixture
def two_nodes(cluster: RayCluster) -> RayCluster:
    """The cluster, with its second node, which an earlier test may have killed."""
    cluster.restore()
    return cluster


@pytest.fixture
def by_actors(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """All jobs are done by actors, all of which are ready before the first one; how many at each node."""
    made, answered, done = RayEngine.__init__, RayEngine._answered, Counter[str]()

    def wait_first(self: RayEngine, *arguments: object) -> None:
        made(self, *arguments)
        self.wait()

    def counted(self: RayEngine, actor: Actor, answer: object) -> None:
        done[actor.node.id] += 1
        answered(self, actor, answer)

    monkeypatch.setattr(RayEngine, "__init__", wait_first)
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
    settings = experiment(*changes, *on(two_nodes))
    after_planning(lambda: plugin.write_text("raise SystemExit('this is another machine')", encoding="utf-8"))
    assert run(settings, tmp_path / "two")["model_sha256"] == expected and len(by_actors) == 2


# -------------------------------------------------------------------------------- nodes come and go


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[RayEngine]:
    """The engines that were made."""
    made, all_made = RayEngine.__init__, list[RayEngine]()

    def remembered(self: RayEngine, *arguments: object) -> None:
        all_made.append(self)
        made(self, *arguments)

    monkeypatch.setattr(RayEngine, "__init__", remembered)
    return all_made


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
    result = run(experiment(*changes, *on(two_nodes)), tmp_path / "two", callback=listener)
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

    changes += [*on(two_nodes), "workers=6"]
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

    with subprocess.Popen(command(out, *on(two_nodes)), stdout=subprocess.DEVNULL) as process:
        try:
            while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_bytes().count(b"\n") < 3:
                assert process.poll() is None, "the run ended before it could be killed"
                time.sleep(0.01)
        finally:
            process.kill()
    assert not (out / "result.json").exists()
    shutil.copytree(out, tmp_path / "here")
    for folder, engine in ((out, on(two_nodes)), (tmp_path / "here", [])):
        subprocess.run(command(folder, *engine), check=True, stdout=subprocess.DEVNULL)
        assert outcome(folder, read_result(folder)) == outcome(tmp_path / "whole", expected)


# -------------------------------------------------------------------------------- nodes that do not fit


@pytest.fixture
def after_planning(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have something happen once the driver has read all that it needs, before any node does."""
    made = RayEngine.__init__

    def install(then: Callable[[], object]) -> None:
        def changed(self: RayEngine, *arguments: object) -> None:
            then()
            made(self, *arguments)

        monkeypatch.setattr(RayEngine, "__init__", changed)

    return install


@pytest.mark.parametrize("what", ["missing", "other"])
def test_data_that_nodes_lack(
    what: str, experiment: Maker, images: Path, tmp_path: Path, two_nodes: RayCluster, after_planning: Callable
) -> None:
    """The node is named; then the driver sends them."""
    copy = Path(shutil.copy(images, tmp_path / "copy.npz"))
    changes = [f"data.path={copy}", *on(two_nodes)]

    def change() -> None:
        copy.unlink(missing_ok=True)
        if what == "other":
            arrays = dict(np.load(images))
            np.savez(copy, **(arrays | {"x_train": arrays["x_train"] // 2}))

    after_planning(change)
    with pytest.raises(InputError) as error:
        run(experiment(*changes), tmp_path / "run")
    assert "(127.0.0.2, " in str(error.value) and "send_data: true" in str(error.value)
    assert {"missing": "copy.npz", "other": "its data are not the driver's"}[what] in str(error.value)
    assert not (tmp_path / "run").exists()


def test_data_that_the_driver_sends(
    experiment: Maker,
    images: Path,
    tmp_path: Path,
    two_nodes: RayCluster,
    by_actors: Counter[str],
    after_planning: Callable,
) -> None:
    copy = Path(shutil.copy(images, tmp_path / "copy.npz"))
    expected = run(experiment(f"data.path={images}"), tmp_path / "one")["model_sha256"]
    after_planning(copy.unlink)
    changes = [f"data.path={copy}", *on(two_nodes, "send_data: true")]
    assert run(experiment(*changes), tmp_path / "two")["model_sha256"] == expected and len(by_actors) == 2


@pytest.fixture
def third(two_nodes: RayCluster) -> Iterator[Callable[..., str]]:
    """Add a third node for a test."""
    added = list[str]()

    def add(**environment: str) -> str:
        added.append(two_nodes.add(**environment))
        return added[-1]

    yield add
    for node in added:
        two_nodes.kill(node)


def other_fedsieve(folder: Path) -> Path:
    """A copy of the package with one more line in it, in a folder."""
    package = Path(fedsieve.__file__).parent
    copy = shutil.copytree(package, folder / "fedsieve", ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "phase.py").open("a", encoding="utf-8") as file:
        file.write("\n# one more line\n")
    return folder


def other_torch(folder: Path) -> Path:
    """The installed torch, under another version, in a folder."""
    package = Path(torch.__file__).parent
    (folder / "torch").mkdir(parents=True)
    for path in package.iterdir():
        if path.name not in ("version.py", "__pycache__"):
            (folder / "torch" / path.name).symlink_to(path)
    text = (package / "version.py").read_text(encoding="utf-8")
    (folder / "torch" / "version.py").write_text(text.replace(torch.__version__, "2.99.0"), encoding="utf-8")
    return folder


def older_fedsieve(folder: Path) -> Path:
    """A copy of the package that does not know a setting of today."""
    schema = other_fedsieve(folder) / "fedsieve" / "config" / "schema.py"
    text = schema.read_text(encoding="utf-8")
    assert "    compile: bool" in text
    schema.write_text(text.replace("    compile: bool", "    compile_: bool"), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (other_fedsieve, "it has fedsieve"),
        (older_fedsieve, "it has fedsieve"),
        (other_torch, "it has torch 2.99.0"),
    ],
)
def test_nodes_with_other_versions_are_named(
    make: Callable[[Path], Path],
    said: str,
    experiment: Maker,
    tmp_path: Path,
    two_nodes: RayCluster,
    third: Callable[..., str],
) -> None:
    node = third(PYTHONPATH=str(make(tmp_path / "other")))
    with pytest.raises(InputError) as error:
        run(experiment(*on(two_nodes), "workers=3"), tmp_path / "run")
    assert f"{node[:6]}): {said}" in str(error.value) and "install the same" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_nodes_with_other_bits_are_not_used_unless_asked_for(
    experiment: Maker, tmp_path: Path, two_nodes: RayCluster, third: Callable[..., str], by_actors: Counter[str]
) -> None:
    """Another instruction set stands for another CPU."""
    node, listener = third(ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE"), Listener()
    expected = run(experiment("clients.fraction=1.0"), tmp_path / "one")["model_sha256"]
    changes = [*on(two_nodes), "workers=3", "clients.fraction=1.0"]
    result = run(experiment(*changes), tmp_path / "two", callback=listener)
    assert result["model_sha256"] == expected and node not in by_actors and len(by_actors) == 2
    assert [f"{node[:6]}) is not used: its last bits differ" in text for text in listener.warnings] == [True]
    run(experiment(*changes, "engine.ray.same_bits=false"), tmp_path / "three")
    assert by_actors[node]


def test_a_node_that_fits_is_looked_for(experiment: Maker, tmp_path: Path, two_nodes: RayCluster) -> None:
    """One actor is wanted, and the node with most room has other bits."""
    large, listener = two_nodes.add(cpus=3, ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE"), Listener()
    expected = run(experiment(), tmp_path / "one")["model_sha256"]
    result = run(experiment(*on(two_nodes), "workers=1"), tmp_path / "two", callback=listener)
    two_nodes.kill(large)
    assert result["model_sha256"] == expected and f"{large[:6]}) is not used" in listener.warnings[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["engine.ray.gpus_per_client=0.5", "device=cuda"],
            "gpus_per_client: 0.5 is asked for, and the node with most GPUs has 0",
        ),
        (["threads=3"], "each actor takes 3 CPUs, and the node with most has 1"),
    ],
)
def test_more_than_any_node_has(
    changes: list[str], said: str, experiment: Maker, tmp_path: Path, two_nodes: RayCluster
) -> None:
    with pytest.raises(InputError, match=said):
        run(experiment(*on(two_nodes), *changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_token(file: Path, two_nodes: RayCluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedsieve", "run", str(file), *on(two_nodes), "--out", str(tmp_path / "run")]
    env = {**os.environ, **SECURITY, "RAY_AUTH_TOKEN": "f" * 64}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=15)
    assert done.returncode == 2 and done.stderr.startswith("error: engine.ray.address: 127.0.0.2:")
    assert "it asks for another token" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_check_tells_of_each_node(
    file: Path, images: Path, tmp_path: Path, two_nodes: RayCluster, third: Callable[..., str]
) -> None:
    other = third(PYTHONPATH=str(other_fedsieve(tmp_path / "other")))
    command = [sys.executable, "-m", "fedsieve", "cluster", "check", str(file), "--address", two_nodes.address]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    nodes = {node["name"][-7:-1]: node for node in json.loads(done.stdout)}
    assert done.returncode == 1 and done.stderr == ""
    assert nodes.keys() == {id[:6] for id in (two_nodes.head, two_nodes.other, other)}
    for id in (two_nodes.head, two_nodes.other):
        node = nodes[id[:6]]
        assert node["is_usable"] and node["is_same"] and node["has_data"] and node["megabytes_per_second"] > 1
        assert node["facts"]["torch"] == torch.__version__ and node["room"] == 1
    assert "install the same" in nodes[other[:6]]["problem"] and nodes[other[:6]]["megabytes_per_second"] is None

    shown = subprocess.run([*command[:-1], two_nodes.address], capture_output=True, text=True).stdout
    assert f"{other[:6]}) is not used: it has fedsieve" in shown and torch.__version__ in shown
