"""What a phase is made of, the same in every process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedsieve.config.local_settings import LocalSettings
from fedsieve.config.model_settings import RidgeHead
from fedsieve.config.phase_settings import PhaseSettings
from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.errors import InputError
from fedsieve.federate.checked_parts import aggregator_of, method_of, server_optimizer_of
from fedsieve.federate.mask_source import KeptMasks, MaskFiles, MaskSource, origin_of
from fedsieve.federate.methods.fedavg import FedAvg
from fedsieve.federate.methods.ridge import Ridge
from fedsieve.federate.transport import Transport
from fedsieve.federate.types import Aggregator, Courier, LocalSetup, ServerOptimizer
from fedsieve.federate.versions import Versions
from fedsieve.model.flat import Scope
from fedsieve.sieve.mask import Mask, shapes_of


@dataclass(frozen=True)
class Phase:
    """A phase's settings, the weights that it may change, and what clients and server do in its rounds."""

    number: int  # its index among all phases
    settings: PhaseSettings
    scope: Scope
    method: FedAvg
    per_round: int  # clients
    altered: slice  # of all weights: those that it or an earlier phase may change, and what lies between them


@dataclass(frozen=True)
class ClientSide:
    """What clients of a phase work with."""

    phase: Phase
    setup: LocalSetup
    transport: Transport
    frozen: int  # how much of the network is frozen
    depth: int  # how much of it clients need not compute


def plan(experiment: Experiment, context: RunContext) -> list[Phase]:
    """The phases in order; a ridge head is a phase of its own, in which every client takes part once."""
    phases: list[Phase] = []
    head, clients = experiment.model.head, experiment.clients
    if isinstance(head, RidgeHead):
        once = PhaseSettings(name="ridge", train="head", rounds=1, local=LocalSettings(epochs=1, lr=0.0))
        scope = context.model.scope("head")
        ridge = Ridge(head.ridge, scope, *how_to_combine(once))
        phases.append(Phase(0, once, scope, ridge, clients.count, altered(scope, phases)))
    for number, settings in enumerate(experiment.phases):
        mask, model = settings.mask, context.model
        try:
            scope = model.scope(settings.train, mask.only, mask.dense) if mask else model.scope(settings.train)
        except InputError as error:
            raise InputError(f"phases.{number}.mask.{error}") from None
        method = method_of(settings.method, scope, *how_to_combine(settings))
        phases.append(Phase(len(phases), settings, scope, method, clients.per_round, altered(scope, phases)))
    return phases


def how_to_combine(settings: PhaseSettings) -> tuple[Callable[[Tensor], Aggregator], ServerOptimizer]:
    """What makes a phase's aggregator for each round, and its server optimizer."""
    return aggregator_of(settings.aggregate), server_optimizer_of(settings.server_optimizer)


def altered(scope: Scope, before: list[Phase]) -> slice:
    """The weights from the first to the last that may change in this scope or in the phases before it."""
    edges = [edge for pair in scope.ranges for edge in pair]
    edges += [before[-1].altered.start, before[-1].altered.stop] if before else []
    return slice(min(edges), max(edges))


def check_mask_files(experiment: Experiment, phases: list[Phase]) -> None:
    """InputError if a phase takes its mask from a file that does not fit."""
    own = phases[len(phases) - len(experiment.phases) :]  # without that of a ridge head
    for number, phase in enumerate(own):
        mask = phase.settings.mask
        if mask is None or mask.file is None:
            continue
        try:
            given = Mask.load(mask.file)
            given.must_fit(shapes_of(phase.scope.sieved.items()), mask.file)
        except InputError as error:
            raise InputError(f"phases.{number}.mask.file: {error}") from None
        if not given.active:
            what = f"phases.{number}.mask.file: {mask.file} freezes every weight"
            raise InputError(f"{what}; give one that leaves some to train")


def mask_files(context: RunContext, phase: Phase, start: Tensor | None, folder: Path) -> MaskFiles:
    """The masks of a phase that are kept in a run's folder."""
    name = phase.settings.name
    origin = origin_of(name, context.experiment.seed, context.fingerprint, start)
    return MaskFiles(folder / "masks" / name, origin, context.note)


def mask_source(context: RunContext, phase: Phase, start: Tensor | None, files: KeptMasks | None) -> MaskSource | None:
    """The source of the masks of a phase's clients; those that are drawn once are kept in `files`."""
    settings, experiment = phase.settings, context.experiment
    if settings.mask is None:
        return None
    if settings.mask.calibration_rounds > 1 and not settings.mask.looks_at_data and settings.mask.file is None:
        context.note(f"calibration_rounds changes nothing for rule {settings.mask.rule}; one is enough")
    network = context.network(calibration_depth(context, phase))
    batch_size = settings.local.batch_size
    seed, scope = experiment.seed, phase.scope
    return MaskSource(settings.mask, scope, network, batch_size, settings.name, seed, start, files, context.note)


def client_side(
    context: RunContext,
    phase: Phase,
    masks: MaskSource | None,
    versions: Versions | None = None,
    done: int = 0,
    courier: Courier | None = None,
) -> ClientSide:
    """What clients of a phase work with, after `done` rounds of it; the server passes its `versions` and a courier."""
    experiment, settings, scope = context.experiment, phase.settings, phase.scope
    active = list(scope.named)
    shared = masks.shared if masks is not None and masks.settings.refresh == "once" else None
    if shared is not None and not any(entry.is_buffer for entry in scope.entries):
        # What it freezes in all rounds need not be computed again (but BatchNorm's statistics would change).
        active = [*(name for name, count in shared.counts().items() if count), *scope.dense]
    frozen = context.frozen_depth(active)
    depth = training_depth(context, phase, frozen)
    carry = settings.optimizer_state == "carry"
    network, seed, precision = context.network(depth), experiment.seed, experiment.precision
    setup = LocalSetup(scope, network, settings.local, carry, seed, masks, precision, context.note)
    versions = versions or Versions.of_nobody()
    transport = Transport(scope, settings.name, experiment.wire, versions, seed, masks, phase.method, done, courier)
    return ClientSide(phase, setup, transport, frozen, depth)


def calibration_depth(context: RunContext, phase: Phase) -> int:
    """How much of the network clients need not compute while masks are made."""
    return training_depth(context, phase, context.frozen_depth(phase.scope.named))


def training_depth(context: RunContext, phase: Phase, frozen: int) -> int:
    """How much of the network clients need not compute, since its output is the same each time and kept.

    None of it if training augments at random. Features always pay, since they are small and serve every later run;
    the tokens after some blocks pay if clients train on at least half as many samples as they hold.
    """
    if phase.method.augments and context.transform.is_random:
        return 0
    if frozen == context.feature_depth:
        return frozen
    local, clients = phase.settings.local, context.experiment.clients
    held = context.roles.training_samples / clients.count
    seen = local.epochs * held if local.epochs else (local.steps or 1) * local.batch_size
    returns = max(1.0, phase.settings.rounds * phase.per_round / clients.count)
    return frozen if seen * returns >= held / 2 else 0
