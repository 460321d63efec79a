"""What the rounds of an experiment work with: the data, who holds what of it, and the model.

Making a workbench finds whatever is wrong with the input, and writes nothing but the cache.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.config import Experiment
from fedsieve.data.holdout import stratified
from fedsieve.data.load import Dataset, Samples, load
from fedsieve.data.split import Split, split_clients
from fedsieve.data.transform import Transform
from fedsieve.errors import InputError
from fedsieve.evaluate import Score, by_class_shares, evaluate
from fedsieve.federate.client import ClientData
from fedsieve.model.classifier import Classifier, build_classifier
from fedsieve.model.features import (
    feature_depth,
    frozen_depth,
    frozen_fingerprint,
    frozen_outputs,
    network_behind,
    worth_keeping,
)
from fedsieve.model.flat import FlatModel
from fedsieve.randomness import numpy_generator

SERVER = -1  # in the place of a client's number
SLOW = 2000  # so many images take long enough to show progress


class Observer:
    """Hears what a run does; this one keeps silent, the command line's shows it to a person."""

    def note(self, text: str) -> None: ...
    def warning(self, text: str) -> None: ...
    def features(self, done: int, total: int) -> None: ...
    def calibration(self, done: int, total: int) -> None: ...
    def started(self, rounds: int, done: int) -> None: ...
    def round(self, line: dict[str, Any]) -> None: ...


class Workbench:
    def __init__(self, experiment: Experiment, observer: Observer, classifier: Classifier | None = None) -> None:
        self.observer = observer
        self.device = experiment.device
        self.data: Dataset = load(experiment.data)
        self.training, self.validation = hold_out_validation(experiment, self.data)
        self.validation_sample = sample_validation(experiment, self.data, self.validation)
        self.split, self.held_out = hold_out_at_clients(
            experiment, split_training(experiment, self.data, self.training)
        )
        self.transform = Transform(experiment.data, self.data.train)
        self.classifier = classifier or build_classifier(experiment, self.data.classes)
        self.model = FlatModel(self.classifier, self.device)
        self.fingerprint = fingerprint_of(self.data, self.model.vector)
        self.depth = 0  # how much of the network stands still in the phase under way
        self._known: dict[str, Tensor] = {}  # features of the training and the test set
        self._fingerprints: dict[int, str] = {}  # of what stands still, by depth
        for note in self.data.notes + self.split.notes:
            observer.note(note)

    # How a phase sees the samples: where the network's beginning stands still, through the cache of its output.

    def begin_phase(self, active: Iterable[str]) -> None:
        """To be called when the tensors with these names are about to change."""
        self.depth = frozen_depth(self.classifier, active)
        samples = len(self.data.train) + len(self.data.test)
        if not worth_keeping(self.classifier, self.depth, samples):
            self.depth = 0
        self._known.clear()
        self._fingerprints.clear()

    def network(self, depth: int) -> nn.Module:
        return network_behind(self.classifier, depth)

    def frozen_outputs(self, samples: Samples, positions: np.ndarray, depth: int) -> Callable[[Tensor], Tensor]:
        """Numbers among `positions` to what `network(depth)` takes."""
        if depth == feature_depth(self.classifier):  # features are small: those of all samples are kept, for every use
            known, where = self._cached(samples, None, depth, self.observer.features), torch.from_numpy(positions)
            return lambda batch: known[where[batch]].to(self.device)
        silent = len(positions) < SLOW
        tokens = self._cached(samples, positions, depth, (lambda *_: None) if silent else self.observer.features)
        return lambda batch: tokens[batch].to(self.device)

    def _cached(
        self, samples: Samples, positions: np.ndarray | None, depth: int, progress: Callable[[int, int], None]
    ) -> Tensor:
        """Opened anew each time for a few samples (a client's), kept open for all."""
        if depth not in self._fingerprints:
            self._fingerprints[depth] = frozen_fingerprint(self.classifier, depth)
        part = "test" if samples is self.data.test else "train"
        if positions is None and part in self._known:
            return self._known[part]
        rows = frozen_outputs(
            self.classifier, depth, self._fingerprints[depth], samples, positions, self.transform, self.device, progress
        )
        if positions is None:
            self._known[part] = rows = rows.to(self.device)
        return rows

    def client_data(self, client: int, depth: int) -> ClientData:
        """One client's own samples, as `network(depth)` takes them in training."""
        return self.training_data(client, self.training[self.split.clients[client]], depth)

    def training_data(self, client: int, positions: np.ndarray, depth: int) -> ClientData:
        own = torch.from_numpy(positions)
        labels = self.data.train.labels[own].to(self.device)
        if depth:
            outputs = self.frozen_outputs(self.data.train, positions, depth)
            return ClientData(client, lambda batch, _: outputs(batch), labels)
        images, transform, device = self.data.train.images, self.transform, self.device
        return ClientData(client, lambda batch, g: transform.training(images[own[batch]].to(device), g), labels)

    def score(self, samples: Samples, positions: np.ndarray) -> Score | None:
        """Accuracy and loss of the model on some samples; None without samples."""
        if not len(positions):
            return None
        self.classifier.eval()
        labels = samples.labels[torch.from_numpy(positions)]
        if self.depth:
            inputs = self.frozen_outputs(samples, positions, self.depth)
        else:
            inputs = lambda batch: self.transform.evaluation(samples.images[positions[batch]].to(self.device))  # noqa: E731
        return evaluate(self.network(self.depth), inputs, labels)

    def test_score(self) -> Score | None:
        return self.score(self.data.test, np.arange(len(self.data.test)))

    def client_loss(self, client: int) -> float:
        """Of the model as it stands on the client's own training samples."""
        score = self.score(self.data.train, self.training[self.split.clients[client]])
        return score.loss if score is not None else 0.0

    def client_accuracies(self, score: Score | None = None) -> list[float | None]:
        """Each client's accuracy on its own held-out samples or, without any, on the test set by its class shares.

        `score` is the model's on the test set, if it is known already.
        """
        if self.held_out is None:
            score, labels = score or self.test_score(), self.data.train.labels.numpy()[self.training]
            own = [np.bincount(labels[one], minlength=len(self.data.classes)) for one in self.split.clients]
            if score is None:
                return [None] * len(own)
            return by_class_shares(score.correct.numpy(), self.data.test.labels.numpy(), np.stack(own))
        ends = np.cumsum([len(one) for one in self.held_out])
        score = self.score(self.data.train, self.training[np.concatenate(self.held_out)])
        correct = score.correct.numpy() if score is not None else np.empty(0)
        return [float(part.mean()) if len(part) else None for part in np.split(correct, ends[:-1])]


@dataclass(frozen=True)
class DataHolders:
    """Whose data a mask that all clients share is calibrated from."""

    bench: Workbench
    depth: int
    samples: int  # that the server has
    seed: int

    def clients(self) -> Iterator[ClientData]:
        return (self.bench.client_data(client, self.depth) for client in range(len(self.bench.split.clients)))

    def server(self) -> ClientData:
        generator = numpy_generator(self.seed, "server samples")
        positions = np.sort(generator.permutation(self.bench.training)[: self.samples])
        return self.bench.training_data(SERVER, positions, self.depth)


def fingerprint_of(data: Dataset, weights: Tensor) -> str:
    """A hash of all that a run starts from beside its experiment."""
    digest = hashlib.sha256(f"{data.train.fingerprint} {data.test.fingerprint} {data.classes}".encode())
    for tensor in (data.train.labels, data.test.labels, weights.cpu()):
        digest.update(tensor.numpy().data)
    return digest.hexdigest()


def hold_out_validation(experiment: Experiment, data: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Positions in the official training set of (what clients train on, the validation set)."""
    labels = data.train.labels.numpy()
    held = round(experiment.data.validation * len(labels))
    if held == 0 and experiment.evaluate.keep == "best":
        raise InputError(
            f"evaluate.keep: best, but data.validation {experiment.data.validation} holds out no image; raise it"
        )
    return stratified(labels, held, numpy_generator(experiment.seed, "validation"))


def sample_validation(experiment: Experiment, data: Dataset, validation: np.ndarray) -> np.ndarray:
    """The fixed part of the validation set that rounds are evaluated on."""
    asked = experiment.evaluate.sample
    if asked is None or asked >= len(validation):
        return validation
    labels = data.train.labels.numpy()[validation]
    return validation[stratified(labels, asked, numpy_generator(experiment.seed, "validation sample"))[1]]


def split_training(experiment: Experiment, data: Dataset, training: np.ndarray) -> Split:
    """Who holds which of the training positions."""
    if not len(training):
        raise InputError(f"data.validation {experiment.data.validation} leaves nothing to train on; lower it")
    labels = data.train.labels.numpy()[training]
    clients = experiment.clients
    return split_clients(labels, len(data.classes), clients.count, clients.split, experiment.seed)


def hold_out_at_clients(experiment: Experiment, split: Split) -> tuple[Split, list[np.ndarray] | None]:
    """What clients train on, and the samples that each keeps for its own evaluation; None if nobody asks for any."""
    share = experiment.clients.holdout
    if share == 0:
        return split, None
    kept, held = [], []
    for client, own in enumerate(split.clients):
        order = numpy_generator(experiment.seed, "holdout", client).permutation(own)
        count = min(round(share * len(own)), len(own) - 1)  # something to train on is left
        kept.append(np.sort(order[count:]))
        held.append(np.sort(order[:count]))
    without = sum(not len(one) for one in held)
    notes = [f"clients.holdout {share} leaves {without} clients without a sample to evaluate on"] * bool(without)
    return Split(kept, split.notes + notes), held


def class_counts(experiment: Experiment) -> tuple[np.ndarray, list[str], list[str]]:
    """Who holds what: samples by (client, class), the classes' names, and what there is to say about it."""
    data = load(experiment.data)
    training, _ = hold_out_validation(experiment, data)
    split = split_training(experiment, data, training)
    labels = data.train.labels.numpy()[training]
    counts = np.stack([np.bincount(labels[own], minlength=len(data.classes)) for own in split.clients])
    return counts, data.classes, data.notes + split.notes
