"""An experiment from beginning to end.

    data ─► split ─► clients
    model ─► phases, each of them rounds of: choose clients ─► train them ─► aggregate (federate/server.py) ─► evaluate
          ─► run folder: metrics, checkpoints, model, result

Centralized training is the same loop with one client. Whatever is wrong with the input is found
before the run folder is made.
"""

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsieve.config import Experiment, HighLoss, LocalSettings, PhaseSettings, RidgeHead
from fedsieve.errors import InputError, RunError
from fedsieve.evaluate import Score, fairness
from fedsieve.federate.aggregate import WEIGHTINGS, FedAvg
from fedsieve.federate.client import Broadcast, ClientData, ClientState, Context, Update, train_client
from fedsieve.federate.drift import Interference, block_ranges
from fedsieve.federate.exchange import Exchange
from fedsieve.federate.masks import Masks
from fedsieve.federate.mixing import Mixing, state_bytes
from fedsieve.federate.ridge import RidgeRegression, ridge_sizes, ridge_statistics
from fedsieve.federate.server import Aggregator, Server
from fedsieve.federate.traffic import size
from fedsieve.federate.versions import Versions
from fedsieve.model.classifier import load_classifier
from fedsieve.model.features import feature_depth
from fedsieve.model.flat import Scope
from fedsieve.runs.checkpoint import Checkpoint, Progress
from fedsieve.runs.folder import RunFolder, read_experiment, read_result
from fedsieve.sieve.mask import Mask, shapes_of
from fedsieve.workbench import DataHolders, Observer, Workbench


def run(experiment: Experiment, out: Path, resume: bool = False, observer: Observer | None = None) -> dict[str, Any]:
    """Run an experiment into the folder `out`, or go on with it; what result.json says.

    Ended at any moment, even by the power plug, and started again with `resume`, it ends in the same
    model to the last bit.
    """
    experiment = experiment.resolved()
    observer = observer or Observer()
    folder = RunFolder(out, experiment, resume)
    if folder.is_finished:
        observer.note(f"{out} is finished already")
        return read_result(out)
    configure_torch(experiment)
    bench = Workbench(experiment, observer)
    phases = plan(experiment, bench)
    try:
        saved = folder.start()
        for path in folder.damaged:
            observer.note(
                f"checkpoint {path.name} is damaged; {'going on from the one before' if saved else 'starting over'}"
            )
        versions = Versions.at_start(bench.model, experiment.clients.have_backbone)
        state = saved or Checkpoint(Progress(fingerprint=bench.fingerprint), bench.model.vector, None, versions)
        if state.progress.fingerprint != bench.fingerprint:
            raise InputError(f"--out {out} was started with other data or another backbone; give another folder")
        bench.model.vector.copy_(state.vector)
        state.vector = bench.model.vector  # from here on the model itself
        for phase in phases[state.progress.phase :]:
            for note in notes_on(experiment, phase):
                observer.note(note)
        observer.started(sum(phase.settings.rounds for phase in phases), state.progress.rounds)
        clock = Clock(state.progress)
        test = None
        for phase in phases[state.progress.phase :]:
            test = run_phase(experiment, phase, bench, state, folder, clock)
        result = conclude(experiment, phases[-1], test, bench, state, folder, clock)
        folder.save_result(result)
        return result
    finally:
        folder.close()


# --------------------------------------------------------------------------------------------- phases


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


def run_phase(
    experiment: Experiment, phase: Phase, bench: Workbench, state: Checkpoint, folder: RunFolder, clock: "Clock"
) -> Score | None:
    """The rounds of a phase from where `state` stands, then its result; the score on the test set, if it is asked."""
    settings, progress, scope, versions = phase.settings, state.progress, phase.scope, state.versions
    server = prepare(experiment, phase, bench, state, folder)
    while progress.round < settings.rounds:
        started = time.monotonic()
        try:
            line = server.round(progress.round + 1, progress.rounds)
        except RunError:
            folder.save_checkpoint(state, force=True)  # the weights are still those before the round
            raise
        progress.round += 1
        progress.rounds += 1
        if progress.round % experiment.evaluate.every == 0 or progress.round == settings.rounds:
            evaluate_round(experiment, bench, scope, state, line)
        line["seconds"] = time.monotonic() - started
        clock.tick()
        folder.add_metrics(line)
        folder.save_checkpoint(state, force=progress.round == settings.rounds)
        bench.observer.round(line)

    if state.best is not None:  # keep: best
        best = state.best.to(bench.device)
        versions.record(scope, scope.read(), best)
        scope.write(best)
    score = bench.test_score() if experiment.evaluate.test != "never" else None
    progress.phases.append(phase_result(settings, progress, score, folder, clock))
    progress.phase, progress.round, progress.best = progress.phase + 1, 0, {}
    state.best = None
    folder.save_checkpoint(state, force=True)
    return score


def prepare(experiment: Experiment, phase: Phase, bench: Workbench, state: Checkpoint, folder: RunFolder) -> Server:
    """Everything that comes before a phase's next round: masks, frozen outputs, what clients remember."""
    settings, scope, clients = phase.settings, phase.scope, experiment.clients
    bench.begin_phase(scope.named)
    depth = training_depth(experiment, phase, bench)
    context = Context(scope, bench.network(depth), settings.local, settings.optimizer_state == "carry", experiment.seed)
    progress, versions = state.progress, state.versions
    exchange = Exchange(
        scope, settings.name, experiment.wire, versions, experiment.seed, phase.sums, rounds_before=progress.round
    )
    if settings.mask is not None:
        now = scope.read()
        start = folder.start_of_phase(settings.name, now).to(bench.device) if settings.mask.needs_start else now
        masks = masks_of(experiment, phase, bench, depth, start, folder.path / "masks" / settings.name)
        exchange.masks = masks
        if progress.round == 0 or settings.mask.refresh == "round":  # else what making masks costs is counted already
            masks.exchange = exchange
        mask = masks.begin_phase()
        scope.write(now)
        if progress.round == 0 and masks.needs_everybody and settings.mask.refresh == "once":
            versions.saw_all(clients.count)  # even if that was before an interruption
        if mask is not None and not any(entry.is_buffer for entry in scope.entries):
            # What it freezes in all rounds need not be computed again (BatchNorm's statistics would move on).
            bench.begin_phase([name for name, count in mask.counts().items() if count])
            depth = training_depth(experiment, phase, bench)
        context = replace(context, masks=masks, network=bench.network(depth))
    if clients.mixing is not None and phase.sums is None:
        place, everybody = folder.path / "mixing" / settings.name, DataHolders(bench, depth, 0, experiment.seed).clients
        calibration = bench.observer.calibration
        mixing = Mixing(clients.mixing, context, settings.name, place, everybody, exchange, calibration)
        mixing.begin_phase(clients.count)
        context = replace(context, mixing=mixing)
        if progress.round == 0:
            versions.saw_all(clients.count)
    if depth == feature_depth(bench.classifier):
        bench.frozen_outputs(bench.data.train, bench.training, depth)  # now, not in the first round's time
    level = "none" if clients.zero_sum or phase.sums else experiment.analyze.level
    blocks = block_ranges(scope.entries) if level == "blocks" else None
    return Server(
        settings=settings,
        clients=clients,
        per_round=phase.clients,
        seed=experiment.seed,
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


def evaluate_round(
    experiment: Experiment, bench: Workbench, scope: Scope, state: Checkpoint, line: dict[str, Any]
) -> None:
    """Score the new weights on the validation set, and remember them if they are the best so far."""
    score = bench.score(bench.data.train, bench.validation_sample)
    if score is not None and not math.isfinite(score.loss):
        raise RunError(
            f"phase {line['phase']}, round {line['round']}: the validation loss became {score.loss}; lower lr"
        )
    if score is not None:
        line |= {"val_accuracy": score.accuracy, "val_loss": score.loss}
        best = state.progress.best
        if not best or (score.accuracy, -score.loss) > (best["val_accuracy"], -best["val_loss"]):
            state.progress.best = {key: line[key] for key in ("round", "val_accuracy", "val_loss")}
            if experiment.evaluate.keep == "best":
                state.best = scope.read()
    if experiment.evaluate.test == "each":
        line |= score_as("test", bench.test_score())


# -------------------------------------------------------------------------------------------- results


def phase_result(
    settings: PhaseSettings, progress: Progress, test: Score | None, folder: RunFolder, clock: "Clock"
) -> dict[str, Any]:
    lines = [line for line in folder.metrics() if line["phase"] == settings.name]
    return {
        "name": settings.name,
        "rounds": settings.rounds,
        "best_round": progress.best.get("round"),
        "best_val_accuracy": progress.best.get("val_accuracy"),
        "best_val_loss": progress.best.get("val_loss"),
        **score_as("test", test),
        "bytes_up": sum(line["bytes_up"] for line in lines),
        "bytes_down": sum(line["bytes_down"] for line in lines),
        "seconds": clock.tick() - sum(phase["seconds"] for phase in progress.phases),
    }


def conclude(
    experiment: Experiment,
    last: Phase,
    test: Score | None,
    bench: Workbench,
    state: Checkpoint,
    folder: RunFolder,
    clock: "Clock",
) -> dict[str, Any]:
    """Save the model, and say what came out: the last phase's scores are the run's."""
    phases = state.progress.phases
    bench.begin_phase(last.scope.named)
    best = [phase["best_val_accuracy"] for phase in phases if phase["best_val_accuracy"] is not None]
    clients = {"clients": fairness(bench.client_accuracies(test))} if experiment.evaluate.clients else {}
    return {
        "test_accuracy": phases[-1]["test_accuracy"],
        "test_loss": phases[-1]["test_loss"],
        **score_as("val", bench.score(bench.data.train, bench.validation)),
        "best_val_accuracy": max(best, default=None),
        **clients,
        "bytes_up": sum(phase["bytes_up"] for phase in phases),
        "bytes_down": sum(phase["bytes_down"] for phase in phases),
        "model_sha256": folder.save_model(bench.model),
        "seconds": clock.tick(),
        "seed": experiment.seed,
        "phases": phases,
    }


def score_as(name: str, score: Score | None) -> dict[str, float | None]:
    accuracy, loss = (score.accuracy, score.loss) if score else (None, None)
    if loss is not None and not math.isfinite(loss):
        raise RunError(f"the {name} loss became {loss}; lower phases.*.local.lr or set clip_norm")
    return {f"{name}_accuracy": accuracy, f"{name}_loss": loss}


def evaluate_run(path: Path) -> dict[str, dict[str, float | None]]:
    """Score a finished run's model again; beside each figure what the run itself recorded."""
    recorded = read_result(path)
    experiment = read_experiment(path).resolved()
    configure_torch(experiment)
    bench = Workbench(experiment, Observer(), load_classifier(path))
    measured = {
        **score_as("val", bench.score(bench.data.train, bench.validation)),
        **score_as("test", bench.test_score()),
    }
    return {name: {"measured": value, "recorded": recorded[name]} for name, value in measured.items()}


class Clock:
    """Seconds spent on the run, those before an interruption included."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.last = time.monotonic()

    def tick(self) -> float:
        now = time.monotonic()
        self.progress.seconds += now - self.last
        self.last = now
        return self.progress.seconds


def configure_torch(experiment: Experiment) -> None:
    """The same command on the same machine gives the same bits."""
    assert experiment.threads != "auto"
    torch.set_num_threads(experiment.threads)
    if experiment.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
