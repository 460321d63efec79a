"""Scores of the server's weights on validation, test and clients' own samples, computed by an engine."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

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

    def validation(self) -> Score | None:
        """On the whole validation set."""
        return self.score("train", self.context.validation)

    def test(self) -> Score | None:
        return self.score("test", np.arange(len(self.context.data.test)))

    def clients(self, test: Score | None) -> list[float | None]:
        """Each client's accuracy on its held-out samples or, without any, on the test set, weighted by class shares."""
        context = self.context
        if context.held_out is None:
            test = test or self.test()
            return [None] * len(context.sizes) if test is None else context.by_class_shares(test)
        if self.engine.courier is not None:
            return self._told_by_clients()
        score = self.score("train", context.training[context.held_out.positions])
        correct = score.correct.numpy() if score is not None else np.empty(0)
        parts = (correct[start:end] for start, end in pairwise(context.held_out.edges))
        return [float(part.mean()) if len(part) else None for part in parts]

    def _told_by_clients(self) -> list[float | None]:
        """Each client's accuracy on its held-out samples, where only the client has them."""
        about = {"phase": self.phase}
        told = self.engine.map(Job("evaluate", {**about, "client": one}) for one in range(len(self.context.sizes)))
        scores = [answer.about for answer in told]
        return [one["correct"] / one["samples"] if one.get("samples") else None for one in scores]

    def _outputs(
        self, part: str, positions: np.ndarray | None, depth: int, starts: Iterable[int]
    ) -> Iterator[np.ndarray]:
        about = {"phase": self.phase, "part": part, "depth": depth}
        own = b"" if positions is None else positions.astype(np.int64)
        for answer in self.engine.map(Job("outputs", about | {"first": first}, own) for first in starts):
            yield np.frombuffer(answer.data, np.float32)
