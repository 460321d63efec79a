"""What comes before the rounds of a phase: which weights it may change, masks, what is frozen, and its server."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedsieve.config import Experiment, HighLoss, LocalSettings, PhaseSettings, RidgeHead
from fedsieve.errors import InputError
from fedsieve.federate.aggregate import WEIGHTINGS, FedAvg
from fedsieve.federate.client import Context, train_client
from fedsieve.federate.clients import Clients, LocalUpdate
from fedsieve.federate.drift import Interference, block_ranges
from fedsieve.federate.exchange import Exchange
from fedsieve.federate.masks import SHARED, Masks
from fedsieve.federate.mixing import Mixing, state_bytes
from fedsieve.federate.ridge import RidgeRegression, ridge_sizes, ridge_statistics
from fedsieve.federate.server import Aggregator, Server
from fedsieve.federate.traffic import size
from fedsieve.federate.versions import Versions
from fedsieve.model.features import feature_depth
from fedsieve.model.flat import Scope
from fedsieve.runs.checkpoint import Checkpoint
from fedsieve.runs.folder import START, TOTAL, RunFolder, keep_start, load_start
from fedsieve.sieve.mask import Mask, bytes_of_file, shapes_of
from fedsieve.workbench import DataHolders, Workbench


@dataclass(frozen=True)
class Phase:
    """A phase's settings, and what clients and server do in its rounds."""

    number: int  # its place among all
    settings: PhaseSettings
    scope: Scope  # the weights that it may change
    clients: int  # per round
    update: LocalUpdate
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
        phases.append(Phase(0, once, scope, clients.count, ridge_statistics, regression, augments=False, sums=sums))
    weight_of, only_active = WEIGHTINGS[clients.weighting], clients.combine == "active"
    for number, settings in enumerate(experiment.phases):
        average = lambda weights: FedAvg(weights, weight_of, only_active)  # noqa: E731
        try:
            scope = scope_of(settings, bench)
        except InputError as error:
            raise InputError(f"phases.{number}.mask.{error}") from None
        phases.append(Phase(len(phases), settings, scope, clients.per_round, train_client, average))
    return phases


def scope_of(settings: PhaseSettings, bench: Workbench) -> Scope:
    """The weights that a phase may change, and its mask's file checked against them."""
    mask = settings.mask
    scope = bench.model.scope(settings.train, mask.only, mask.dense) if mask else bench.model.scope(settings.train)
    if mask is not None and mask.file is not None:
        try:
            given = Mask.load(mask.file)
            given.must_fit(shapes_of(scope.sieved.items()), mask.file)
        except InputError as error:
            raise InputError(f"file: {error}") from None
        if not given.active:
            raise InputError(f"file: {mask.file} freezes every weight; give one that leaves some to train")
    return scope


def prepare(experiment: Experiment, phase: Phase, bench: Workbench, state: Checkpoint, folder: RunFolder) -> Server:
    """Everything that comes before a phase's next round: masks, frozen outputs, what clients remember."""
    settings, scope, clients, done = phase.settings, phase.scope, experiment.clients, state.progress.round
    if done == 0 and settings.mask is not None and settings.mask.needs_start:
        keep_start(folder.path, settings.name, scope.read())
    their_side = begin(experiment, phase, bench, state.versions, done, folder.path)
    begin_masks(experiment, phase, bench, their_side, is_new=done == 0)
    add_mixing(experiment, phase, bench, their_side, folder.path)
    if their_side.context.mixing is not None:
        their_side.context.mixing.begin_phase(clients.count, is_new=done == 0)
    if training_depth(experiment, phase, bench) == feature_depth(bench.classifier):
        bench.frozen_outputs(bench.data.train, bench.training, bench.depth)  # now, not in the first round's time
    level = "none" if clients.zero_sum or phase.sums else experiment.analyze.level
    blocks = block_ranges(scope.entries) if level == "blocks" else None
    return Server(
        settings=settings,
        clients=clients,
        per_round=phase.clients,
        seed=experiment.seed,
        aggregator=phase.aggregator,
        their_side=their_side,
        exchange=their_side.exchange,
        memory=folder.client_store(settings.name, state.progress, needed_files(experiment, phase, folder.path)),
        ask=bench.ask,
        sizes=bench.split.clients.sizes,
        norms=state.progress.norms,
        interference=lambda: None if level == "none" else Interference(scope.size, scope.weights, blocks, bench.device),
        warn=bench.observer.warning,
    )


def needed_files(experiment: Experiment, phase: Phase, folder: Path) -> list[Path]:
    """What is made at a phase's start and cannot be made again after its first round."""
    name, mask, needed = phase.settings.name, phase.settings.mask, []
    if mask is not None and mask.needs_start:
        needed.append(folder / "masks" / name / START)
    if mask is not None and mask.file is not None:  # whoever gave that file may have changed it since
        needed.append(folder / "masks" / name / f"{SHARED}.safetensors")
    if experiment.clients.mixing is not None and phase.sums is None:
        needed.append(folder / "mixing" / name / TOTAL)
    return needed


def begin(
    experiment: Experiment, phase: Phase, bench: Workbench, versions: Versions, done: int, folder: Path
) -> Clients:
    """The clients' side of a phase of which some rounds may be done; masks and mixing begin next."""
    settings, scope, seed = phase.settings, phase.scope, experiment.seed
    exchange = Exchange(scope, settings.name, experiment.wire, versions, seed, phase.sums, rounds_before=done)
    bench.phase = phase.number
    bench.begin_phase(scope.named)
    depth = training_depth(experiment, phase, bench)
    context = Context(
        scope,
        bench.network(depth),
        settings.local,
        settings.optimizer_state == "carry",
        seed,
        precision=experiment.precision,
    )
    if settings.mask is not None:
        now = scope.read()
        start = load_start(folder, settings.name).to(bench.device) if settings.mask.needs_start else now
        masks = masks_of(experiment, phase, bench, depth, start, folder / "masks" / settings.name)
        exchange.masks = masks
        context = replace(context, masks=masks)
    clients = Clients(
        experiment.clients, seed, phase.update, context, exchange, lambda client: bench.client_data(client, depth)
    )
    bench.desk.handlers["reply"] = clients.reply
    return clients


def begin_masks(experiment: Experiment, phase: Phase, bench: Workbench, clients: Clients, is_new: bool) -> None:
    """The masks of a phase that is new or goes on; the bench knows what a mask for all clients freezes for good."""
    masks, exchange, scope = clients.context.masks, clients.exchange, phase.scope
    if masks is None:
        return
    now = scope.read()
    if is_new or masks.settings.refresh == "round":  # else what making masks costs is counted already
        masks.exchange = exchange
    mask = masks.begin_phase()
    scope.write(now)
    if is_new and masks.needs_everybody and masks.settings.refresh == "once":
        exchange.versions.saw_all()  # even if that was before an interruption
    if mask is not None and not any(entry.is_buffer for entry in scope.entries):
        # What it freezes in all rounds need not be computed again (BatchNorm's statistics would move on).
        bench.begin_phase([*(name for name, count in mask.counts().items() if count), *scope.dense])
        depth = training_depth(experiment, phase, bench)
        clients.context = replace(clients.context, network=bench.network(depth))
        clients.data_of = lambda client: bench.client_data(client, depth)


def add_mixing(experiment: Experiment, phase: Phase, bench: Workbench, clients: Clients, folder: Path) -> None:
    """Let clients mix their own weights in, if they are to; the scores that they mix by are made next."""
    settings = experiment.clients.mixing
    if settings is None or phase.sums is not None:
        return
    name, depth = phase.settings.name, training_depth(experiment, phase, bench)
    holders = DataHolders(bench, depth, 0, experiment.seed)
    mixing = Mixing(
        settings,
        clients.context,
        name,
        folder / "mixing" / name,
        holders,
        clients.exchange,
        bench.ask,
        bench.note,
        bench.observer.calibration,
        bench.fingerprint,
    )
    bench.desk.handlers["fisher"] = mixing.fisher
    clients.context = replace(clients.context, mixing=mixing)


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
    if mask is not None and mask.file is None and not mask.is_shared and mask.refresh == "once" and clients.count > 1:
        each = bytes_of_file(shapes_of(phase.scope.sieved.items()))
        taken = f"{size(each)} on disk, {size(each * clients.count)} once all {clients.count:,} have taken part"
        notes.append(f"phase {name}: each client's mask is kept and takes {taken}")
    if experiment.compile and mask is not None and mask.unit != "weight":
        notes.append(f"phase {name}: compile changes nothing for training under masks of whole rows or tensors")
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
    masks = Masks(
        settings.mask,
        phase.scope,
        bench.network(depth),
        settings.local.batch_size,
        settings.name,
        experiment.seed,
        start,
        DataHolders(bench, depth, samples, experiment.seed),
        folder,
        bench.ask,
        bench.note,
        bench.observer.calibration,
        bench.fingerprint,
    )
    bench.desk.handlers["scores"] = masks.scores
    return masks
