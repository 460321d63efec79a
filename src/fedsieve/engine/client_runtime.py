"""The clients' side of a run, in any process: does jobs with the vectors that the server has published.

These are `model` (the weights that may have changed since the run began, from position `model_at` on, as of the
beginning or resumption of the phase), `weights` (those in scope, now), `start` (those in scope at the phase's start,
for masks), `mask` (the shared one), broadcast extras (`extra:NAME`) and, where processes share no cache, features of
the training and the test set (`features:PART`). An answer depends only on these, on the job,
and on the client's data and state, so any process can do any job.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.context import RunContext
from fedsieve.engine.kept import Kept, States
from fedsieve.errors import RunError
from fedsieve.federate.blame import raise_if_ours, reason_of
from fedsieve.federate.mask_source import MaskSource
from fedsieve.federate.secure_round import secure_message
from fedsieve.federate.types import EXTRA, Answer, Broadcast, Job, State, Task, Update
from fedsieve.model.evaluate import BATCH, joined
from fedsieve.observe.profile import section
from fedsieve.phase import ClientSide, Phase, calibration_depth, client_side, mask_source
from fedsieve.privacy.zero_sum import Participant
from fedsieve.randomness import numpy_generator
from fedsieve.sieve.mask import Mask

FEATURES = "features:"  # before the part of the data set whose features are published
RAISES, GARBLES, SENDS_NAN = INJECTED = ("raises", "garbles its message", "sends what is not a number")


class ClientRuntime:
    """Does jobs, one after another, with the model of its run context."""

    def __init__(self, context: RunContext, phases: list[Phase], kept: Kept | None) -> None:
        self.context, self.phases = context, phases
        self.kept = kept  # what clients keep; None: nothing, as no round is done
        self.vectors: dict[str, Tensor] = {}  # as published
        self._masks: MaskSource | None = None  # of the current phase
        self._side: ClientSide | None = None
        self._states: States | None = None  # of clients
        self._is_loaded = False  # whether the model has the published weights
        self._handlers: dict[str, Callable[[Job], Answer]] = {
            "outputs": self._outputs,
            "score": self._score,
            "loss": self._loss,
            "scores": self._scores,
            "contribute": self._contribute,
            "key": self._key,
            "train": self._train,
        }

    def take(self, vectors: Mapping[str, Tensor]) -> None:
        """Take what the server publishes; with `model`, a phase begins."""
        if "model" in vectors:
            first = int(vectors["model_at"])
            self.context.model.vector[first : first + len(vectors["model"])] = vectors["model"]
            self.context.forget_outputs()
            self.vectors.clear()
            self._masks = self._side = self._states = None
        if "mask" in vectors and self._masks is not None:
            self._share(self._masks, vectors["mask"])
        for name, vector in vectors.items():
            if name.startswith(FEATURES):
                self.context.features[name.removeprefix(FEATURES)] = vector.to(self.context.device)
        self.vectors |= vectors
        self._is_loaded = False

    def do(self, job: Job) -> Answer:
        return self._handlers[job.do](job)

    # What the model is used for.

    def _outputs(self, job: Job) -> Answer:
        self._load(job)
        positions = np.frombuffer(job.data, np.int64) if len(job.data) else None
        about = job.about
        return Answer({}, self.context.outputs(about["part"], positions, about["depth"], about["first"]))

    def _score(self, job: Job) -> Answer:
        """The score of one batch of samples."""
        self._load(job)
        positions = np.frombuffer(job.data, np.int64).copy()
        correct, loss = self.context.score(job.about["part"], positions, job.about["depth"])
        return Answer({"loss": loss}, correct.numpy())

    def _loss(self, job: Job) -> Answer:
        """The loss of the current model on a client's own training samples."""
        self._load(job)
        context, depth = self.context, self._side_of(job).frozen
        positions = context.training[context.partition.clients[job.about["client"]]]
        if not len(positions):
            return Answer({"loss": 0.0})
        batches = (positions[first : first + BATCH] for first in range(0, len(positions), BATCH))
        scores = (context.score("train", batch, depth) for batch in batches)
        return Answer({"loss": joined((correct.numpy(), loss) for correct, loss in scores).loss})

    # What clients do.

    def _scores(self, job: Job) -> Answer:
        """What one client contributes to a mask that all clients share."""
        self._load(job)
        masks, about = self.masks_of(job), job.about
        assert masks is not None
        active = Mask(masks.shapes, torch.frombuffer(bytearray(job.data), dtype=torch.uint8))
        depth = calibration_depth(self.context, self.phases[about["phase"]])
        data = self.context.client_data(about["client"], depth)
        total, _ = masks.scored(data, tuple(about["address"]), about["round"], active)
        return Answer({}, total.cpu().numpy())

    def _contribute(self, job: Job) -> Answer:
        """What one client contributes to a method before the first round."""
        self._load(job)
        side = self._side_of(job)
        data = self.context.client_data(job.about["client"], side.depth)
        with section("calibrate"):
            scores, state = side.phase.method.contribute(data, side.setup, side.phase.settings.name)
        digest = self.states_of(job).put(data.client, job.about["version"], state)
        return Answer({"remembers": digest}, scores.numpy())

    def _key(self, job: Job) -> Answer:
        """A client's public key for secure sums, and the private one: any process may train the client."""
        one = Participant(job.about["client"])
        return Answer({"private": one.private_key().hex()}, one.public_key)

    def _train(self, job: Job) -> Answer:
        """A client's message, or why there is none: a client's error does not end the run."""
        side, about, states = self._side_of(job), job.about, self.states_of(job)
        client, settings = about["client"], side.phase.settings
        device, published = self.context.device, self.vectors.items()
        extras = {name.removeprefix(EXTRA): one.to(device) for name, one in published if name.startswith(EXTRA)}
        weights = self.vectors["weights"].to(device)
        broadcast = Broadcast(settings.name, about["round"], settings.rounds, weights, extras)
        data = self.context.client_data(client, side.depth)
        remembered = states.read(client, about["memory"]) if about["memory"] is not None else {}
        failure, self._is_loaded = self._injected_failure(client, broadcast), False
        try:
            if failure == RAISES:
                raise RunError("it raised, as clients.fail_rate asks")
            update, state = self._trained(side, Task(broadcast, data, side.setup), remembered)
            if failure == SENDS_NAN:
                next(iter(update.vectors.values()))[0] = torch.nan
            with section("encode"):
                message, encodings, residual = self._encoded(side, update, broadcast, remembered, about["secret"])
        except Exception as error:
            raise_if_ours(error)
            return Answer({"failed": reason_of(error)})
        if failure == GARBLES:
            message[len(message) // 2] ^= 1
        state = {**state, **residual}
        digest = states.put(client, about["version"], state) if state else None
        return Answer({"encodings": encodings, "remembers": digest}, message)

    def _trained(self, side: ClientSide, task: Task, remembered: State) -> tuple[Update, State]:
        return side.phase.method.train(task, remembered)

    def _encoded(
        self, side: ClientSide, update: Update, broadcast: Broadcast, remembered: State, secret: dict[str, Any] | None
    ) -> tuple[bytearray, list[str], State]:
        if secret is None:
            encoded, residual = side.transport.encode_update(update, broadcast.round, remembered)
            return encoded.data, list(encoded.encodings.values()), residual
        return secure_message(update, broadcast, self.context.experiment.clients, side.transport, secret), [], {}

    def _injected_failure(self, client: int, broadcast: Broadcast) -> str | None:
        """One of three failures, for a share `clients.fail_rate` of all replies."""
        experiment = self.context.experiment
        if not experiment.clients.fail_rate:
            return None
        generator = numpy_generator(experiment.seed, "fail", broadcast.phase, broadcast.round, client)
        return INJECTED[generator.integers(3)] if generator.random() < experiment.clients.fail_rate else None

    # The current phase.

    def _load(self, job: Job) -> None:
        """Put the published weights into the model, if a client's training or a newer version has changed them."""
        if not self._is_loaded:
            self.phases[job.about["phase"]].scope.write(self.vectors["weights"].to(self.context.device))
            self._is_loaded = True

    def masks_of(self, job: Job) -> MaskSource | None:
        """The masks of the current phase, with the shared one, if it was published."""
        if self._masks is None:
            phase = self.phases[job.about["phase"]]
            start = self.vectors.get("start")
            files = self.kept.masks(self.context, phase, start) if self.kept is not None else None
            self._masks = mask_source(self.context, phase, start, files)
            if self._masks is not None and "mask" in self.vectors:
                self._share(self._masks, self.vectors["mask"])
        return self._masks

    def _share(self, masks: MaskSource, bits: Tensor) -> None:
        masks.share(Mask(masks.shapes, bits.clone()))
        if masks.settings.refresh == "once":
            self._side = None  # made again: what the mask freezes for the whole phase is computed once

    def _side_of(self, job: Job) -> ClientSide:
        if self._side is None:
            self._side = client_side(self.context, self.phases[job.about["phase"]], self.masks_of(job))
        return self._side

    def states_of(self, job: Job) -> States:
        if self._states is None:
            assert self.kept is not None
            self._states = self.kept.states(self.phases[job.about["phase"]])
        return self._states
