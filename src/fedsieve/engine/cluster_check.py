"""What each node of a Ray cluster has, and whether a run would use it: `fedsieve cluster check`."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fedsieve.config.schema import Experiment
from fedsieve.data.load import load
from fedsieve.engine.cluster_nodes import alive_nodes, name_of, room_of
from fedsieve.engine.node_facts import Facts, facts, obstacle, other_bits
from fedsieve.engine.ray_actor import PARTS, actor_on, facts_of, setup_of
from fedsieve.engine.torch_setup import configure_torch
from fedsieve.model.given_module import first_line

LIMIT = 120.0  # seconds for all nodes to answer: the first answer takes the imports of torch and fedsieve
SENT = 64_000_000  # bytes, to measure how fast they arrive


@dataclass
class NodeCheck:
    """A node, and what was found out about it."""

    name: str
    room: int  # actors that it can take
    facts: Facts = field(default_factory=dict)
    is_same: bool | None = None  # whether the canary's hash is the driver's; None: it did not get that far
    has_data: bool | None = None  # None: not asked
    megabytes_per_second: float | None = None  # from the driver
    problem: str | None = None  # why it would not be used

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "is_usable": self.problem is None}


class ClusterCheck:
    """Asks all nodes at once, and then sends each of them some bytes, one after another."""

    def __init__(self, ray: Any, experiment: Experiment, with_data: bool) -> None:
        assert experiment.on_ray is not None and isinstance(experiment.threads, int)
        configure_torch(experiment)
        self.ray, self.experiment, self.settings = ray, experiment, experiment.on_ray
        self.mine, self.threads = facts(experiment), experiment.threads
        self.data = facts_of(load(experiment.data)) if with_data else None
        self.setup = ray.put(setup_of(experiment))

    def nodes(self) -> list[NodeCheck]:
        checks, actors = dict[str, NodeCheck](), dict[str, Any]()
        for id, node in alive_nodes(self.ray).items():
            check = checks[id] = NodeCheck(name_of(node), room_of(node, self.threads, self.settings.gpus_per_client))
            if check.room:
                actors[id] = actor_on(self.ray, id, self.threads, self.settings.gpus_per_client)
            else:
                check.problem = f"it has no room for a client: {_resources(node)}"
        try:
            self._ask(checks, actors)
            for id in [id for id in actors if checks[id].problem is None]:
                self._measure(checks[id], actors[id])
        finally:
            for actor in actors.values():
                self.ray.kill(actor)
        return list(checks.values())

    def _ask(self, checks: Mapping[str, NodeCheck], actors: Mapping[str, Any]) -> None:
        """What each node is, and then, if asked, whether the data are there."""
        self.until = time.monotonic() + LIMIT
        said = {id: actor.examine.remote(self.setup) for id, actor in actors.items()}
        for id, reference in said.items():
            self._judge(checks[id], reference, self._examined)
        if self.data is None:
            return
        self.until = time.monotonic() + LIMIT
        fit = [id for id in actors if checks[id].problem is None]
        found = {id: actors[id].load.options(num_returns=1 + len(PARTS)).remote(self.setup)[0] for id in fit}
        for id, reference in found.items():
            self._judge(checks[id], reference, self._loaded)

    def _judge(self, check: NodeCheck, reference: Any, judge: Callable[[NodeCheck, Facts], None]) -> None:
        try:
            said = self.ray.get(reference, timeout=max(0.0, self.until - time.monotonic()))
        except self.ray.exceptions.GetTimeoutError:
            check.problem = f"it did not answer in {LIMIT:.0f} s; are its CPUs taken by other jobs?"
        except self.ray.exceptions.RayError as error:
            check.problem = f"its actor failed ({first_line(error)}); install what the driver has"
        else:
            judge(check, said)

    def _examined(self, check: NodeCheck, said: Facts) -> None:
        check.facts = said
        check.problem = obstacle(self.mine, said)
        if check.problem is None:
            other = other_bits(self.mine, said)
            check.is_same = other is None
            check.problem = other if self.settings.same_bits else None

    def _loaded(self, check: NodeCheck, said: Facts) -> None:
        check.has_data = said == self.data
        if not check.has_data:
            check.problem = said.get("failed", "its data are not the driver's")

    def _measure(self, check: NodeCheck, actor: Any) -> None:
        """How fast many bytes arrive, less the time that an empty message takes."""
        nothing, much = (self.ray.put(os.urandom(size)) for size in (1, SENT))
        seconds = []
        for reference in (nothing, nothing, much):
            started = time.perf_counter()
            try:
                self.ray.get(actor.receive.remote(reference), timeout=LIMIT)
            except self.ray.exceptions.RayError as error:
                check.problem = f"{SENT:,} bytes did not arrive there ({first_line(error)})"
                return
            seconds.append(time.perf_counter() - started)
        check.megabytes_per_second = SENT / max(seconds[2] - seconds[1], 1e-6) / 1e6


def _resources(node: Mapping[str, Any]) -> str:
    has = {kind: node["Resources"].get(kind, 0) for kind in ("CPU", "GPU")}
    return f"{has['CPU']:g} CPUs, {has['GPU']:g} GPUs"
