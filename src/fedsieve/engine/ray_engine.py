"""Clients run in actors on the nodes of a Ray cluster.

The driver, which is the server of the federation, puts weights into Ray's object store once a round, and each node
fetches them once. What clients remember lies with the driver and travels with jobs, so that any node can do any job.
An actor or a node that dies costs the time of its jobs. Nodes that join are used as soon as they have been examined.
"""

from collections import deque
from collections.abc import Mapping
from itertools import count
from typing import Any

from torch import Tensor

from fedsieve.config.engine_settings import RaySettings
from fedsieve.config.model_settings import RidgeHead
from fedsieve.config.resolve import workers_allowed
from fedsieve.engine.actor_pool import Actor, ActorPool
from fedsieve.engine.client_runtime import FEATURES, ClientRuntime
from fedsieve.engine.dispatch import Dispatcher, Ticket
from fedsieve.engine.kept import Enclosure, KeptInFolder
from fedsieve.engine.ray_actor import Sent, received, sent
from fedsieve.engine.tensor_bytes import to_bytes
from fedsieve.federate.mask_source import MaskFiles, name_of_own
from fedsieve.federate.types import Answer, Job


class RayEngine(Dispatcher):
    """Actors on the nodes of a cluster, as many as it has room for, at most one for each client of a round."""

    def __init__(self, runtime: ClientRuntime, ray: Any, settings: RaySettings) -> None:
        super().__init__(runtime)
        assert isinstance(runtime.kept, KeptInFolder)
        experiment = self.context.experiment
        clients = experiment.clients
        in_a_round = clients.count if isinstance(experiment.model.head, RidgeHead) else clients.per_round
        wanted = workers_allowed(in_a_round) if experiment.workers == "auto" else experiment.workers
        self.ray = ray
        self._versions = count(1)
        self._published: dict[str, tuple[int, Any]] = {}  # versions and references, by name
        self._features: dict[str, Tensor] = {}  # that were published
        self.pool = ActorPool(ray, self.context, settings, wanted)

    @property
    def size(self) -> int:  # type: ignore[override]
        return max(1, len(self.pool.actors))

    def wait(self) -> None:
        """Wait until all actors are ready; for measurements and tests."""
        self.pool.wait()

    def close(self) -> None:
        """End all actors: the run is over."""
        self.pool.close()

    # What actors are given.

    def publish(self, vectors: Mapping[str, Tensor]) -> None:
        """Put the vectors into the object store; nodes fetch them with their next jobs."""
        super().publish(vectors)
        if "model" in vectors:
            self._published.clear()
            self._features.clear()
        for name, vector in vectors.items():
            self._publish_one(name, vector)

    def _publish_one(self, name: str, vector: Tensor) -> None:
        self._published[name] = next(self._versions), self.ray.put(to_bytes(vector))

    def _publish_features(self) -> None:
        """Publish the features that the driver has gathered, so that no node computes them by itself."""
        for part, features in self.context.features.items():
            if self._features.get(part) is not features:
                self._features[part] = features
                self._publish_one(f"{FEATURES}{part}", features)

    # Jobs.

    def _is_up(self) -> bool:
        return True

    def _may_do_here(self) -> bool:
        return self.context.device == self.context.experiment.device

    def _hand_out(self, waiting: deque[Ticket]) -> None:
        self.pool.look()
        for actor in self.pool.actors:
            if waiting and actor.is_free:
                self._give(actor, waiting.popleft())

    def _give(self, actor: Actor, ticket: Ticket) -> None:
        self._publish_features()
        new = {name: one for name, one in self._published.items() if actor.seen.get(name) != one[0]}
        actor.seen = {name: version for name, (version, _) in self._published.items()}
        actor.ticket, job = ticket, ticket.job
        references = {name: reference for name, (_, reference) in new.items()}
        asked = actor.handle.do.remote(job, references, self._enclosed(job))
        actor.ask(asked, lambda answer: self._answered(actor, answer))

    def _enclosed(self, job: Job) -> Sent | None:
        """What the client of a job keeps, from the run's folder."""
        if job.do != "train":
            return None
        client, memory, enclosure = job.about["client"], job.about["memory"], Enclosure()
        if memory is not None:
            enclosure.state = self.runtime.states_of(job).read(client, memory)
        masks = self.runtime.masks_of(job)
        if masks is not None and masks.keeps_own and isinstance(masks.files, MaskFiles):
            enclosure.mask = masks.files.found(name_of_own(client))
        return sent(enclosure)

    def _answered(self, actor: Actor, answer: tuple[dict[str, Any], Any, Sent | None]) -> None:
        (heard, data, back), ticket = answer, actor.ticket
        assert ticket is not None
        actor.ticket = None
        self._told(heard)
        about = heard["about"]
        if back is not None:
            about = self._kept_again(ticket.job, about, received(back))
        ticket.answer = Answer(about, memoryview(data) if len(data) else b"")

    def _kept_again(self, job: Job, about: dict[str, Any], back: Enclosure) -> dict[str, Any]:
        """Write what a client keeps to the run's folder, as a worker would have done."""
        client = job.about["client"]
        if back.mask is not None:
            masks = self.runtime.masks_of(job)
            assert masks is not None and isinstance(masks.files, MaskFiles)
            masks.files.keep(name_of_own(client), back.mask)
        if back.state:
            digest = self.runtime.states_of(job).put(client, job.about["version"], back.state)
            about = {**about, "remembers": digest}
        return about

    def _listen(self, waiting: deque[Ticket], timeout: float | None) -> None:
        waiting.extendleft(reversed(self.pool.listen(timeout)))

    def _give_up_jobs(self) -> None:
        self.pool.drop_jobs()
