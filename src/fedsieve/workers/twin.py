"""The main process's twin in a worker: the same data, model and phases, brought up to date before each job."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsieve.config import Experiment
from fedsieve.federate.client import Broadcast
from fedsieve.federate.clients import Clients
from fedsieve.federate.jobs import Answer, Job
from fedsieve.federate.versions import Versions
from fedsieve.phases import add_mixing, begin, begin_masks, plan
from fedsieve.profile import stopwatch
from fedsieve.workbench import Workbench
from fedsieve.workers.channel import SharedBuffer

STEPS = {"scores": 1, "fisher": 2, "loss": 3, "reply": 3}  # how far a phase must be prepared for a job; others: 0


@dataclass(frozen=True)
class Published:
    """Which weights lie in the shared memory."""

    version: int
    phase: int  # its place among the phases
    begun: int  # how often what stands still has changed
    moving: list[tuple[int, int]]  # the ranges that may differ between versions with the same `begun`


class Twin:
    def __init__(self, experiment: Experiment, bench: Workbench, folder: Path, weights: SharedBuffer) -> None:
        self.experiment, self.bench, self.folder = experiment, bench, folder
        self.phases = plan(experiment, bench)
        bench.fingerprint  # noqa: B018 (found now, before the weights change)
        self.shared: Tensor = torch.frombuffer(weights.view(4 * len(bench.model.vector)), dtype=torch.float32)
        self.at = Published(-1, -1, -1, [])
        self.clients: Clients | None = None
        self.steps = 0  # how far the phase under way is prepared
        stopwatch.start()

    def do(self, job: Job, published: dict[str, Any]) -> Answer:
        stopwatch.take()  # what passed since the last job was waiting
        self._take_weights(Published(**published))
        self._prepare(STEPS.get(job.do, 0))
        if job.do == "reply":
            self._begin_round(job)
        return self.bench.desk.handlers[job.do](job)

    def take_seconds(self) -> dict[str, float]:
        return dict(stopwatch.take())

    def _take_weights(self, new: Published) -> None:
        if new.version == self.at.version:
            return
        for start, stop in new.moving if new.begun == self.at.begun else [(0, len(self.shared))]:
            self.bench.model.vector[start:stop] = self.shared[start:stop]
        if new.begun != self.at.begun:
            self.bench.forget()
        if new.phase != self.at.phase:
            self.steps = 0
        if self.clients is not None:
            self.clients.broadcast = None
        self.at = new

    def _prepare(self, steps: int) -> None:
        """What the main process did before the phase's rounds; it finds on disk what was made there."""
        phase = self.phases[self.at.phase]
        if self.steps < 1 <= steps:
            nobody_sends = Versions(torch.empty(0), torch.empty(0))  # only who sends weights needs to know what changed
            self.clients = begin(self.experiment, phase, self.bench, nobody_sends, 0, self.folder)
        if self.steps < 2 <= steps and self.clients is not None:
            begin_masks(self.experiment, phase, self.bench, self.clients, is_new=False)
            add_mixing(self.experiment, phase, self.bench, self.clients, self.folder)
        if self.steps < 3 <= steps and self.clients is not None and self.clients.context.mixing is not None:
            self.clients.context.mixing.begin_phase(self.experiment.clients.count, is_new=False)
        self.steps = max(self.steps, steps)

    def _begin_round(self, job: Job) -> None:
        assert self.clients is not None
        if self.clients.broadcast is None:
            settings, ranges = self.phases[self.at.phase].settings, self.clients.context.scope.ranges
            parts = [self.shared[start:stop] for start, stop in ranges]  # which nobody writes to during a round
            weights = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self.bench.device)
            self.clients.broadcast = Broadcast(settings.name, job.about["round"], settings.rounds, weights)
        if len(job.data):
            self.clients.take_mask(job.data)
