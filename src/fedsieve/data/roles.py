"""Which images play which part in an experiment: training at clients, validation, evaluation at clients."""

import numpy as np

from fedsieve.config.schema import Experiment
from fedsieve.data.holdout import stratified
from fedsieve.data.load import Dataset, load
from fedsieve.data.partition import Split, split_clients
from fedsieve.data.parts import Parts
from fedsieve.errors import InputError
from fedsieve.randomness import numpy_generator


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


def hold_out_at_clients(experiment: Experiment, split: Split) -> tuple[Split, Parts | None]:
    """What clients train on, and the samples that each keeps for its own evaluation; None if nobody asks for any."""
    share = experiment.clients.holdout
    if share == 0:
        return split, None
    sizes = split.clients.sizes
    counts = np.minimum(np.rint(share * sizes).astype(np.int64), sizes - 1)  # something to train on is left
    positions = split.clients.positions
    is_held = np.zeros(len(positions), dtype=bool)
    for client in np.flatnonzero(counts).tolist():
        order = numpy_generator(experiment.seed, "holdout", client).permutation(int(sizes[client]))
        is_held[split.clients.edges[client] + order[: counts[client]]] = True
    kept, held = Parts(positions[~is_held], sizes - counts), Parts(positions[is_held], counts)
    without = int((counts == 0).sum())
    notes = [f"clients.holdout {share} leaves {without} clients without a sample to evaluate on"] * bool(without)
    return Split(kept, split.notes + notes), held


def class_counts(experiment: Experiment) -> tuple[np.ndarray, list[str], list[str]]:
    """Who holds what: samples by (client, class), the classes' names, and what there is to say about it."""
    data = load(experiment.data)
    training, _ = hold_out_validation(experiment, data)
    split = split_training(experiment, data, training)
    labels = data.train.labels.numpy()[training]
    return split.clients.count_classes(labels, len(data.classes)), data.classes, data.notes + split.notes
