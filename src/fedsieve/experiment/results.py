"""The results of a phase and of a run."""

import math
import time
from typing import Any

from fedsieve.config.model_settings import RidgeHead
from fedsieve.config.phase_settings import PhaseSettings, StopSettings
from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.engine.evaluator import Evaluator
from fedsieve.errors import RunError
from fedsieve.federate.traffic import size
from fedsieve.model.evaluate import Score, fairness
from fedsieve.observe.numbers import duration
from fedsieve.runs.checkpoint import Checkpoint, Progress
from fedsieve.runs.folder import RunFolder

LOWER_LR = "lower phases.*.local.lr or set clip_norm"


class Clock:
    """Seconds spent on the run, including those before an interruption."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.last = time.monotonic()

    def tick(self) -> float:
        now = time.monotonic()
        self.progress.seconds += now - self.last
        self.last = now
        return self.progress.seconds


def phase_result(
    settings: PhaseSettings, progress: Progress, test: Score | None, folder: RunFolder, clock: Clock
) -> dict[str, Any]:
    lines = [line for line in folder.metrics() if line["phase"] == settings.name]
    return {
        "name": settings.name,
        "rounds": progress.round,
        "best_round": progress.best.get("round"),
        "best_val_accuracy": progress.best.get("val_accuracy"),
        "best_val_loss": progress.best.get("val_loss"),
        **reached(settings.stop, lines),
        **score_as("test", test),
        "bytes_up": sum(line["bytes_up"] for line in lines),
        "bytes_down": sum(line["bytes_down"] for line in lines),
        "seconds": clock.tick() - sum(phase["seconds"] for phase in progress.phases),
    }


def why_over(stop: StopSettings | None, progress: Progress) -> str | None:
    """Why a phase ends before its next round, if it does: it has reached its target, or lost its patience."""
    if stop is None or not progress.best:
        return None
    if stop.target is not None and progress.best["val_accuracy"] >= stop.target:
        return f"validation accuracy reached {stop.target:.1%}"
    if stop.patience is not None and progress.round - progress.best["since"] >= stop.patience:
        return f"validation accuracy did not improve in {stop.patience} rounds"
    return None


def reached(stop: StopSettings | None, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What it took to reach the target accuracy: rounds, bytes and seconds of the phase; None if it was not reached."""
    if stop is None or stop.target is None:
        return {}
    hits = [number for number, line in enumerate(lines, 1) if (line["val_accuracy"] or 0) >= stop.target]
    if not hits:
        return {"to_target": None}
    until = lines[: hits[0]]
    sums = {key: sum(line[key] for line in until) for key in ("bytes_up", "bytes_down", "seconds")}
    return {"to_target": {"rounds": hits[0], **sums}}


def about_target(phase: dict[str, Any]) -> str | None:
    """A note on what it took a phase to reach its target accuracy."""
    if not (took := phase.get("to_target")):
        return None
    rounds = f"{took['rounds']} round{'s' if took['rounds'] > 1 else ''}"
    sent = f"{size(took['bytes_up'])} up, {size(took['bytes_down'])} down"
    return f"phase {phase['name']}: to its target it took {rounds}, {sent}, {duration(took['seconds'])}"


def about_ridge(
    experiment: Experiment, settings: PhaseSettings, phases: list[dict[str, Any]], lines: list[dict[str, Any]]
) -> str | None:
    """A warning if the last of these phases made the ridge head worse, and nothing but the head was ever trained."""
    only_heads = all(phase.train == "head" for phase in experiment.phases[: len(phases) - 1])
    if not isinstance(experiment.model.head, RidgeHead) or not only_heads or len(phases) < 2:
        return None
    if experiment.evaluate.keep == "best":
        before, after = (phase["best_val_accuracy"] for phase in phases[-2:])
    else:
        before, after = lines[-1 - phases[-1]["rounds"]]["val_accuracy"], lines[-1]["val_accuracy"]
    if before is None or after is None or after >= before:
        return None
    return (
        f"phase {settings.name} has made the ridge head worse: validation accuracy {before:.1%} before it, "
        f"{after:.1%} after it; leave the phase out, or lower its lr"
    )


def conclude(
    context: RunContext,
    evaluator: Evaluator,
    test: Score | None,
    state: Checkpoint,
    folder: RunFolder,
    clock: Clock,
) -> dict[str, Any]:
    """Save the model and return the run's result; its test scores are those of the last phase."""
    experiment, phases = context.experiment, state.progress.phases
    best = [phase["best_val_accuracy"] for phase in phases if phase["best_val_accuracy"] is not None]
    clients = {"clients": fairness(evaluator.clients(test))} if experiment.evaluate.clients else {}
    return {
        "test_accuracy": phases[-1]["test_accuracy"],
        "test_loss": phases[-1]["test_loss"],
        **score_as("val", evaluator.validation()),
        "best_val_accuracy": max(best, default=None),
        **clients,
        "bytes_up": sum(phase["bytes_up"] for phase in phases),
        "bytes_down": sum(phase["bytes_down"] for phase in phases),
        "model_sha256": folder.save_model(context.model, state.vector),
        "seconds": clock.tick(),
        "seed": experiment.seed,
        "data_fingerprint": context.roles.data_fingerprint,
        "phases": phases,
    }


def score_as(name: str, score: Score | None) -> dict[str, float | None]:
    accuracy, loss = (score.accuracy, score.loss) if score else (None, None)
    if loss is not None and not math.isfinite(loss):
        raise RunError(f"the {name} loss became {loss}; {LOWER_LR}")
    return {f"{name}_accuracy": accuracy, f"{name}_loss": loss}


def exploded(context: RunContext) -> float:
    """A loss that only diverged training reaches: a hundred times that of guessing."""
    return 100 * math.log(max(2, len(context.data.classes)))


def exploded_before(context: RunContext, state: Checkpoint, folder: RunFolder) -> str | None:
    """The probable cause of an error: the loss before it, if that had exploded."""
    lines, progress = folder.metrics(), state.progress
    if not lines:
        return None
    last, which = lines[-1], "train" if lines[-1]["val_loss"] is None else "validation"
    loss = last["train_loss"] if which == "train" else last["val_loss"]
    if context.experiment.evaluate.keep == "best" and progress.round == 0:
        loss = progress.phases[-1]["best_val_loss"]
    if loss is None or loss <= exploded(context):
        return None
    return f"the {which} loss exploded to {loss:.3g} in phase {last['phase']}, round {last['round']}"
