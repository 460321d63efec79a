"""How long experiments would take here: what they compute, counted, times what this machine takes for it, measured."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from fedsieve.config.mask_settings import MaskSettings
from fedsieve.config.model_settings import FLAGSHIP, RidgeHead
from fedsieve.config.partition_settings import ClassesSplit
from fedsieve.config.phase_settings import PhaseSettings
from fedsieve.config.registry import settings_of
from fedsieve.config.schema import Experiment
from fedsieve.config.settings import option
from fedsieve.data.sizes import data_sizes
from fedsieve.model.backbone import Backbone, load_backbone
from fedsieve.model.vit import ViT, ViTShape

Network = tuple[str, int, str]  # a backbone, the size of its images, and a device
SENSITIVITY = 1.45  # of a training step, for as many images (docs/sieve.md)
PATIENCE = 2.0  # seconds after which nothing is timed again
PER_RUN, PER_ROUND = 0.3, 0.03  # seconds for files, workers, aggregation: coarse, and little in any long run


@dataclass(frozen=True)
class Work:
    """What an experiment computes."""

    trained: float  # images that go forward and backward through the network
    seen: float  # images that only go forward
    features: float  # images that go forward once, for all runs that leave the same backbone alone
    head_steps: float  # training steps on features
    rounds: int


@dataclass(frozen=True)
class Speed:
    """Seconds that one thread takes for each."""

    trained: float
    seen: float
    head_step: float


def work_of(experiment: Experiment) -> Work:
    """Counted from the settings alone; how often clients are drawn twice is what is expected on average."""
    images, test, _ = data_sizes(experiment.data)
    validation = round(experiment.data.validation * images)
    held = (images - validation) / experiment.clients.count
    split = experiment.clients.split
    if isinstance(split, ClassesSplit) and split.per_class_limit is not None:
        held = min(held, split.per_client * split.per_class_limit)
    trained = seen = head_steps = 0.0
    features = float(images + test) if isinstance(experiment.model.head, RidgeHead) else 0.0
    for phase in experiment.phases:
        replies = phase.rounds * experiment.clients.per_round
        own = (phase.local.epochs or 0) * held or (phase.local.steps or 0) * phase.local.batch_size
        if phase.train == "head" and not experiment.data.augment:  # on features, computed once
            head_steps += replies * max(1.0, own / phase.local.batch_size)
            features = float(images + test)
        else:
            trained += replies * own + SENSITIVITY * _scored(experiment, phase, held)
            seen += phase.rounds / experiment.evaluate.every * min(validation, experiment.evaluate.sample or validation)
            seen += test
        if option(experiment.clients.select) == "high_loss":
            seen += phase.rounds * experiment.clients.select.high_loss.candidates * held
    return Work(trained, seen, features, head_steps, sum(phase.rounds for phase in experiment.phases))


def _scored(experiment: Experiment, phase: PhaseSettings, held: float) -> float:
    """Images whose gradients are squared, for masks and for Fisher mixing."""
    clients, method = experiment.clients, settings_of(phase.method)
    fisher = getattr(method, "fisher", None)  # a method that scores weights scores those of every client
    scored = clients.count * min(fisher.samples, held) if fisher is not None else 0.0
    mask = phase.mask
    if mask is None or not mask.looks_at_data:
        return scored
    looks = mask.calibration_rounds * _masks(mask, phase, clients.count, clients.per_round)
    return scored + looks * (mask.fisher.samples if mask.scope == "server" else min(mask.fisher.samples, held))


def _masks(mask: MaskSettings, phase: PhaseSettings, count: int, per_round: int) -> float:
    """How many masks are calibrated from somebody's samples."""
    if mask.scope == "server":
        return 1 if mask.refresh == "once" else phase.rounds
    if mask.refresh == "once":  # all clients, or those that are ever drawn
        return count if mask.scope == "federated" else count * (1 - (1 - per_round / count) ** phase.rounds)
    each = count if mask.scope == "federated" else per_round
    return phase.rounds * each * ((phase.local.epochs or 1) if mask.refresh == "epoch" else 1)


def seconds_for(work: Work, speed: Speed, threads: int) -> float:
    """Estimated for one run without its features, as if all threads of all workers shared the heavy parts evenly."""
    heavy = work.trained * speed.trained + work.seen * speed.seen + work.head_steps * speed.head_step
    return heavy / threads + work.rounds * PER_ROUND + PER_RUN


class Estimator:
    """How long experiments would take here, one after another; a network is timed, and its features counted, once."""

    def __init__(self) -> None:
        self.speeds: dict[Network, Speed] = {}
        self.kept: set[Network] = set()  # whose features an earlier experiment has computed

    def seconds(self, experiment: Experiment, runs: int) -> float:
        """For so many runs of an experiment."""
        if not runs:
            return 0.0
        settings = experiment.resolved()
        assert settings.workers != "auto" and settings.threads != "auto" and settings.data.image_size is not None
        network: Network = (settings.model.backbone, settings.data.image_size, settings.device)
        speed = self.speeds[network] = self.speeds.get(network) or measured_speed(*network)
        work, threads = work_of(settings), settings.threads * settings.workers
        seconds = runs * seconds_for(work, speed, threads)
        if work.features and network not in self.kept:
            self.kept.add(network)
            seconds += work.features * speed.seen / threads
        return seconds


def measured_speed(backbone: str, image_size: int, device: str) -> Speed:
    """Time a few images through the network, forward and backward; nothing is written or downloaded for DINO."""
    torch.set_num_threads(1)
    network = _network(backbone, image_size).to(device)
    head = nn.Linear(network.width, 100).to(device)
    count = 32 if image_size <= 64 else 2  # a batch of 128 at 224 px would take half a minute on a laptop
    images = torch.zeros(count, 3, image_size, image_size, device=device)
    labels = torch.zeros(count, dtype=torch.long, device=device)
    features = torch.zeros(64, network.width, device=device)

    def train() -> None:
        F.cross_entropy(head(network(images)), labels).backward()

    def see() -> None:
        with torch.no_grad():
            network(images)

    def train_head() -> None:
        F.cross_entropy(head(features), labels.new_zeros(64)).backward()

    return Speed(_best(train, device) / count, _best(see, device) / count, 3 * _best(train_head, device))


def _network(backbone: str, image_size: int) -> Backbone:
    if backbone == FLAGSHIP:  # its time does not depend on its weights, which may not be here
        return ViT(ViTShape(image_size, patch_size=16, width=384, depth=12, heads=6, hidden=1536))
    return load_backbone(backbone, image_size)


def _best(call: Callable[[], None], device: str) -> float:
    """Seconds of the quickest of three calls, or of fewer if they take long."""
    times: list[float] = []
    while len(times) < 3 and sum(times) < PATIENCE:
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)
