"""What the server does before the rounds of a phase: masks, frozen outputs, states."""

from pathlib import Path

import torch
from torch import Tensor

from fedsieve.context import RunContext
from fedsieve.engine.evaluator import Evaluator
from fedsieve.federate.checked_parts import selection_of
from fedsieve.federate.diagnostics import Interference, block_ranges
from fedsieve.federate.mask_source import MaskSource
from fedsieve.federate.preparation import Preparation
from fedsieve.federate.round import Server
from fedsieve.federate.shared_mask import SHARED, SharedMasks
from fedsieve.federate.transport import Transport
from fedsieve.federate.types import EXTRA, Engine
from fedsieve.phase import ClientSide, Phase, calibration_depth, client_side, mask_files, mask_source
from fedsieve.runs.checkpoint import Checkpoint
from fedsieve.runs.folder import START, RunFolder, keep_start, load_start


def prepare(
    context: RunContext, phase: Phase, state: Checkpoint, folder: RunFolder, engine: Engine
) -> tuple[Server, Evaluator]:
    """Do all that comes before a phase's next round: masks, frozen outputs, the states of clients and server."""
    experiment, settings, scope, clients = context.experiment, phase.settings, phase.scope, context.experiment.clients
    progress, is_new, weights = state.progress, state.progress.round == 0, scope.of(state.vector)
    start = None
    if settings.mask is not None and settings.mask.needs_start:
        if is_new:
            keep_start(folder.path, settings.name, weights)
        start = load_start(folder.path, settings.name).to(context.device)
    publish_phase(engine, phase, state.vector, start)  # first: clients may take part in making a mask
    masks = mask_source(context, phase, start, mask_files(context, phase, start, folder.path))
    shared_masks = None
    side = server_side(context, phase, masks, state, engine)
    make_features(context, engine, side)  # before clients need them, so that each is computed once
    if masks is not None:
        shared_masks = shared_masks_of(context, phase, masks, engine, side.transport)
        shared_masks.begin_phase(is_new)
        if masks.shared is not None:
            engine.publish({"mask": masks.shared.bits, "weights": weights})
            # The mask may freeze more of the network than the scope leaves out.
            side = server_side(context, phase, masks, state, engine)
    needed = needed_files(phase, folder.path)
    memory = folder.client_store(settings.name, progress, needed)
    preparation = Preparation(
        phase.number,
        engine,
        side.transport,
        shared_masks,
        memory,
        progress.rounds,
        context.sizes,
        context.callback.calibration,
    )
    if is_new:
        state.method = phase.method.start(weights, preparation)
    engine.publish({f"{EXTRA}{name}": one for name, one in phase.method.send(state.method).items()})
    evaluator = Evaluator(context, engine, phase.number, side.frozen)
    make_features(context, engine, side)  # now, so that it does not count as the first round's time
    level = "none" if clients.zero_sum or "delta" not in phase.method.replies else experiment.analyze.level
    blocks = block_ranges(scope.entries) if level == "blocks" else None
    device = context.device
    server = Server(
        phase=phase.number,
        name=settings.name,
        rounds=settings.rounds,
        seed=experiment.seed,
        scope=scope,
        method=phase.method,
        select=selection_of(clients.select, context.sizes, phase.per_round),
        clients=clients,
        setup=side.setup,
        shared_masks=shared_masks,
        transport=side.transport,
        engine=engine,
        memory=memory,
        sizes=context.sizes,
        vector=state.vector,
        state=state.method,
        prepared=preparation.traffic,
        norms=progress.norms,
        interference=lambda: None if level == "none" else Interference(scope.size, scope.weights, blocks, device),
        warn=context.callback.warning,
        replied=context.callback.client,
    )
    return server, evaluator


def server_side(
    context: RunContext, phase: Phase, masks: MaskSource | None, state: Checkpoint, engine: Engine
) -> ClientSide:
    """What clients work with, as the server sees it: with the versions that they hold."""
    side = client_side(context, phase, masks, state.versions, state.progress.round, engine.courier)
    engine.begin(side.transport)
    return side


def make_features(context: RunContext, engine: Engine, side: ClientSide) -> None:
    """Compute the training set's features, if clients train on them and they are not known yet."""
    if side.depth == context.feature_depth:
        Evaluator(context, engine, side.phase.number, side.frozen).make_features("train")


def shared_masks_of(
    context: RunContext, phase: Phase, masks: MaskSource, engine: Engine, transport: Transport
) -> SharedMasks:
    """What makes the mask that all clients share, if there is one."""
    samples = masks.settings.fisher.samples * masks.settings.calibration_rounds  # so that each round has fresh ones
    server_data = lambda: context.server_data(samples, calibration_depth(context, phase))  # noqa: E731
    progress = context.callback.calibration
    return SharedMasks(masks, phase.number, engine, transport, context.sizes, server_data, progress)


def publish_phase(
    engine: Engine, phase: Phase, vector: Tensor, start: Tensor | None = None, is_whole: bool = False
) -> None:
    """Publish the weights of a phase to every process; those in scope are published again after each round.

    Every process has the weights that the run started from. So it needs only those that phases may have changed since,
    or all of them (`is_whole`) if the vector is another model's.
    """
    part = slice(0, len(vector)) if is_whole else phase.altered
    vectors = {"model": vector[part], "model_at": torch.tensor([part.start]), "weights": phase.scope.of(vector)}
    engine.publish(vectors | ({} if start is None else {"start": start}))


def needed_files(phase: Phase, folder: Path) -> list[Path]:
    """Files that are made at a phase's start and cannot be made again after its first round."""
    name, mask, needed = phase.settings.name, phase.settings.mask, []
    if mask is not None and mask.needs_start:
        needed.append(folder / "masks" / name / START)
    if mask is not None and mask.file is not None:  # the original may have changed since
        needed.append(folder / "masks" / name / f"{SHARED}.safetensors")
    return needed
