"""The run context, which every process of a run has: the data, its partition among clients, and the model.

Making a context finds errors in the input, and writes nothing but the cache.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.config.data_settings import DataSettings
from fedsieve.config.schema import Experiment
from fedsieve.data.given_data import read_given
from fedsieve.data.load import Dataset, Samples, load
from fedsieve.data.roles import Roles, roles_of
from fedsieve.data.transform import Transform
from fedsieve.federate.types import ClientData
from fedsieve.files.cache import size_limit
from fedsieve.model.classifier import Classifier, build_classifier
from fedsieve.model.compiled import compile_blocks
from fedsieve.model.evaluate import Score, by_class_shares, score_batch
from fedsieve.model.features import (
    batch_outputs,
    feature_depth,
    frozen_depth,
    frozen_fingerprint,
    frozen_outputs,
    images_at_once,
    network_behind,
    too_large_to_keep,
)
from fedsieve.model.flat import FlatModel
from fedsieve.model.given_module import Model
from fedsieve.model.precision import forward, notes_on
from fedsieve.observe.callbacks import Callback
from fedsieve.observe.profile import section
from fedsieve.randomness import numpy_generator
from fedsieve.runs.model_file import start_from_run

SERVER = -1  # instead of a client's number
SLOW = 2000  # images: from here on, progress is shown
AT_A_TIME = 4096  # clients whose class counts are held at once
WRITTEN_DOWN = 200  # clients whose class counts are saved in the run's folder

Compute = Callable[[str, np.ndarray | None, int, Iterable[int]], Iterator[np.ndarray]]


@dataclass(frozen=True)
class Given:
    """What a caller from Python gives a run instead of names: a data set (an object, as it is), a model."""

    data: Any = None
    model: Model | None = None

    def dataset(self, settings: DataSettings) -> Dataset | None:
        """All its images and labels; None: the experiment names the data."""
        return None if self.data is None else read_given(self.data, settings)


class RunContext:
    """Data, partition and model of a run, in one process. The model's weights are whatever was last written to it."""

    def __init__(
        self,
        experiment: Experiment,
        callback: Callback,
        classifier: Classifier | None = None,
        data: Dataset | None = None,
        given: Model | None = None,
        roles: Roles | None = None,
    ) -> None:
        """`data` and `roles` say where images come from; by default all are loaded here, as the experiment says."""
        size_limit()  # fails now if $FEDSIEVE_CACHE_GB is no size
        self.experiment, self.callback = experiment, callback
        # A driver without a GPU may lead a cluster that has some.
        self.device = experiment.device if experiment.device == "cpu" or torch.cuda.is_available() else "cpu"
        self.roles = roles = roles or roles_of(experiment, data or load(experiment.data))
        self.data = roles.data
        self.training, self.partition, self.held_out = roles.training, roles.partition, roles.held_out
        self.validation, self.validation_sample = roles.validation, roles.validation_sample
        self.transform = Transform(experiment.data, self.data.train, roles.statistics)
        self.given = given  # the model of a caller from Python
        self.classifier = classifier or build_classifier(experiment, self.data.classes, given)
        self.is_as_started = classifier is None  # whether the model has the weights that the experiment starts from
        if self.is_as_started and experiment.model.init is not None:
            start_from_run(self.classifier, experiment.model.init)
        self.model = FlatModel(self.classifier, self.device)
        if experiment.compile:
            compile_blocks(self.classifier, self.device)
        self.features: dict[str, Tensor] = {}  # of the training and the test set, as far as they are known
        self._fingerprints: dict[int, str] = {}  # of the frozen part, by depth
        self.noted: dict[str, str] = {}  # by topic
        for note in self.data.notes + self.partition.notes + notes_on(experiment.precision, self.device):
            self.note(note)

    def note(self, text: str, topic: str | None = None) -> None:
        """Show a note to the user, once for each topic (or text, without one)."""
        if (topic or text) not in self.noted:
            self.noted[topic or text] = text
            self.callback.note(text)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that a run starts from; to be computed before the first weight changes."""
        return self.roles.fingerprint(self.model.vector)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Training samples of each client."""
        return self.roles.sizes

    # If the beginning of the network is frozen, its output is computed once, and kept in the cache.

    def frozen_depth(self, active: Iterable[str]) -> int:
        """How much of the network is frozen while the tensors with these names change."""
        depth = frozen_depth(self.classifier, set(active))
        # all images, also those of other nodes: all go the same way, as the last bits depend on it
        if depth and (reason := too_large_to_keep(self.classifier, depth, self.roles.all_images)):
            self.note(reason, "cache")
            return 0
        return depth

    @property
    def feature_depth(self) -> int:
        """The depth at which only the head is left."""
        return feature_depth(self.classifier)

    def forget_outputs(self) -> None:
        """Drop what is kept in memory: the frozen part may be another one now, or have other weights."""
        self.features.clear()
        self._fingerprints.clear()

    def network(self, depth: int) -> nn.Module:
        return network_behind(self.classifier, depth)

    def frozen_outputs(
        self, part: str, positions: np.ndarray, depth: int, compute: Compute | None = None
    ) -> Callable[[Tensor], Tensor]:
        """A function from indices into `positions` to inputs of `network(depth)`.

        `compute` gives outputs that are not in the cache, batch by batch; None: they are computed here.
        """
        compute = compute or self._computed_here
        if depth == self.feature_depth:  # features are small: those of all samples are kept, for every use
            if part not in self.features:
                rows = self._cached(part, None, depth, compute, self.callback.features)
                self.features[part] = rows.to(self.device)
            known, where = self.features[part], torch.from_numpy(positions)
            return lambda batch: known[where[batch]].to(self.device)
        silent = len(positions) < SLOW
        progress = (lambda *_: None) if silent else self.callback.features
        tokens = self._cached(part, positions, depth, compute, progress)
        return lambda batch: tokens[batch].to(self.device)

    def _cached(
        self,
        part: str,
        positions: np.ndarray | None,
        depth: int,
        compute: Compute,
        progress: Callable[[int, int], None],
    ) -> Tensor:
        if depth not in self._fingerprints:
            self._fingerprints[depth] = frozen_fingerprint(self.classifier, depth)
        with section("features"):
            return frozen_outputs(
                self.classifier,
                depth,
                self._fingerprints[depth],
                self.samples(part),
                positions,
                self.transform,
                # where they are computed: a driver without a GPU has nodes that do it
                self.device if compute == self._computed_here else self.experiment.device,
                partial(compute, part, positions, depth),
                self.experiment.precision,
                self.experiment.compile,
                progress,
                lambda text: self.note(text, "cache"),  # what cannot be kept for one client cannot be for the next
            )

    def _computed_here(
        self, part: str, positions: np.ndarray | None, depth: int, starts: Iterable[int]
    ) -> Iterator[np.ndarray]:
        return (self.outputs(part, positions, depth, first) for first in starts)

    def outputs(self, part: str, positions: np.ndarray | None, depth: int, first: int) -> np.ndarray:
        """The frozen part's outputs for the batch of samples that begins at number `first`.

        Those of all samples (`positions` None) are computed in batches of one size, the last one filled up with copies
        of its last image. On some CPUs the last bits of a row depend on the size of its batch; so they do not
        depend on how many other images this process has.
        """
        samples, at_once = self.samples(part), images_at_once(self.experiment.device)
        own = positions if positions is not None else np.arange(len(samples))
        own = own[first : first + at_once]
        count = len(own)
        if positions is None and count < at_once:
            self.transform.must_fit(at_once)
            own = np.pad(own, (0, at_once - count), mode="edge")
        with section("features"):
            batch = samples.images[torch.from_numpy(own)].to(self.device)
            images = self.transform.evaluation(batch)
            return batch_outputs(self.classifier, depth, images, self.experiment.precision)[:count].numpy()

    def samples(self, part: str) -> Samples:
        return self.data.test if part == "test" else self.data.train

    # Clients' data, and how well the model does.

    def client_data(self, client: int, depth: int) -> ClientData:
        """One client's own samples, as `network(depth)` takes them in training."""
        return self.training_data(client, self.training[self.partition.clients[client]], depth)

    def server_data(self, samples: int, depth: int) -> ClientData:
        """A draw of training samples for the server, without those that clients hold out for evaluation."""
        held, training = self.held_out, self.training
        training = training if held is None else np.setdiff1d(training, training[held.positions])
        generator = numpy_generator(self.experiment.seed, "server samples")
        return self.training_data(SERVER, np.sort(generator.permutation(training)[:samples]), depth)

    def training_data(self, client: int, positions: np.ndarray, depth: int) -> ClientData:
        own = torch.from_numpy(positions)
        labels = self.data.train.labels[own].to(self.device)
        if depth:
            outputs = self.frozen_outputs("train", positions, depth)
            return ClientData(client, lambda batch, _: outputs(batch), labels)
        images, transform, device = self.data.train.images, self.transform, self.device
        return ClientData(client, lambda batch, g: transform.training(images[own[batch]].to(device), g), labels)

    def score(self, part: str, positions: np.ndarray, depth: int) -> tuple[Tensor, float]:
        """Whether the current model is right about each sample of a batch, and the sum of their losses."""
        samples, own = self.samples(part), torch.from_numpy(positions)
        with section("evaluate"):
            network = partial(forward, self.network(depth).eval(), precision=self.experiment.precision)
            at_once = len(own) if depth == self.feature_depth else images_at_once(self.device)
            if depth:
                inputs = self.frozen_outputs(part, positions, depth)(torch.arange(len(own)))
            else:
                inputs = self.transform.evaluation(samples.images[own].to(self.device))
            return score_batch(network, inputs, samples.labels[own], at_once)

    def holdings(self) -> dict[str, Any]:
        """How many training samples of each class the first clients hold; no clients where that is not known."""
        counts = self.roles.class_counts(0, WRITTEN_DOWN)
        held = [{str(k): int(row[k]) for k in row.nonzero()[0]} for row in counts] if counts is not None else []
        return {"classes": self.data.classes, "count": len(self.sizes), "clients": held}

    def by_class_shares(self, score: Score) -> list[float | None]:
        """Each client's accuracy on the test set, weighted by its class shares; `score` is the model's on that set.

        None for each client if their classes are not known here.
        """
        clients, accuracies = len(self.sizes), list[float | None]()
        for first in range(0, clients, AT_A_TIME):
            some = self.roles.class_counts(first, first + AT_A_TIME)
            if some is None:
                return [None] * clients
            accuracies += by_class_shares(score.correct.numpy(), self.data.test.labels.numpy(), some)
        return accuracies
