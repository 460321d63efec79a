"""A real Ray cluster of two nodes on this machine, and what tests look at in the engine that uses it."""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from fedsieve.engine import pace
from fedsieve.engine.actor_pool import Actor
from fedsieve.engine.ray_engine import RayEngine
from ray_cluster import SECURITY, RayCluster, processes_below


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


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[RayEngine]:
    """The engines that were made."""
    made, all_made = RayEngine.__init__, list[RayEngine]()

    def remembered(self: RayEngine, *arguments: object) -> None:
        all_made.append(self)
        made(self, *arguments)

    monkeypatch.setattr(RayEngine, "__init__", remembered)
    return all_made


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
