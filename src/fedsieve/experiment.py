"""An experiment from beginning to end.

    data ─► split ─► clients
    model ─► phases, each of them rounds of: choose clients ─► train them ─► aggregate (federate/server.py) ─► evaluate
          ─► run folder: metrics, checkpoints, model, result

Centralized training is the same loop with one client. Whatever is wrong with the input is found
before the run folder is made.
"""

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsieve.config import Experiment, PhaseSettings, RidgeHead
from fedsieve.errors import MachineError, RunError
from fedsieve.evaluate import Score, fairness
from fedsieve.experiment_file import elsewhere
from fedsieve.federate.versions import Versions
from fedsieve.model.classifier import load_classifier
from fedsieve.model.flat import Scope
from fedsieve.observer import Observer
from fedsieve.phases import Phase, notes_on, plan, prepare
from fedsieve.profile import Times, section, stopwatch
from fedsieve.runs.checkpoint import Checkpoint, Progress
from fedsieve.runs.folder import RunFolder, settled
from fedsieve.runs.read import read_experiment, read_result
from fedsieve.runs.tracking import tracked
from fedsieve.sieve.sensitivity import ADVICE
from fedsieve.workbench import Workbench, configure_torch, fingerprint_of
from fedsieve.workers.crew import at_work

LOWER_LR = "lower phases.*.local.lr or set clip_norm"


def run(experiment: Experiment, out: Path, resume: bool = False, observer: Observer | None = None) -> dict[str, Any]:
    """Run an experiment into the folder `out`, or go on with it; what result.json says.

    Ended at any moment, even by the power plug, and started again with `resume`, it ends in the same
    model to the last bit.
    """
    stopwatch.start()
    experiment = settled(experiment, out, resume)
    observer = tracked(experiment, out, observer or Observer())
    folder = RunFolder(out, experiment, resume)
    if folder.is_finished:
        observer.note(f"{out} is finished already")
        return read_result(out)
    configure_torch(experiment)
    bench = Workbench(experiment, observer)
    phases, fingerprint = plan(experiment, bench), bench.fingerprint
    try:
        saved = folder.start(fingerprint)
        for path, damaged in folder.damaged.items():
            what = "is damaged" if damaged == path else f"cannot be used, for {damaged} is damaged or gone"
            observer.note(
                f"checkpoint {path.name} {what}; {'going on from the one before' if saved else 'starting over'}"
            )
        folder.save_split(bench.holdings())
        versions = Versions.at_start(bench.model, experiment.clients.count, experiment.clients.have_backbone)
        assert isinstance(experiment.threads, int)
        progress = Progress(fingerprint=fingerprint, threads=experiment.threads)
        state = Checkpoint(progress, bench.model.vector, None, versions)
        state = state if saved is None else saved.onto(state)
        with at_work(experiment, bench, folder.path) as crew:
            for phase in phases[state.progress.phase :]:
                for note in notes_on(experiment, phase):
                    observer.note(note)
            observer.started(sum(phase.settings.rounds for phase in phases), state.progress.rounds)
            clock = Clock(state.progress)
            test = None
            for phase in phases[state.progress.phase :]:
                try:
                    test = run_phase(experiment, phase, bench, state, folder, clock)
                except MachineError:
                    raise
                except RunError as error:
                    if cause := exploded_before(experiment, bench, state, folder):
                        what = str(error).replace(ADVICE, "").replace(f"; {LOWER_LR}", "")
                        raise type(error)(f"{what}; {cause}: {LOWER_LR}") from error
                    raise
            result = conclude(experiment, phases[-1], test, bench, state, folder, clock)
        observer.concluded(result)  # before it is written: what is finished is never looked at again
        result = folder.save_result(result)
        seconds = stopwatch.take()
        of_workers, workers = (crew.seconds, crew.size) if crew is not None else ({}, 1)
        observer.finished(Times(sum(seconds.values()), seconds, of_workers, workers))
        return result
    finally:
        observer.ended()
        folder.close()


def check(experiment: Experiment) -> None:
    """Fail if anything is wrong with the experiment, its data or its model; nothing is run or written."""
    experiment = experiment.resolved()
    configure_torch(experiment)
    plan(experiment, Workbench(experiment, Observer()))


def check_all(experiments: Iterable[Experiment]) -> None:
    """Likewise for many; those that differ only in how clients train and are scored are checked once."""
    aside: Any = {"seed": True, "evaluate": True, "expect": True, "phases": {"__all__": {"rounds", "local"}}}
    different = {one.model_dump_json(exclude=aside): one for one in experiments}
    for experiment in different.values():
        check(experiment)


# --------------------------------------------------------------------------------------------- phases


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
            with suppress(MachineError, OSError):  # where it cannot be saved either, the first error says why
                if progress.round:  # else the phase before has left one
                    folder.save_checkpoint(state, force=True)  # the weights are still those before the round
            raise
        progress.round += 1
        progress.rounds += 1
        if progress.round % experiment.evaluate.every == 0 or progress.round == settings.rounds:
            evaluate_round(experiment, bench, scope, state, line)
        line["seconds"] = time.monotonic() - started
        clock.tick()
        with section("files"):
            folder.add_metrics(line)
            folder.save_checkpoint(state, force=progress.round == settings.rounds)
        bench.observer.round(line)

    if state.best is not None:  # keep: best
        best = state.best.to(bench.device)
        versions.record(scope, scope.read(), best)
        scope.write(best)
    score = bench.test_score() if experiment.evaluate.test != "never" else None
    progress.phases.append(phase_result(settings, progress, score, folder, clock))
    if warning := about_ridge(experiment, settings, progress.phases, folder.metrics()):
        bench.observer.warning(warning)
    progress.phase, progress.round, progress.best, progress.norms = progress.phase + 1, 0, {}, []
    state.best = None
    folder.save_checkpoint(state, force=True)
    return score


def evaluate_round(
    experiment: Experiment, bench: Workbench, scope: Scope, state: Checkpoint, line: dict[str, Any]
) -> None:
    """Score the new weights on the validation set, and remember them if they are the best so far."""
    score = bench.score(bench.data.train, bench.validation_sample)
    if score is not None and not math.isfinite(score.loss):
        raise RunError(
            f"phase {line['phase']}, round {line['round']}: the validation loss became {score.loss}; {LOWER_LR}"
        )
    if score is not None:
        line |= {"val_accuracy": score.accuracy, "val_loss": score.loss}
        if score.loss > exploded(bench):
            place = f"phase {line['phase']}, round {line['round']}"
            bench.note(f"{place}: the validation loss exploded to {score.loss:.3g}; {LOWER_LR}", "exploded")
        best = state.progress.best
        if not best or (score.accuracy, -score.loss) > (best["val_accuracy"], -best["val_loss"]):
            state.progress.best = {key: line[key] for key in ("round", "val_accuracy", "val_loss")}
            if experiment.evaluate.keep == "best":
                state.best = scope.read()
    if experiment.evaluate.test == "each":
        line |= score_as("test", bench.test_score())


def exploded(bench: Workbench) -> float:
    """A loss that no model has but one whose training diverged: a hundred times that of guessing."""
    return 100 * math.log(max(2, len(bench.data.classes)))


def exploded_before(experiment: Experiment, bench: Workbench, state: Checkpoint, folder: RunFolder) -> str | None:
    """What probably caused an error: the loss of the weights before it, if it had exploded."""
    lines, progress = folder.metrics(), state.progress
    if not lines:
        return None
    last, which = lines[-1], "train" if lines[-1]["val_loss"] is None else "validation"
    loss = last["train_loss"] if which == "train" else last["val_loss"]
    if experiment.evaluate.keep == "best" and progress.round == 0:
        loss = progress.phases[-1]["best_val_loss"]
    if loss is None or loss <= exploded(bench):
        return None
    return f"the {which} loss exploded to {loss:.3g} in phase {last['phase']}, round {last['round']}"


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
        before, after = lines[-1 - settings.rounds]["val_accuracy"], lines[-1]["val_accuracy"]
    if before is None or after is None or after >= before:
        return None
    return (
        f"phase {settings.name} has made the ridge head worse: validation accuracy {before:.1%} before it, "
        f"{after:.1%} after it; leave the phase out, or lower its lr"
    )


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
        "data_fingerprint": fingerprint_of(bench.data),
        "phases": phases,
    }


def score_as(name: str, score: Score | None) -> dict[str, float | None]:
    accuracy, loss = (score.accuracy, score.loss) if score else (None, None)
    if loss is not None and not math.isfinite(loss):
        raise RunError(f"the {name} loss became {loss}; {LOWER_LR}")
    return {f"{name}_accuracy": accuracy, f"{name}_loss": loss}


def evaluate_run(path: Path, overrides: Sequence[str] = ()) -> dict[str, dict[str, float | None]]:
    """Score a finished run's model again; beside each figure what the run itself recorded."""
    recorded = read_result(path)
    experiment = elsewhere(read_experiment(path), overrides).resolved()
    configure_torch(experiment)
    bench = Workbench(experiment, Observer(), load_classifier(path))
    with at_work(experiment, bench, path):
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
