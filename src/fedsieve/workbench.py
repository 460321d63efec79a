"""What the rounds of an experiment work with: the data, who holds what of it, and the model.

Making a workbench finds whatever is wrong with the input, and writes nothing but the cache.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from xxhash import xxh3_128

from fedsieve.cache import size_limit
from fedsieve.config import Experiment
from fedsieve.data.holdout import stratified
from fedsieve.data.load import Dataset, Samples, load
from fedsieve.data.parts import Parts
from fedsieve.data.split import Split, split_clients
from fedsieve.data.transform import Transform
from fedsieve.errors import InputError
from fedsieve.evaluate import BATCH, Score, by_class_shares, joined, score_batch
from fedsieve.federate.client import ClientData
from fedsieve.federate.jobs import Answer, Ask, Desk, Job
from fedsieve.model.classifier import Classifier, build_classifier
from fedsieve.model.compiled import compile_blocks
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
from fedsieve.model.flat import FlatModel, merged
from fedsieve.observer import Observer
from fedsieve.precision import forward, notes_on
from fedsieve.profile import section, stopwatch
from fedsieve.randomness import numpy_generator

SERVER = -1  # in the place of a client's number
SYNCHRONIZE = "FEDSIEVE_SYNCHRONIZE"  # set by --profile: a GPU is waited for, to know what takes the time
TRIM_THRESHOLD, MMAP_THRESHOLD, NEVER = -1, -3, (1 << 31) - 1  # of glibc's mallopt
SLOW = 2000  # so many images take long enough to show progress
AT_A_TIME = 4096  # clients whose class counts are held at once
WRITTEN_DOWN = 200  # clients of whom the run's folder says which classes they hold


class Workbench:
    """Its heavy work is cut into jobs, done at its own desk unless `ask` is someone else's."""

    def __init__(
        self,
        experiment: Experiment,
        observer: Observer,
        classifier: Classifier | None = None,
        data: Dataset | None = None,
    ) -> None:
        size_limit()  # fails now if $FEDSIEVE_CACHE_GB is no size
        self.observer = observer
        self.device = experiment.device
        self.precision, self.is_compiled = experiment.precision, experiment.compile
        self.desk = Desk()
        self.desk.handlers |= {"score": self._score_batch, "outputs": self._outputs, "loss": self._loss}
        self.ask: Ask = self.desk.ask
        self.data: Dataset = data or load(experiment.data)
        self.training, self.validation = hold_out_validation(experiment, self.data)
        self.validation_sample = sample_validation(experiment, self.data, self.validation)
        self.split, self.held_out = hold_out_at_clients(
            experiment, split_training(experiment, self.data, self.training)
        )
        self.transform = Transform(experiment.data, self.data.train)
        self.classifier = classifier or build_classifier(experiment, self.data.classes)
        self.model = FlatModel(self.classifier, self.device)
        if self.is_compiled:
            compile_blocks(self.classifier, self.device)
        self.phase = 0  # the place of the phase under way among all
        self.begun = 0  # how often what stands still has changed
        self.depth = 0  # how much of the network stands still in the phase under way
        self.moving: list[tuple[int, int]] = []  # the ranges of the model's vector that may change in it
        self._known: dict[str, Tensor] = {}  # features of the training and the test set
        self._fingerprints: dict[int, str] = {}  # of what stands still, by depth
        self.noted: dict[str, str] = {}  # by topic
        for note in self.data.notes + self.split.notes + notes_on(self.precision, self.device):
            self.note(note)

    def note(self, text: str, topic: str | None = None) -> None:
        """Tell a person, once about each topic (or text, without one)."""
        if (topic or text) not in self.noted:
            self.noted[topic or text] = text
            self.observer.note(text)

    @cached_property
    def fingerprint(self) -> str:
        """Of all that a run starts from; to be asked for before the first weight changes."""
        return fingerprint_of(self.data, self.model.vector)

    # How a phase sees the samples: where the network's beginning stands still, through the cache of its output.

    def begin_phase(self, active: Iterable[str]) -> None:
        """To be called when the tensors with these names are about to change."""
        active = set(active)
        self.depth = frozen_depth(self.classifier, active)
        samples = len(self.data.train) + len(self.data.test)
        if self.depth and (reason := too_large_to_keep(self.classifier, self.depth, samples)):
            self.note(reason, "cache")
            self.depth = 0
        entries = self.model.entries
        self.moving = merged((entry.start, entry.stop) for entry in entries if entry.is_buffer or entry.name in active)
        self.begun += 1
        self.forget()

    def forget(self) -> None:
        """What was known of the part that stands still: it may be another now."""
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
        part = self._part(samples)
        if positions is None and part in self._known:
            return self._known[part]
        about, own = {"part": part, "depth": depth}, b"" if positions is None else positions.astype(np.int64)

        def compute(starts: Iterable[int]) -> Iterator[np.ndarray]:
            for answer in self.ask(Job("outputs", about | {"first": first}, own) for first in starts):
                yield np.frombuffer(answer.data, np.float32)

        with section("features"):
            rows = frozen_outputs(
                self.classifier,
                depth,
                self._fingerprints[depth],
                samples,
                positions,
                self.transform,
                self.device,
                compute,
                self.precision,
                self.is_compiled,
                progress,
                lambda text: self.note(text, "cache"),  # what cannot be kept for one client cannot be for the next
            )
        if positions is None:
            self._known[part] = rows = rows.to(self.device)
        return rows

    def _outputs(self, job: Job) -> Answer:
        """The frozen part's outputs for one batch of samples."""
        samples, positions = self._samples(job.about["part"]), np.frombuffer(job.data, np.int64)
        first, depth = job.about["first"], job.about["depth"]
        own = positions if len(positions) else np.arange(len(samples))
        with section("features"):
            batch = samples.images[torch.from_numpy(own[first : first + images_at_once(self.device)])].to(self.device)
            rows = batch_outputs(self.classifier, depth, self.transform.evaluation(batch), self.precision)
        return Answer({}, rows.numpy())

    def _part(self, samples: Samples) -> str:
        return "test" if samples is self.data.test else "train"

    def _samples(self, part: str) -> Samples:
        return self.data.test if part == "test" else self.data.train

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
        if on_features := self.depth == feature_depth(self.classifier):
            self.frozen_outputs(samples, positions, self.depth)  # of all: whoever does a job finds them in the cache
        about, own = {"part": self._part(samples), "depth": self.depth}, positions.astype(np.int64)
        jobs = (Job("score", about, own[first : first + BATCH], on_features) for first in range(0, len(own), BATCH))
        with section("evaluate"):
            return joined((np.frombuffer(answer.data, bool), answer.about["loss"]) for answer in self.ask(jobs))

    def _score_batch(self, job: Job) -> Answer:
        """The score of one batch of samples."""
        samples, depth = self._samples(job.about["part"]), job.about["depth"]
        positions = np.frombuffer(job.data, np.int64).copy()
        own = torch.from_numpy(positions)
        with section("evaluate"):
            network = partial(forward, self.network(depth).eval(), precision=self.precision)
            at_once = len(own) if depth == feature_depth(self.classifier) else images_at_once(self.device)
            if depth:
                inputs = self.frozen_outputs(samples, positions, depth)(torch.arange(len(own)))
            else:
                inputs = self.transform.evaluation(samples.images[own].to(self.device))
            correct, loss = score_batch(network, inputs, samples.labels[own], at_once)
        return Answer({"loss": loss}, correct.numpy())

    def test_score(self) -> Score | None:
        return self.score(self.data.test, np.arange(len(self.data.test)))

    def _loss(self, job: Job) -> Answer:
        """Of the model as it stands on a client's own training samples."""
        score = self.score(self.data.train, self.training[self.split.clients[job.about["client"]]])
        return Answer({"loss": score.loss if score is not None else 0.0})

    def holdings(self) -> dict[str, Any]:
        """Who holds how many training samples of which class, of the first clients."""
        labels, clients = self.data.train.labels.numpy()[self.training], self.split.clients
        counts = clients[:WRITTEN_DOWN].count_classes(labels, len(self.data.classes))
        held = [{str(k): int(row[k]) for k in row.nonzero()[0]} for row in counts]
        return {"classes": self.data.classes, "count": len(clients), "clients": held}

    def client_accuracies(self, score: Score | None = None) -> list[float | None]:
        """Each client's accuracy on its own held-out samples or, without any, on the test set by its class shares.

        `score` is the model's on the test set, if it is known already.
        """
        if self.held_out is None:
            score, labels = score or self.test_score(), self.data.train.labels.numpy()[self.training]
            if score is None:
                return [None] * len(self.split.clients)
            accuracies: list[float | None] = []
            for first in range(0, len(self.split.clients), AT_A_TIME):
                some = self.split.clients[first : first + AT_A_TIME].count_classes(labels, len(self.data.classes))
                accuracies += by_class_shares(score.correct.numpy(), self.data.test.labels.numpy(), some)
            return accuracies
        score = self.score(self.data.train, self.training[self.held_out.positions])
        correct = score.correct.numpy() if score is not None else np.empty(0)
        parts = (correct[start:end] for start, end in pairwise(self.held_out.edges))
        return [float(part.mean()) if len(part) else None for part in parts]


@dataclass(frozen=True)
class DataHolders:
    """Whose data a mask that all clients share is calibrated from."""

    bench: Workbench
    depth: int
    samples: int  # that the server has
    seed: int

    @property
    def sizes(self) -> np.ndarray:
        return self.bench.split.clients.sizes

    def client(self, client: int) -> ClientData:
        return self.bench.client_data(client, self.depth)

    def server(self) -> ClientData:
        return self.bench.training_data(SERVER, self.server_positions(), self.depth)

    def server_positions(self) -> np.ndarray:
        """A draw of training samples, without those that clients hold out: a mask must not know what evaluates it."""
        held, training = self.bench.held_out, self.bench.training
        training = training if held is None else np.setdiff1d(training, training[held.positions])
        return np.sort(numpy_generator(self.seed, "server samples").permutation(training)[: self.samples])


def fingerprint_of(data: Dataset, *weights: Tensor) -> str:
    """A hash of the data; with the first weights, of all that a run starts from beside its experiment."""
    digest = xxh3_128(f"{data.train.fingerprint} {data.test.fingerprint} {data.classes}".encode())
    for tensor in (data.train.labels, data.test.labels, *weights):
        digest.update(tensor.cpu().numpy().data)
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


def configure_torch(experiment: Experiment, worker: int = 0) -> None:
    """The same command on the same machine gives the same bits; workers take turns at the GPUs."""
    assert experiment.threads != "auto"
    torch.set_num_threads(experiment.threads)
    _keep_freed_memory()
    if experiment.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        torch.cuda.set_device(worker % torch.cuda.device_count())
        stopwatch.synchronize = torch.cuda.synchronize if os.environ.get(SYNCHRONIZE) else None


def _keep_freed_memory() -> None:
    """Let glibc keep large pieces of memory that are freed, as they are asked for again in a moment.

    To give them back to the system and get them anew, page by page, would take some 3% of a training step, and more
    than half of the time of adding up the updates.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if change is not None:
        change(TRIM_THRESHOLD, NEVER)
        change(MMAP_THRESHOLD, NEVER)
