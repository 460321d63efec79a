"""Nodes of a real Ray cluster on this machine that do not fit the driver are named, and not used."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fedsieve
from fedsieve.config.schema import Experiment
from fedsieve.engine.actor_pool import ActorPool
from fedsieve.engine.cluster_nodes import Node
from fedsieve.errors import InputError
from fedsieve.experiment import run
from listeners import Listener
from ray_cluster import SECURITY, RayCluster

pytest.importorskip("ray", reason="needs Ray: pip install 'fedsieve[ray]'")
pytestmark = pytest.mark.engines

Maker = Callable[..., Experiment]


@pytest.mark.parametrize("what", ["missing", "other"])
def test_data_that_nodes_lack(
    what: str, experiment: Maker, images: Path, tmp_path: Path, two_nodes: RayCluster, after_planning: Callable
) -> None:
    """The node is named; then the driver sends them."""
    copy = Path(shutil.copy(images, tmp_path / "copy.npz"))
    changes = [f"data.path={copy}", *two_nodes.engine()]

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
    changes = [f"data.path={copy}", *two_nodes.engine("send_data: true")]
    assert run(experiment(*changes), tmp_path / "two")["model_sha256"] == expected and len(by_actors) == 2


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
        run(experiment(*two_nodes.engine(), "workers=3"), tmp_path / "run")
    assert f"{node[:6]}): {said}" in str(error.value) and "install the same" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_nodes_with_other_bits_are_not_used_unless_asked_for(
    experiment: Maker, tmp_path: Path, two_nodes: RayCluster, third: Callable[..., str], by_actors: Counter[str]
) -> None:
    """Another instruction set stands for another CPU."""
    node, listener = third(ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE"), Listener()
    expected = run(experiment("clients.fraction=1.0"), tmp_path / "one")["model_sha256"]
    changes = [*two_nodes.engine(), "workers=3", "clients.fraction=1.0"]
    result = run(experiment(*changes), tmp_path / "two", callback=listener)
    assert result["model_sha256"] == expected and node not in by_actors and len(by_actors) == 2
    assert [f"{node[:6]}) is not used: its last bits differ" in text for text in listener.warnings] == [True]
    run(experiment(*changes, "engine.ray.same_bits=false"), tmp_path / "three")
    assert by_actors[node]


@pytest.mark.parametrize("deaths", [2, 3])
def test_actors_that_die_before_they_are_ready(
    deaths: int, experiment: Maker, tmp_path: Path, two_nodes: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is tried three times."""
    start, left = ActorPool._start_actor, [deaths]

    def then_kill(self: ActorPool, node: Node) -> None:
        start(self, node)
        if left[0]:
            left[0] -= 1
            self.ray.kill(self.actors[-1].handle)

    monkeypatch.setattr(ActorPool, "_start_actor", then_kill)
    changes = [*two_nodes.engine(), "workers=1"]
    if deaths == 3:
        with pytest.raises(InputError, match=r"node .*\): its processes ended"):
            run(experiment(*changes), tmp_path / "two")
        return
    expected = run(experiment(), tmp_path / "one")["model_sha256"]
    assert run(experiment(*changes), tmp_path / "two")["model_sha256"] == expected and not left[0]


def test_a_node_that_fits_is_looked_for(experiment: Maker, tmp_path: Path, two_nodes: RayCluster) -> None:
    """One actor is wanted, and the node with most room has other bits."""
    large, listener = two_nodes.add(cpus=3, ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE"), Listener()
    expected = run(experiment(), tmp_path / "one")["model_sha256"]
    result = run(experiment(*two_nodes.engine(), "workers=1"), tmp_path / "two", callback=listener)
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
        run(experiment(*two_nodes.engine(), *changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_token(file: Path, two_nodes: RayCluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedsieve", "run", str(file), *two_nodes.engine(), "--out", str(tmp_path / "run")]
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
