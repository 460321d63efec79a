"""How long experiments would take here: what they compute, counted, times what this machine takes for it, measured."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from fedsieve.config.mask_settings import MaskSettings
from fedsieve.config.model_settings import FLAGSHIP, MlpHead, RidgeHead
from fedsieve.config.partition_settings import ClassesSplit
from fedsieve.config.phase_settings import PhaseSettings
from fedsieve.config.registry import settings_of
from fedsieve.config.schema import Experiment
from fedsieve.config.scope_settings import BlocksScope
from fedsieve.config.settings import option
from fedsieve.data.sizes import data_sizes
from fedsieve.model.backbone import Backbone, load_backbone
from fedsieve.model.vit import ViT, ViTShape
from fedsieve.observe.time_left import PhaseEstimate

Network = tuple[str, int, str, int]  # a backbone, the size of its images, a device, and threads
PATIENCE = 0.08  # seconds after which nothing is timed again
SENSITIVITY = 1.5  # of a training step, for as many images (docs/sieve.md)
MLP = 4  # steps of a linear head take as long as one of an MLP
PER_RUN, PER_ROUND, PER_REPLY = 0.3, 3e-3, 7e-4  # seconds for files, workers, messages
# Seconds for each weight: of an optimizer's step, a client's message, its aggregation, and a choice of active weights.
PER_STEP, PER_MESSAGE, PER_UPDATE, PER_CHOICE = 2.5e-9, 4e-9, 5e-9, 35e-9


@dataclass(frozen=True)
class PhaseWork:
    """What a phase computes. Lists for calibration begin with what comes before the first round."""

    name: str
    replies: int  # clients in a round
    images: float  # that a client trains on in a round
    steps: float  # of a client in a round
    is_on_features: bool  # trains on the backbone's outputs
    first_block: int | None  # that is trained, which may count from the end; None: only the head
    computed_once: float  # images that go through what is frozen
    seen: tuple[float, ...]  # images that are only looked at, in each round
    test: float  # and after the last one
    scored: tuple[float, ...] = ()  # images whose gradients are squared
    choices: tuple[float, ...] = ()  # of active weights by their scores
    by_server: bool = False  # whether masks are calibrated in one process


@dataclass(frozen=True)
class Speed:
    """Seconds that one process takes, and the network's size."""

    trained: float  # for an image forward and backward
    seen: float  # for an image forward
    head_step: float  # for a training step on features
    weights: int = 0
    blocks: int = 0


# ---------------------------------------------------------------------------------------------- what is computed


def work_of(experiment: Experiment) -> list[PhaseWork]:
    """The work of each phase, counted from the settings alone; of random draws, what is expected on average."""
    images, test, _ = data_sizes(experiment.data)
    validation = round(experiment.data.validation * images)
    clients, everything = experiment.clients, float(images + test)
    held = (images - validation) / clients.count
    if isinstance(clients.split, ClassesSplit) and clients.split.per_class_limit is not None:
        held = min(held, clients.split.per_client * clients.split.per_class_limit)
    phases = []
    if isinstance(experiment.model.head, RidgeHead):
        phases.append(PhaseWork("ridge", clients.count, held, 1, True, None, everything, (0.0,), 0.0))
    for phase in experiment.phases:
        local, is_head = phase.local, phase.train == "head"
        scored, choices = _calibration(experiment, phase, held)
        steps = local.steps or (local.epochs or 1) * max(1.0, -(-held // local.batch_size))
        first_block = min(phase.train.blocks) if isinstance(phase.train, BlocksScope) else None if is_head else 0
        work = PhaseWork(
            name=phase.name,
            replies=clients.per_round,
            images=local.epochs * held if local.epochs else (local.steps or 1) * local.batch_size,
            steps=steps * (MLP if isinstance(experiment.model.head, MlpHead) else 1),
            is_on_features=is_head and not experiment.data.augment,
            first_block=first_block,
            computed_once=everything,
            seen=_seen(experiment, phase, held, validation, test),
            test=0.0 if experiment.evaluate.test == "never" else float(test),
            scored=scored,
            choices=choices,
            by_server=phase.mask is not None and phase.mask.scope == "server",
        )
        phases.append(work)
    phases[-1] = replace(phases[-1], test=phases[-1].test + validation)  # all of it, at the end of the run
    return phases


def _seen(experiment: Experiment, phase: PhaseSettings, held: float, validation: int, test: int) -> tuple[float, ...]:
    """Images that are looked at in each round to select clients and to evaluate."""
    evaluate, select = experiment.evaluate, experiment.clients.select
    selection = select.high_loss.candidates * held if option(select) == "high_loss" else 0.0
    scored = min(validation, evaluate.sample or validation) + (test if evaluate.test == "each" else 0)
    numbers = range(1, phase.rounds + 1)
    return tuple(
        selection + (scored if number % evaluate.every == 0 or number == phase.rounds else 0) for number in numbers
    )


def _calibration(
    experiment: Experiment, phase: PhaseSettings, held: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Images whose gradients are squared, for masks and for Fisher mixing, and choices of active weights."""
    clients, mask = experiment.clients, phase.mask
    masks = [0.0] * (phase.rounds + 1) if mask is None else _masks(mask, phase, clients.count, clients.per_round)
    each = looks = 0.0
    if mask is not None and mask.looks_at_data:
        looks = mask.calibration_rounds
        each = looks * (mask.fisher.samples if mask.scope == "server" else min(mask.fisher.samples, held))
        each *= clients.count if mask.scope == "federated" else 1
    scored = [each * one for one in masks]
    fisher = getattr(settings_of(phase.method), "fisher", None)  # a method that scores weights scores those of all
    if fisher is not None:
        scored[0] += clients.count * min(fisher.samples, held)
    return tuple(scored), tuple(looks * one for one in masks)


def _masks(mask: MaskSettings, phase: PhaseSettings, count: int, per_round: int) -> list[float]:
    """How many masks are calibrated before the first round, and in each."""
    if mask.is_shared:
        in_each = 0.0 if mask.refresh == "once" else 1.0
        return [1 - in_each] + phase.rounds * [in_each]
    if mask.refresh == "once":  # by clients that are drawn for the first time
        return [0.0, *(per_round * (1 - per_round / count) ** before for before in range(phase.rounds))]
    each = per_round * ((phase.local.epochs or 1) if mask.refresh == "epoch" else 1)
    return [0.0] + phase.rounds * [float(each)]


# ------------------------------------------------------------------------------------------------ how long it takes


def estimated(work: PhaseWork, speed: Speed, workers: int) -> PhaseEstimate:
    """The seconds of a phase with so many workers; features are counted, though an earlier phase may have them."""
    frozen = _share_frozen(work, speed)  # of the network
    seen, trained = (1 - frozen) * speed.seen, (1 - frozen) * speed.trained
    weights = (1 - frozen) * speed.weights
    if work.is_on_features:
        client = work.steps * speed.head_step
    elif work.first_block is None:  # augmented images go through the backbone, but no gradients
        client = work.images * speed.seen
    else:
        client = work.images * trained + (work.steps * PER_STEP + PER_MESSAGE) * weights
    waves = -(-work.replies // workers)  # of clients that are trained at the same time
    always = waves * client + work.replies * (PER_REPLY + PER_UPDATE * weights) + PER_ROUND
    masks = [
        (scored * SENSITIVITY * trained + choices * PER_CHOICE * weights) / (1 if work.by_server else workers)
        for scored, choices in zip(work.scored, work.choices, strict=True)
    ] or [0.0] * (1 + len(work.seen))
    return PhaseEstimate(
        name=work.name,
        rounds=tuple(always + more + one * seen / workers for more, one in zip(masks[1:], work.seen, strict=True)),
        clients=work.replies,
        start=masks[0],
        features=work.computed_once * frozen * speed.seen / workers,
        end=work.test * seen / workers,
    )


def _share_frozen(work: PhaseWork, speed: Speed) -> float:
    """How much of the network is computed once, since nothing changes in it."""
    if work.first_block is None:
        return 1.0
    first = work.first_block + (speed.blocks if work.first_block < 0 else 0)
    return min(max(first, 0) / speed.blocks, 1.0) if speed.blocks else 0.0


class Estimator:
    """How long experiments would take here, one after another; a network is timed, and its features counted, once."""

    def __init__(self) -> None:
        self.speeds: dict[Network, Speed] = {}
        self.kept: set[Network] = set()  # whose features an earlier experiment has computed

    def phases(self, experiment: Experiment) -> list[PhaseEstimate]:
        """The phases of one run; frozen outputs are counted where they are first needed."""
        settings = _as_here(experiment)
        assert settings.workers != "auto"
        network, kept, phases = network_of(settings), set[int | None](), []
        if network not in self.speeds:
            self.speeds[network] = measured_speed(*network)
        for work in work_of(settings):
            phase = estimated(work, self.speeds[network], settings.workers)
            phases.append(replace(phase, features=0.0) if work.first_block in kept else phase)
            kept = kept | {work.first_block} if work.first_block is None else {work.first_block}  # it changes blocks
        return phases

    def seconds(self, experiment: Experiment, runs: int) -> float:
        """For so many runs of an experiment."""
        if not runs:
            return 0.0
        phases, network = self.phases(experiment), network_of(_as_here(experiment))
        features = sum(phase.features for phase in phases)
        once = 0.0 if network in self.kept else features
        if features:
            self.kept.add(network)
        return once + runs * (PER_RUN + sum(phase.seconds for phase in phases) - features)


def _as_here(experiment: Experiment) -> Experiment:
    """The resolved experiment, on this machine: a cluster is not known before it is joined."""
    if experiment.on_ray is not None:
        experiment = experiment.model_copy(update={"engine": "local", "device": "auto"})
    return experiment.resolved()


# --------------------------------------------------------------------------------------------------- how fast it is


def network_of(settings: Experiment) -> Network:
    """What must be timed for a resolved experiment."""
    assert settings.threads != "auto" and settings.data.image_size is not None
    return settings.model.backbone, settings.data.image_size, settings.device, settings.threads


def measured_speed(backbone: str, image_size: int, device: str, threads: int) -> Speed:
    """Time a few images through the network, forward and backward; nothing is written or downloaded for DINO."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            return _timed(_network(backbone, image_size).to(device), image_size, device)
    finally:
        torch.set_num_threads(before)  # a run's last bits depend on it


def _timed(network: Backbone, image_size: int, device: str) -> Speed:
    count = 16 if image_size <= 64 else 2  # a batch of 128 at 224 px would take half a minute on a laptop
    images = torch.zeros(2 * count, 3, image_size, image_size, device=device)
    labels = torch.zeros(count, dtype=torch.long, device=device)
    head, features = (torch.zeros(100 if one else 32, network.width, device=device) for one in (True, False))
    head.requires_grad_()

    def train() -> None:
        F.cross_entropy(F.linear(network(images[:count]), head), labels).backward()

    def see() -> None:
        with torch.no_grad():
            network(images)

    def train_head() -> None:
        F.cross_entropy(F.linear(features, head), labels.new_zeros(len(features))).backward()

    trained, seen, head_step = (_best(call, device) for call in (train, see, train_head))
    weights = sum(one.numel() for one in network.parameters())
    return Speed(trained / count, seen / (2 * count), 2 * head_step, weights, len(getattr(network, "blocks", ())))


def _network(backbone: str, image_size: int) -> Backbone:
    if backbone == FLAGSHIP:  # its time does not depend on its weights, which may not be here
        return ViT(ViTShape(image_size, patch_size=16, width=384, depth=12, heads=6, hidden=1536))
    return load_backbone(backbone, image_size)


def _best(call: Callable[[], None], device: str) -> float:
    """Seconds of the quickest call; after the first, which may prepare things, as many as there is patience for."""
    times: list[float] = []
    while len(times) < 2 or (len(times) < 20 and sum(times) < PATIENCE):
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)
