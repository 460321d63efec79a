"""Scores of the server's weights on validation, test and clients' own samples, computed by an engine."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from fedsieve.context import RunContext
from fedsieve.federate.types import Engine, Job
from fedsieve.model.evaluate import BATCH, Score, joined
from fedsieve.observe.profile import section


class Evaluator:
    """Scores the published weights; the network is frozen up to `depth` in the current phase."""

    def __init__(self, context: RunContext, engine: Engine, phase: int, depth: int) -> None:
        self.context, self.engine, self.phase, self.depth = context, engine, phase, depth

    def make_features(self, part: str) -> None:
        """Compute the outputs of the frozen backbone that are not in the cache yet."""
        if self.depth == self.context.feature_depth:
            self.context.frozen_outputs(part, np.empty(0, np.int64), self.depth, self._outputs)

    def score(self, part: str, positions: np.ndarray) -> Score | None:
        """Accuracy and loss on some samples of the training or the test set; None without samples."""
        if not len(positions):
            return None
        self.make_features(part)
        about, own = {"phase": self.phase, "part": part, "depth": self.depth}, positions.astype(np.int64)
        is_light = self.depth == self.context.feature_depth
        jobs = (Job("score", about, own[first : first + BATCH], is_light) for first in range(0, len(own), BATCH))
        with section("evaluate"):
            answers = self.engine.map(jobs)
            return joined((np.frombuffer(answer.data, bool), answer.about["loss"]) for answer in answers)

    def validation(self, positions: np.ndarray | None = None) -> Score | None:
        """On the validation set, or these samples of it; if there is none, on all that clients hold out."""
        context = self.context
        if context.held_out is not None and not len(context.validation):
            return self._mean_over_clients()
        return self.score("train", context.validation if positions is None else positions)

    def test(self) -> Score | None:
        return self.score("test", np.arange(len(self.context.data.test)))

    def clients(self, test: Score | None) -> list[float | None]:
        """Each client's accuracy on its held-out samples or, without any, on the test set, weighted by class shares."""
        context = self.context
        if context.held_out is None:
            test = test or self.test()
            return [None] * len(context.sizes) if test is None else context.by_class_shares(test)
        scores = self._of_clients()
        return [one["correct"] / one["samples"] if one.get("samples") else None for one in scores]

    def _of_clients(self) -> list[dict[str, float]]:
        """How many samples each client holds out, how many of them the model gets right, and their mean loss."""
        held, clients = self.context.held_out, range(len(self.context.sizes))
        if self.engine.courier is not None:  # only the client has them
            jobs = (Job("evaluate", {"phase": self.phase, "client": client}) for client in clients)
            return [answer.about for answer in self.engine.map(jobs)]
        assert held is not None
        scores = (self.score("train", self.context.training[own]) for own in held)
        return [
            {"samples": len(one.correct), "correct": int(one.correct.sum()), "loss": one.loss} if one else {}
            for one in scores
        ]

    def _mean_over_clients(self) -> Score | None:
        """Over the samples of those clients that tell theirs."""
        told = [one for one in self._of_clients() if one.get("samples")]
        count = sum(one["samples"] for one in told)
        if not count:
            return None
        loss = sum(one["samples"] * one["loss"] for one in told)
        return Score(sum(one["correct"] for one in told) / count, loss / count, torch.empty(0, dtype=torch.bool))

    def _outputs(
        self, part: str, positions: np.ndarray | None, depth: int, starts: Iterable[int]
    ) -> Iterator[np.ndarray]:
        about = {"phase": self.phase, "part": part, "depth": depth}
        own = b"" if positions is None else positions.astype(np.int64)
        for answer in self.engine.map(Job("outputs", about | {"first": first}, own) for first in starts):
            yield np.frombuffer(answer.data, np.float32)
