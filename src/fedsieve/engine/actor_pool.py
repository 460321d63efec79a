"""The nodes of a Ray cluster, and the actors that do a run's jobs on them.

The first actor of a node says what the node has. If that fits the driver, it loads the data, and the node is used.
Nodes that join later are used as soon as they have been examined.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fedsieve.config.engine_settings import RaySettings
from fedsieve.context import RunContext
from fedsieve.engine.cluster_nodes import Node, alive_nodes, must_have_room, name_of, room_of
from fedsieve.engine.dispatch import ATTEMPTS, Ticket
from fedsieve.engine.node_facts import Facts, facts, obstacle, other_bits
from fedsieve.engine.ray_actor import PARTS, Supply, actor_on, supply
from fedsieve.errors import InputError, RunError, WorkerError
from fedsieve.model.given_module import first_line

LOOK_EVERY = 3.0  # seconds, for nodes that joined or died
FIRST_ANSWER = 120.0  # seconds until some node must have been examined at the start
OTHERS = 30.0  # seconds until the others are left to come later
GRACE = 60.0  # seconds that a run without any node waits for one
TAKEN = "are the cluster's CPUs taken by other jobs?"


@dataclass
class Actor:
    node: Node
    handle: Any
    asked: Any = None  # the reference of the answer that it owes
    then: Callable[[Any], None] = lambda answer: None  # what to do with the answer
    is_ready: bool = False
    ticket: Ticket | None = None
    seen: dict[str, int] = field(default_factory=dict)  # versions of published vectors that it has

    @property
    def is_free(self) -> bool:
        return self.is_ready and self.asked is None

    def ask(self, asked: Any, then: Callable[[Any], None]) -> None:
        self.asked, self.then = asked, then


class ActorPool:
    """As many actors as are wanted and as the cluster has room for."""

    def __init__(self, ray: Any, context: RunContext, settings: RaySettings, wanted: int) -> None:
        assert isinstance(context.experiment.threads, int)
        self.ray, self.context, self.settings, self.wanted = ray, context, settings, wanted
        self.cpus, self.gpus = context.experiment.threads, settings.gpus_per_client
        self.nodes: dict[str, Node] = {}
        self.actors: list[Actor] = []
        self._lost: list[Ticket] = []  # the jobs of actors that are gone
        self._looked = float("-inf")
        self._stuck_since: float | None = None  # when it was seen that no actor is ready
        self._is_starting = True
        self._mine = facts(context.experiment)
        self._supply: Supply = supply(context, ray, settings.send_data)
        try:
            self._wait_for_nodes()
        except BaseException:
            self.close()
            raise

    def listen(self, timeout: float | None) -> list[Ticket]:
        """Hear what an actor answers, or wait a little; the jobs of those that are gone, in their order."""
        if not self.actors:
            self._wait_for_a_node()
        owing = {actor.asked: actor for actor in self.actors if actor.asked is not None}
        limit = LOOK_EVERY if timeout is None else timeout
        if not owing:
            time.sleep(min(limit, 0.1))
        ready = self.ray.wait(list(owing), num_returns=1, timeout=limit)[0] if owing else []
        for reference in ready:
            self._hear(owing[reference])
        self.look()
        self._warn_if_nobody_works()
        lost, self._lost = self._lost, []
        return lost

    def wait(self) -> None:
        """Wait until all actors are ready; for measurements and tests."""
        while not all(actor.is_ready for actor in self.actors):
            self.listen(None)

    def drop_jobs(self) -> None:
        """End the actors that do jobs; others take their places."""
        for actor in self.actors.copy():
            if actor.ticket is not None:
                self._dismiss(actor)
        self._lost.clear()
        self._recruit()

    def close(self) -> None:
        """End all actors: the run is over."""
        for actor in self.actors.copy():
            self._dismiss(actor)

    # Nodes.

    def look(self) -> None:
        """Look for nodes that joined or died, now and then."""
        if (now := time.monotonic()) < self._looked + LOOK_EVERY:
            return
        self._looked = now
        alive = alive_nodes(self.ray)
        for gone in self.nodes.keys() - alive.keys():
            self._leave(self.nodes.pop(gone))
        for id, one in alive.items():
            if id not in self.nodes:
                self.nodes[id] = Node(id, name_of(one), room_of(one, self.cpus, self.gpus))
        self._recruit()

    def _wait_for_nodes(self) -> None:
        """Wait until all nodes that are there have been examined, and at least one can be used."""
        started = time.monotonic()
        self.look()
        must_have_room(self.ray, self.cpus, self.gpus)
        while waiting := self._under_examination():
            seconds, is_any_ready = time.monotonic() - started, any(node.is_ready for node in self.nodes.values())
            if seconds > (OTHERS if is_any_ready else FIRST_ANSWER):
                break
            self.listen(None)
        self._is_starting = False
        if not any(node.is_ready for node in self.nodes.values()):
            reasons = [f"{node.name} is not used: {node.refused}" for node in self.nodes.values() if node.refused]
            reasons += [f"{node.name} did not answer in {FIRST_ANSWER:.0f} s; {TAKEN}" for node in waiting]
            raise InputError(f"engine.ray: no node of the cluster can be used: {'; '.join(reasons) or 'all are gone'}")
        for node in waiting:
            self.context.callback.warning(f"{node.name} has not answered yet; it is used when it does ({TAKEN})")
        if not self.gpus and any(node["Resources"].get("GPU") for node in alive_nodes(self.ray).values()):
            self.context.note("the cluster has GPUs, and engine.ray.gpus_per_client is 0: they are not used")

    def _under_examination(self) -> list[Node]:
        asked = [node for node in self.nodes.values() if self._on(node)]
        return [node for node in asked if not node.is_ready and node.refused is None]

    def _warn_if_nobody_works(self) -> None:
        """Say once why nothing goes on, when actors wait for room; they may get it at any time."""
        if self._is_starting or any(actor.is_ready for actor in self.actors):
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = time.monotonic()
        elif time.monotonic() > self._stuck_since + GRACE:
            self._stuck_since = float("inf")
            self.context.callback.warning(f"no actor could start for {GRACE:.0f} s, still waiting; {TAKEN}")

    def _wait_for_a_node(self) -> None:
        """Without any actor, wait for a node for a while."""
        self.context.callback.warning(f"no node of the cluster is left; waiting {GRACE:.0f} s for one")
        until = time.monotonic() + GRACE
        while not self.actors:
            if time.monotonic() > until:
                what = "no node of the cluster is left"
                raise RunError(f"{what}; start one, and go on with the same command and --resume")
            time.sleep(0.5)
            self.look()

    def _on(self, node: Node) -> int:
        return sum(actor.node is node for actor in self.actors)

    # Actors, from the first to the last thing that they are asked.

    def _recruit(self) -> None:
        """Start actors where there is room, until there are as many as wanted."""
        while len(self.actors) < self.wanted:
            free = {id: node.room - self._on(node) for id, node in self.nodes.items() if node.refused is None}
            if not free or free[best := max(free, key=lambda id: free[id])] <= 0:
                return
            self._start_actor(self.nodes[best])

    def _start_actor(self, node: Node) -> None:
        actor = Actor(node, actor_on(self.ray, node.id, self.cpus, self.gpus))
        is_first = not self._on(node)
        self.actors.append(actor)
        if node.is_ready:
            self._begin(actor)
        elif is_first:
            asked = actor.handle.examine.remote(self._supply.setup)
            actor.ask(asked, lambda said: self._examined(actor, said))
        else:  # it imports what it needs, while the first one is examined
            actor.ask(actor.handle.__ray_ready__.remote(), lambda _: None)

    def _examined(self, actor: Actor, said: Facts) -> None:
        """Judge a node by what its first actor says, and let it load the data."""
        node, needed = actor.node, self._supply
        if (reason := obstacle(self._mine, said)) is not None:
            self._refuse(node, reason)
        elif (reason := other_bits(self._mine, said)) is not None and self.settings.same_bits:
            self._refuse(node, reason, is_error=False)
        elif needed.data:
            self._is_found(node, needed.data)
        else:
            about, *arrays = actor.handle.load.options(num_returns=1 + len(PARTS)).remote(needed.setup)
            references = dict(zip(PARTS, arrays, strict=True))
            actor.ask(about, lambda found: self._loaded(node, found, references))

    def _loaded(self, node: Node, found: dict[str, Any], references: dict[str, Any]) -> None:
        remedy = "put them at the same path there, or set engine.ray.send_data: true"
        if "failed" in found:
            self._refuse(node, f"{found['failed']}; {remedy}")
        elif found != self._supply.data_facts:
            self._refuse(node, f"its data are not the driver's; {remedy}")
        else:
            self._is_found(node, references)

    def _is_found(self, node: Node, data: dict[str, Any]) -> None:
        """The node can be used."""
        node.data, node.is_ready = data, True
        for actor in self.actors:
            if actor.node is node:
                self._begin(actor)

    def _begin(self, actor: Actor) -> None:
        start = replace(self._supply.start, data=actor.node.data)
        actor.ask(actor.handle.begin.remote(self._supply.setup, start), lambda said: self._begun(actor, said))

    def _begun(self, actor: Actor, said: dict[str, Any]) -> None:
        if "failed" in said:
            self._do_without(actor, said["failed"])
        else:
            actor.is_ready, actor.node.stillborn = True, 0

    # What goes wrong.

    def _hear(self, actor: Actor) -> None:
        try:
            answer = self.ray.get(actor.asked)
        except self.ray.exceptions.RayTaskError as error:
            reason = first_line(error.cause or error)
            if actor.is_ready:
                raise WorkerError(reason) from None
            self._refuse(actor.node, f"its actor failed to start ({reason}); install what the driver has")
        except self.ray.exceptions.RayError as error:
            self._died(actor, error)
        else:
            then, actor.asked = actor.then, None
            then(answer)

    def _died(self, actor: Actor, error: Exception) -> None:
        self._dismiss(actor)
        if not actor.is_ready:
            self._stillborn(actor, error)
        self._looked, node = float("-inf"), actor.node
        self.look()  # whether its node is gone as well; if not, another actor takes its place
        if actor.ticket is not None:
            self.context.callback.warning(f"an actor at {node.name} died; what it was doing is done again")
            if node.id in self.nodes:
                actor.ticket.died("actors")

    def _stillborn(self, actor: Actor, error: Exception) -> None:
        node = actor.node
        node.stillborn += 1
        if not node.is_ready:  # the others on it wait for what this one was asked
            self._leave(node)
        if "No module named 'fedsieve" in str(error):
            self._refuse(node, f"it lacks the driver's fedsieve; install the same there ({first_line(error)})")
        elif node.stillborn == ATTEMPTS:
            self._do_without(actor, f"its processes ended ({first_line(error)}); is there too little memory?")

    def _do_without(self, actor: Actor, reason: str) -> None:
        """Do not start this actor again; its node is good for as many as are ready there, if any."""
        node = actor.node
        if ready := sum(one.is_ready for one in self.actors if one.node is node):
            node.room, node.stillborn = ready, 0
            self.context.callback.warning(f"{node.name} is used for {ready} at a time: {reason}")
            for one in [one for one in self.actors if one.node is node and not one.is_ready]:
                self._dismiss(one)
        else:
            self._refuse(node, reason)

    def _refuse(self, node: Node, reason: str, is_error: bool = True) -> None:
        """Do not use a node. At the start that ends the run, as something can be put right, unless it is no error."""
        if self._is_starting and is_error:
            raise InputError(f"{node.name}: {reason}")
        node.refused, node.is_ready, node.data = reason, False, {}
        self.context.callback.warning(f"{node.name} is not used: {reason}")
        self._leave(node)
        self._recruit()

    def _leave(self, node: Node) -> None:
        for actor in self.actors.copy():
            if actor.node is node:
                self._dismiss(actor)

    def _dismiss(self, actor: Actor) -> None:
        self.actors.remove(actor)
        if actor.ticket is not None:
            self._lost.append(actor.ticket)
        self.ray.kill(actor.handle)
