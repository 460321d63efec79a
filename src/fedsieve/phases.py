"""What comes before the rounds of a phase: which weights it may change, masks, what is frozen, and its server."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedsieve.config import Experiment, HighLoss, LocalSettings, PhaseSettings, RidgeHead
from fedsieve.errors import InputError
from fedsieve.federate.aggregate import WEIGHTINGS, FedAvg
from fedsieve.federate.client import Broadcast, ClientData, ClientState, Context, Update, train_client
from fedsieve.federate.drift import Interference, block_ranges
from fedsieve.federate.exchange import Exchange
from fedsieve.federate.masks import Masks
from fedsieve.federate.mixing import Mixing, state_bytes
from fedsieve.federate.ridge import RidgeRegression, ridge_sizes, ridge_statistics
from fedsieve.federate.server import Aggregator, Server
from fedsieve.federate.traffic import size
from fedsieve.model.features import feature_depth
from fedsieve.model.flat import Scope
from fedsieve.runs.checkpoint import Checkpoint
from fedsieve.runs.folder import RunFolder
from fedsieve.sieve.mask import Mask, shapes_of
from fedsieve.workbench import DataHolders, Workbench


@dataclass(frozen=True)
class Phase:
    """A phase's settings, and what clients and server do in its rounds."""

    settings: PhaseSettings
    scope: Scope  # the weights that it may change
    clients: int  # per round
    update: Callable[[Broadcast, ClientData, ClientState, Context], tuple[Update, ClientState]]
    aggregator: Callable[[Tensor], Aggregator]  # made anew each round, from the weights before it
    augments: bool = True  # whether clients see their images through random augmentation, where the experiment has any
    sums: Mapping[str, int] | None = None  # the lengths of what clients send, if it is not the change of their weights


def plan(experiment: Experiment, bench: Workbench) -> list[Phase]:
    """The phases in order; a ridge head is one of its own, in which every client takes part once."""
    phases = []
    head, clients = experiment.model.head, experiment.clients
    if isinstance(head, RidgeHead):
        once = PhaseSettings(name="ridge", train="head", rounds=1, local=LocalSettings(epochs=1, lr=0.0))
        penalty, scope = head.ridge.penalty, bench.model.scope("head")
        regression = lambda _: RidgeRegression(penalty)  # noqa: E731
        sums = ridge_sizes(scope)
        phases.append(Phase(once, scope, clients.count, ridge_statistics, regression, augments=False, sums=sums))
    weight_of, only_active = WEIGHTINGS[clients.weighting], clients.combine == "active"
    for number, settings in enumerate(experiment.phases):
        average = lambda weights: FedAvg(weights, weight_of, only_active)  # noqa: E731
        try:
            scope = scope_of(settings, bench)
        except InputError as error:
            raise InputError(f"phases.{number}.mask.{error}") from None
        phases.append(Phase(settings, scope, clients.per_round, train_client, average))
    return phases


def scope_of(settings: PhaseSettings, bench: Workbench) -> Scope:
    """The weights that a phase may change, and its mask's file checked against them."""
    mask = settings.mask
    scope = bench.model.scope(settings.train, mask.only if mask else None)
    if mask is not None and mask.file is not None:
        try:
            given = Mask.load(mask.file)
            given.must_fit(shapes_of(scope.named.items()), mask.file)
        except InputError as error:
            raise InputError(f"file: {error}") from None
        if not given.active:
            raise InputError(f"file: {mask.file} freezes every weight; give one that leaves some to train")
    return scope


def prepare(experiment: Experiment, phase: Phase, bench: Workbench, state: Checkpoint, folder: RunFolder) -> Server:
    """Everything that comes before a phase's next round: masks, frozen outputs, what clients remember."""
    settings, scope, clients, seed = phase.settings, phase.scope, experiment.clients, experiment.seed
    done = state.progress.round
    exchange = Exchange(scope, settings.name, experiment.wire, state.versions, seed, phase.sums, rounds_before=done)
    bench.begin_phase(scope.named)
    depth = training_depth(experiment, phase, bench)
    context = Context(scope, bench.network(depth), settings.local, settings.optimizer_state == "carry", seed)
    if settings.mask is not None:
        context = replace(context, masks=begin_masks(experiment, phase, bench, depth, exchange, folder, done == 0))
        depth = training_depth(experiment, phase, bench)  # a mask for all may freeze more
        context = replace(context, network=bench.network(depth))
    if clients.mixing is not None and phase.sums is None:
        place, everybody = folder.path / "mixing" / settings.name, DataHolders(bench, depth, 0, seed).clients
        progress = bench.observer.calibration
        mixing = Mixing(clients.mixing, context, settings.name, place, everybody, exchange, progress)
        mixing.begin_phase(clients.count, is_new=done == 0)
        context = replace(context, mixing=mixing)
    if depth == feature_depth(bench.classifier):
        bench.frozen_outputs(bench.data.train, bench.training, depth)  # now, not in the first round's time
    level = "none" if clients.zero_sum or phase.sums else experiment.analyze.level
    blocks = block_ranges(scope.entries) if level == "blocks" else None
    return Server(
        settings=settings,
        clients=clients,
        per_round=phase.clients,
        seed=seed,
        update=phase.update,
        aggregator=phase.aggregator,
        context=context,
        exchange=exchange,
        memory=folder.client_store(settings.name, state.progress),
        data_of=lambda client: bench.client_data(client, depth),
        loss_of=bench.client_loss,
        sizes=[len(own) for own in bench.split.clients],
        interference=lambda: None if level == "none" else Interference(scope.size, scope.weights, blocks, bench.device),
        warn=bench.observer.warning,
    )


def begin_masks(
    experiment: Experiment,
    phase: Phase,
    bench: Workbench,
    depth: int,
    exchange: Exchange,
    folder: RunFolder,
    is_new: bool,
) -> Masks:
    """The masks of a phase that is new or goes on; the bench knows what a mask for all clients freezes for good."""
    settings, scope = phase.settings, phase.scope
    assert settings.mask is not None
    now = scope.read()
    start = folder.start_of_phase(settings.name, now).to(bench.device) if settings.mask.needs_start else now
    masks = masks_of(experiment, phase, bench, depth, start, folder.path / "masks" / settings.name)
    exchange.masks = masks
    if is_new or settings.mask.refresh == "round":  # else what making masks costs is counted already
        masks.exchange = exchange
    mask = masks.begin_phase()
    scope.write(now)
    if is_new and masks.needs_everybody and settings.mask.refresh == "once":
        exchange.versions.saw_all(experiment.clients.count)  # even if that was before an interruption
    if mask is not None and not any(entry.is_buffer for entry in scope.entries):
        # What it freezes in all rounds need not be computed again (BatchNorm's statistics would move on).
        bench.begin_phase([name for name, count in mask.counts().items() if count])
    return masks


def notes_on(experiment: Experiment, phase: Phase) -> list[str]:
    """What a person should know about a phase before it begins."""
    clients, notes, name = experiment.clients, [], phase.settings.name
    weights, each = phase.scope.weights, 0
    if clients.mixing is not None and phase.sums is None:
        each += state_bytes(weights, weights, getattr(torch, clients.mixing.dtype))
    if experiment.wire.values == "int8" and phase.sums is None:
        each += 4 * phase.scope.size
    if phase.settings.optimizer_state == "carry" and phase.sums is None:
        each += 4 * weights
    if each and clients.count > 1:
        taken = f"{size(each)} on disk, {size(each * clients.count)} once all {clients.count} have taken part"
        notes.append(f"phase {name}: each client remembers {taken}")
    if clients.zero_sum and experiment.analyze.level != "none":
        notes.append(
            f"phase {name}: with clients.secure: zero_sum nobody sees single updates, so there is no drift of single "
            "clients, cosine, opposition or agreement in the metrics"
        )
    if clients.zero_sum and isinstance(clients.select, HighLoss):
        notes.append(f"phase {name}: zero_sum hides updates, not the losses by which clients are selected")
    mask = phase.settings.mask
    if clients.zero_sum and mask is not None and mask.scope == "federated" and mask.by_sensitivity:
        notes.append(f"phase {name}: zero_sum hides updates, not the scores with which clients calibrate the mask")
    return notes


def training_depth(experiment: Experiment, phase: Phase, bench: Workbench) -> int:
    """How much of the network clients need not compute, since its output is the same each time and kept.

    Nothing if training augments at random. Features always pay, for they are small and serve every later run;
    the tokens behind some blocks pay if clients come back to a good part of their samples.
    """
    if phase.augments and bench.transform.is_random:
        return 0
    if bench.depth == feature_depth(bench.classifier):
        return bench.depth
    local, clients = phase.settings.local, experiment.clients
    held = len(bench.training) / clients.count
    seen = local.epochs * held if local.epochs else (local.steps or 1) * local.batch_size
    returns = max(1.0, phase.settings.rounds * phase.clients / clients.count)
    return bench.depth if seen * returns >= held / 2 else 0


def masks_of(
    experiment: Experiment, phase: Phase, bench: Workbench, depth: int, start: Tensor, folder: Path | None
) -> Masks:
    """Where the clients of a phase get their masks from, with `start` the weights in scope when it began."""
    settings = phase.settings
    assert settings.mask is not None
    samples = settings.mask.fisher.samples * settings.mask.calibration_rounds  # so that each round has fresh ones
    return Masks(
        settings.mask,
        phase.scope,
        bench.network(depth),
        settings.local.batch_size,
        settings.name,
        experiment.seed,
        start,
        DataHolders(bench, depth, samples, experiment.seed),
        folder,
        bench.observer.note,
        bench.observer.calibration,
    )
