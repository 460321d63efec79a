"""What the rounds of an experiment work with: the data, who holds what of it, and the model.

Making a workbench finds whatever is wrong with the input, and writes nothing but the cache.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.config import Experiment
from fedsieve.data.holdout import stratified
from fedsieve.data.load import Dataset, Samples, load
from fedsieve.data.split import Split, split_clients
from fedsieve.data.transform import Transform
from fedsieve.errors import InputError
from fedsieve.evaluate import Score, evaluate
from fedsieve.federate.client import ClientData
from fedsieve.model.classifier import Classifier, build_classifier
from fedsieve.model.features import features
from fedsieve.model.flat import FlatModel, Scope
from fedsieve.randomness import numpy_generator


class Observer:
    """Hears what a run does; this one keeps silent, the command line's shows it to a person."""

    def note(self, text: str) -> None: ...
    def features(self, done: int, total: int) -> None: ...
    def started(self, rounds: int, done: int) -> None: ...
    def round(self, line: dict[str, Any]) -> None: ...


class Workbench:
    def __init__(self, experiment: Experiment, observer: Observer, classifier: Classifier | None = None) -> None:
        self.observer = observer
        self.device = experiment.device
        self.data: Dataset = load(experiment.data)
        self.training, self.validation = hold_out_validation(experiment, self.data)
        self.validation_sample = sample_validation(experiment, self.data, self.validation)
        self.split = split_training(experiment, self.data, self.training)
        self.transform = Transform(experiment.data, self.data.train)
        self.classifier = classifier or build_classifier(experiment, self.data.classes)
        self.model = FlatModel(self.classifier, self.device)
        self.fingerprint = fingerprint_of(self.data, self.model.vector)
        self._features: dict[str, Tensor] = {}
        for note in self.data.notes + self.split.notes:
            observer.note(note)

    # How a phase sees the samples: through the cache of features wherever the backbone stands still.

    def features(self, samples: Samples) -> Tensor:
        """The features of the training or the test set, for the backbone as it is now."""
        part = "test" if samples is self.data.test else "train"
        if part not in self._features:
            self._features[part] = features(
                self.classifier, samples, self.transform, self.device, self.observer.features
            )
        return self._features[part]

    def forget_features(self) -> None:
        """To be called when the backbone is about to change."""
        self._features.clear()

    def client_data(self, client: int, on_features: bool) -> ClientData:
        """One client's own samples, as features or as images seen through the training transform."""
        own = torch.from_numpy(self.training[self.split.clients[client]])
        labels = self.data.train.labels[own].to(self.device)
        if on_features:
            known = self.features(self.data.train)
            return ClientData(client, lambda batch, _: known[own[batch]], labels)
        images, transform, device = self.data.train.images, self.transform, self.device
        return ClientData(client, lambda batch, g: transform.training(images[own[batch]].to(device), g), labels)

    def score(self, samples: Samples, positions: np.ndarray, scope: Scope) -> Score | None:
        """Accuracy and loss of the model on some samples; None without samples."""
        if not len(positions):
            return None
        self.classifier.eval()
        where = torch.from_numpy(positions)
        if scope.trains_backbone:
            return evaluate(self.classifier, self._images(samples), samples.labels, where)
        known = self.features(samples)
        return evaluate(self.classifier.head, lambda batch: known[batch], samples.labels, where)

    def test_score(self, scope: Scope) -> Score | None:
        return self.score(self.data.test, np.arange(len(self.data.test)), scope)

    def _images(self, samples: Samples) -> Callable[[Tensor], Tensor]:
        return lambda batch: self.transform.evaluation(samples.images[batch].to(self.device))


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


def class_counts(experiment: Experiment) -> tuple[np.ndarray, list[str], list[str]]:
    """Who holds what: samples by (client, class), the classes' names, and what there is to say about it."""
    data = load(experiment.data)
    training, _ = hold_out_validation(experiment, data)
    split = split_training(experiment, data, training)
    labels = data.train.labels.numpy()[training]
    counts = np.stack([np.bincount(labels[own], minlength=len(data.classes)) for own in split.clients])
    return counts, data.classes, data.notes + split.notes
