"""Which images play which part in an experiment: training at clients, validation, evaluation at clients.

A simulation has all images. In a federation the server has the validation and test images, and each node its own;
what they must know of the others is in the federation's manifest (`federation.py`).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128

from fedsieve.config.schema import Experiment
from fedsieve.data.holdout import stratified
from fedsieve.data.load import Dataset, Samples, Statistics, load
from fedsieve.data.partition import Split, split_clients
from fedsieve.data.parts import Parts
from fedsieve.errors import InputError
from fedsieve.randomness import numpy_generator

if TYPE_CHECKING:
    from fedsieve.data.manifest import Federation


@dataclass(frozen=True)
class Roles:
    """Which images play which part, as far as this process has them, and what it knows of those it does not have.

    Positions of training, validation and held-out samples are those in `data.train`; `partition` and `held_out` have
    positions in `training`.
    """

    data: Dataset  # what this process has
    training: np.ndarray  # what clients train on or hold out
    validation: np.ndarray
    validation_sample: np.ndarray  # what rounds are evaluated on
    partition: Split
    held_out: Parts | None  # what each client keeps for its own evaluation; None: nobody is asked to
    sizes: np.ndarray  # training samples of each client, also of those whose samples are elsewhere
    training_samples: int  # of all clients, with those that they hold out
    all_images: int  # of all parts, wherever they are
    statistics: Statistics | None = None  # of all training images; None: those of `data.train`
    known_counts: np.ndarray | None = None  # training samples by (client, class), where samples are elsewhere
    known_fingerprint: str | None = None  # of all data, where some is elsewhere
    is_whole: bool = True  # whether all images are here

    @cached_property
    def data_fingerprint(self) -> str:
        """A hash of the whole data set, as the run's result shows it."""
        return self.known_fingerprint or fingerprint_of(self.data)

    def fingerprint(self, weights: Tensor) -> str:
        """A hash of the data and of the first weights, which is all that a run starts from besides its experiment."""
        if self.known_fingerprint is None:
            return fingerprint_of(self.data, weights)
        digest = xxh3_128(self.known_fingerprint.encode())
        digest.update(weights.cpu().numpy().data)
        return digest.hexdigest()

    def class_counts(self, first: int, stop: int) -> np.ndarray | None:
        """Training samples by (client, class) of the clients from `first` to `stop`; None if they are not known."""
        if self.known_counts is not None:
            return self.known_counts[first:stop]
        if not self.is_whole:
            return None
        return self.partition.clients[first:stop].count_classes(self._labels, len(self.data.classes))

    @cached_property
    def _labels(self) -> np.ndarray:
        """Of the training samples."""
        return self.data.train.labels.numpy()[self.training]


def roles_of(experiment: Experiment, data: Dataset) -> Roles:
    """In a simulation, where all images are in one place."""
    training, validation = hold_out_validation(experiment, data)
    sample = sample_validation(experiment, data, validation)
    partition, held_out = hold_out_at_clients(experiment, split_training(experiment, data, training))
    images = len(data.train) + len(data.test)
    sizes = partition.clients.sizes
    return Roles(data, training, validation, sample, partition, held_out, sizes, len(training), images)


def roles_of_server(experiment: Experiment, federation: "Federation", server_data: Dataset | None) -> Roles:
    """At the server of a federation, which has no training images.

    `server_data.train` are the validation images and `server_data.test` the test images; None: it has neither.
    """
    federation.must_fit(experiment)
    data = server_data or Dataset(nothing_of(federation), nothing_of(federation), federation.classes)
    federation.must_have(data)
    validation = np.arange(len(data.train))
    if not len(validation) and not experiment.clients.holdout:
        for key, asks in (
            ("evaluate.keep: best", experiment.evaluate.keep == "best"),
            ("phases.*.stop", any(phase.stop for phase in experiment.phases)),
        ):
            if asks:
                raise InputError(
                    f"{key} needs validation images, and the server has none; set clients.holdout, so that clients "
                    "evaluate, or leave it out"
                )
    nobody = [np.empty(0, dtype=np.int64)] * len(federation.clients)
    return _of_federation(experiment, federation, data, validation, nobody, nobody)


def roles_of_node(experiment: Experiment, federation: "Federation", samples: Samples, client: int) -> Roles:
    """At the node of one client, which has this client's samples, in the simulation's order, and no others."""
    federation.must_fit(experiment)
    federation.must_be_of(client, samples)
    share, size = experiment.clients.holdout, len(samples)
    is_held = np.zeros(size, dtype=bool)
    is_held[_held_out_of(experiment, client, size, int(held_counts(share, np.array([size]))[0]))] = True
    kept, held = ([np.empty(0, dtype=np.int64)] * len(federation.clients) for _ in range(2))
    kept[client], held[client] = np.flatnonzero(~is_held), np.flatnonzero(is_held)
    data = Dataset(samples, nothing_of(federation, samples), federation.classes)
    return _of_federation(experiment, federation, data, np.empty(0, dtype=np.int64), kept, held)


def _of_federation(
    experiment: Experiment,
    federation: "Federation",
    data: Dataset,
    validation: np.ndarray,
    kept: list[np.ndarray],
    held: list[np.ndarray],
) -> Roles:
    """Roles in a process that has some of the images, and the manifest for the rest."""
    has_holdout = experiment.clients.holdout > 0
    samples = federation.samples
    return Roles(
        data=data,
        training=np.arange(sum(map(len, kept)) + sum(map(len, held))),
        validation=validation,
        validation_sample=sample_validation(experiment, data, validation),
        partition=Split(Parts.of(kept), []),
        held_out=Parts.of(held) if has_holdout else None,
        sizes=samples - held_counts(experiment.clients.holdout, samples),
        training_samples=int(samples.sum()),
        all_images=federation.images or int(samples.sum()),
        statistics=federation.statistics,
        known_counts=None if has_holdout else federation.class_counts,  # what is held out is not known by class
        known_fingerprint=federation.data_fingerprint,
        is_whole=False,
    )


def nothing_of(federation: "Federation", like: Samples | None = None) -> Samples:
    """No samples, of the shape that the federation's have."""
    shape = like.images.shape[1:] if like is not None else federation.image_shape or (3, 1, 1)
    return Samples(torch.empty((0, *shape), dtype=torch.uint8), torch.empty(0, dtype=torch.int64))


def hold_out_validation(experiment: Experiment, data: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Positions in the official training set of (what clients train on, the validation set)."""
    labels = data.train.labels.numpy()
    held = round(experiment.data.validation * len(labels))
    if held == 0 and experiment.evaluate.keep == "best" and not experiment.clients.holdout:
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


def hold_out_at_clients(experiment: Experiment, split: Split) -> tuple[Split, Parts | None]:
    """What clients train on, and the samples that each keeps for its own evaluation; None if nobody asks for any."""
    share = experiment.clients.holdout
    if share == 0:
        return split, None
    sizes = split.clients.sizes
    counts = held_counts(share, sizes)
    positions = split.clients.positions
    is_held = np.zeros(len(positions), dtype=bool)
    for client in np.flatnonzero(counts).tolist():
        own = _held_out_of(experiment, client, int(sizes[client]), counts[client])
        is_held[split.clients.edges[client] + own] = True
    kept, held = Parts(positions[~is_held], sizes - counts), Parts(positions[is_held], counts)
    without = int((counts == 0).sum())
    notes = [f"clients.holdout {share} leaves {without} clients without a sample to evaluate on"] * bool(without)
    return Split(kept, split.notes + notes), held


def training_samples(experiment: Experiment, samples: int) -> int:
    """How many a client with so many samples trains on."""
    return samples - int(held_counts(experiment.clients.holdout, np.array([samples]))[0])


def held_counts(share: float, sizes: np.ndarray) -> np.ndarray:
    """How many of its samples each client holds out; something to train on is left."""
    return np.minimum(np.rint(share * sizes).astype(np.int64), sizes - 1)


def _held_out_of(experiment: Experiment, client: int, size: int, count: int) -> np.ndarray:
    """Which of its samples a client holds out: the same wherever it is asked, and whoever the others are."""
    return numpy_generator(experiment.seed, "holdout", client).permutation(size)[:count]


def class_counts(experiment: Experiment) -> tuple[np.ndarray, list[str], list[str]]:
    """Who holds what: samples by (client, class), the classes' names, and what there is to say about it."""
    data = load(experiment.data)
    training, _ = hold_out_validation(experiment, data)
    split = split_training(experiment, data, training)
    labels = data.train.labels.numpy()[training]
    return split.clients.count_classes(labels, len(data.classes)), data.classes, data.notes + split.notes


def fingerprint_of(data: Dataset, *weights: Tensor) -> str:
    """A hash of the data; with the first weights, of all that a run starts from besides its experiment."""
    digest = xxh3_128(f"{data.train.fingerprint} {data.test.fingerprint} {data.classes}".encode())
    for tensor in (data.train.labels, data.test.labels, *weights):
        digest.update(tensor.cpu().numpy().data)
    return digest.hexdigest()
