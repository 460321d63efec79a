"""An experiment from beginning to end.

    data ─► partition ─► clients
    model ─► phases, each of them rounds of: choose clients ─► train them ─► aggregate (federate/round.py) ─► evaluate
          ─► run folder: metrics, checkpoints, model, result

Centralized training is the same loop with one client. Errors in the input are found before the run
folder is made.
"""

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsieve.config.experiment_file import elsewhere, parse_experiment
from fedsieve.config.runnable import with_plugins
from fedsieve.config.schema import Experiment
from fedsieve.context import Given, RunContext
from fedsieve.data.load import Dataset, load
from fedsieve.data.roles import Roles, roles_of
from fedsieve.engine.evaluator import Evaluator
from fedsieve.engine.start import engine_for, gathered, roles_at_server, roles_by_manifest
from fedsieve.engine.torch_setup import configure_torch
from fedsieve.errors import InputError, MachineError, RunError
from fedsieve.experiment.notes import check_room, notes_on
from fedsieve.experiment.prepare import prepare, publish_phase
from fedsieve.experiment.results import (
    LOWER_LR,
    Clock,
    about_ridge,
    about_target,
    conclude,
    exploded,
    exploded_before,
    phase_result,
    score_as,
    why_over,
)
from fedsieve.federate.types import Engine
from fedsieve.federate.versions import Versions
from fedsieve.model.evaluate import Score
from fedsieve.model.flat import Scope
from fedsieve.observe.callbacks import Callback
from fedsieve.observe.profile import Times, section, stopwatch
from fedsieve.observe.tracking import tracked
from fedsieve.observe.user_callbacks import Everybody
from fedsieve.phase import Phase, check_mask_files, plan
from fedsieve.runs.checkpoint import Checkpoint, Progress
from fedsieve.runs.folder import RunFolder, settled
from fedsieve.runs.model_file import load_classifier
from fedsieve.runs.read import read_experiment, read_result
from fedsieve.runs.roster import federation_of
from fedsieve.runs.same_plugins import with_same_plugins
from fedsieve.sieve.sensitivity import ADVICE

if TYPE_CHECKING:
    from fedsieve.federation.gathering import Gathering

NOTHING_GIVEN = Given()


def run(
    experiment: Experiment,
    out: Path,
    resume: bool = False,
    callback: Callback | None = None,
    plugins: Sequence[str | Path] = (),
    given: Given = NOTHING_GIVEN,
) -> dict[str, Any]:
    """Run an experiment into the folder `out`, or resume it there; returns the content of result.json.

    A run that is interrupted at any moment, even by a power cut, and started again with `resume` ends in the same
    model to the last bit. The experiment's plugins, and more that are given here, are loaded while it runs. Python's
    users call `fedsieve.run` (api.py).
    """
    with with_plugins(experiment, plugins) as known:
        return _run(known, out, resume, callback, given)


def _run(experiment: Experiment, out: Path, resume: bool, callback: Callback | None, given: Given) -> dict[str, Any]:
    stopwatch.start()
    follows_cores = experiment.threads == "auto"
    experiment = settled(experiment, out, resume)
    callback = everybody = Everybody(tracked(experiment, out, callback or Callback()))
    folder = RunFolder(out, experiment, resume)
    if folder.is_finished:
        callback.note(f"{out} is finished already")
        return read_result(out)
    if follows_cores and experiment.threads != 1:  # only with one client in a round
        callback.note(
            f"threads: {experiment.threads}, the number of cores; the model's last bits depend on it, so give a number "
            "to get the same model on other machines"
        )
    configure_torch(experiment)
    with ExitStack() as stack:  # before anything is written: a cluster or a federation may not be there
        gathering = stack.enter_context(gathered(experiment, out, given, callback.note))
        data = given.dataset(experiment.data)
        roles = roles_at_server(experiment, gathering) if gathering is not None else None
        context = RunContext(experiment, callback, data=data, given=given.model, roles=roles)
        phases = plan(experiment, context)
        check_mask_files(experiment, phases)
        check_room(experiment, phases, out)
        engine = stack.enter_context(engine_for(context, phases, out, gathering))
        return _run_with(engine, context, phases, folder, everybody, gathering)


def _run_with(
    engine: Engine,
    context: RunContext,
    phases: list[Phase],
    folder: RunFolder,
    callback: Everybody,
    gathering: "Gathering | None" = None,
) -> dict[str, Any]:
    """Do the phases that are left, and return the run's result."""
    experiment, fingerprint = context.experiment, context.fingerprint
    try:
        saved = folder.start(fingerprint)
        callback.attach(experiment, folder.path)  # not before: the folder may have been another run's
        if gathering is not None:
            gathering.save()
        for path, damaged in folder.damaged.items():
            what = "is damaged" if damaged == path else f"cannot be used, for {damaged} is damaged or gone"
            callback.note(
                f"checkpoint {path.name} {what}; {'going on from the one before' if saved else 'starting over'}"
            )
        folder.save_split(context.holdings())
        versions = Versions.at_start(context.model, experiment.clients.count, experiment.clients.have_backbone)
        assert isinstance(experiment.threads, int)
        progress = Progress(fingerprint=fingerprint, threads=experiment.threads, plugins=folder.plugin_digests)
        state = Checkpoint(progress, context.model.vector.clone(), None, versions)
        state = state if saved is None else saved.onto(state)
        for phase in phases[state.progress.phase :]:
            for note in notes_on(experiment, phase):
                callback.note(note)
        callback.planned(experiment, [(phase.settings.name, phase.settings.rounds) for phase in phases])
        callback.started(sum(phase.settings.rounds for phase in phases), state.progress.rounds)
        clock = Clock(state.progress)
        test = None
        for phase in phases[state.progress.phase :]:
            try:
                test = run_phase(context, phase, state, folder, engine, clock)
            except MachineError:
                raise
            except RunError as error:
                if cause := exploded_before(context, state, folder):
                    what = str(error).replace(ADVICE, "").replace(f"; {LOWER_LR}", "")
                    raise type(error)(f"{what}; {cause}: {LOWER_LR}") from error
                raise
        last = phases[-1]
        publish_phase(engine, last, state.vector)
        evaluator = Evaluator(context, engine, last.number, context.frozen_depth(last.scope.named))
        result = conclude(context, evaluator, test, state, folder, clock)
        callback.concluded(deepcopy(result))  # before it is written: a finished run is never resumed
        result = folder.save_result(result)
        seconds = stopwatch.take()
        callback.finished(Times(sum(seconds.values()), seconds, engine.seconds, engine.size))
        return result
    finally:
        callback.ended()
        folder.close()


def check(experiment: Experiment, out: Path = Path()) -> list[Phase]:
    """The phases; fails if anything is wrong with the experiment, its data or its model. Nothing is run or written."""
    with with_plugins(experiment) as known:
        experiment = known.resolved()
        tracked(experiment, out, Callback())
        configure_torch(experiment)
        phases = plan(experiment, RunContext(experiment, Callback(), roles=roles_by_manifest(experiment)))
        check_mask_files(experiment, phases)
        check_room(experiment, phases, out)
        return phases


def check_all(experiments: Iterable[Experiment]) -> None:
    """Check many experiments; those that differ only in seed, rounds, local training or evaluation are checked once."""
    aside: Any = {"seed": True, "evaluate": True, "expect": True, "phases": {"__all__": {"rounds", "local"}}}
    different = {one.model_dump_json(exclude=aside): one for one in experiments}
    for experiment in different.values():
        check(experiment)


def run_phase(
    context: RunContext, phase: Phase, state: Checkpoint, folder: RunFolder, engine: Engine, clock: Clock
) -> Score | None:
    """Do the rounds of a phase from `state` on, and record its result; returns the test score unless `test: never`."""
    experiment, settings, progress, scope = context.experiment, phase.settings, state.progress, phase.scope
    context.callback.phase(settings.name)
    server, evaluator = prepare(context, phase, state, folder, engine)
    while progress.round < settings.rounds and not why_over(settings.stop, progress):
        started = time.monotonic()
        try:
            line = server.round(progress.round + 1, progress.rounds)
        except RunError:
            with suppress(MachineError, OSError):  # if saving fails as well, the first error says why
                if progress.round:  # else there is nothing new to save
                    folder.save_checkpoint(state, force=True)  # the weights are still those before the round
            raise
        state.method = server.state
        progress.round += 1
        progress.rounds += 1
        if progress.round % experiment.evaluate.every == 0 or progress.round == settings.rounds:
            evaluate_round(context, evaluator, scope, state, line)
        line["seconds"] = time.monotonic() - started
        clock.tick()
        with section("files"):
            folder.add_metrics(line)
            is_last = progress.round == settings.rounds or why_over(settings.stop, progress) is not None
            folder.save_checkpoint(state, force=is_last)
        context.callback.round(line)

    if progress.round < settings.rounds:
        how_far = f"{progress.round} of {settings.rounds} rounds"
        context.callback.note(f"phase {settings.name} ended after {how_far}: {why_over(settings.stop, progress)}")
    if state.best is not None:  # keep: best
        best = state.best.to(context.device)
        state.versions.record(scope, scope.of(state.vector), best)
        scope.put(state.vector, best)
        engine.publish({"weights": scope.of(state.vector)})
    score = evaluator.test() if experiment.evaluate.test != "never" else None
    progress.phases.append(phase_result(settings, progress, score, folder, clock))
    if told := about_target(progress.phases[-1]):
        context.callback.note(told)
    if warning := about_ridge(experiment, settings, progress.phases, folder.metrics()):
        context.callback.warning(warning)
    progress.phase, progress.round, progress.best, progress.norms = progress.phase + 1, 0, {}, []
    state.best, state.method = None, {}
    folder.save_checkpoint(state, force=True)
    return score


def evaluate_round(
    context: RunContext, evaluator: Evaluator, scope: Scope, state: Checkpoint, line: dict[str, Any]
) -> None:
    """Score the new weights on the validation set, and remember them if they are the best so far."""
    evaluate, place = context.experiment.evaluate, f"phase {line['phase']}, round {line['round']}"
    score = evaluator.validation(context.validation_sample)
    if score is not None and not math.isfinite(score.loss):
        raise RunError(f"{place}: the validation loss became {score.loss}; {LOWER_LR}")
    if score is not None:
        line |= {"val_accuracy": score.accuracy, "val_loss": score.loss}
        if score.loss > exploded(context):
            context.note(f"{place}: the validation loss exploded to {score.loss:.3g}; {LOWER_LR}", "exploded")
        best = state.progress.best
        if not best or (score.accuracy, -score.loss) > (best["val_accuracy"], -best["val_loss"]):
            is_equal = bool(best) and score.accuracy == best["val_accuracy"]  # and the loss is lower
            since = best.get("since", best["round"]) if is_equal else line["round"]
            state.progress.best = {key: line[key] for key in ("round", "val_accuracy", "val_loss")} | {"since": since}
            if evaluate.keep == "best":
                state.best = scope.of(state.vector).clone()
    if evaluate.test == "each":
        line |= score_as("test", evaluator.test())


def evaluate_run(
    path: Path,
    overrides: Sequence[str] = (),
    plugins: Sequence[str | Path] = (),
    given: Given = NOTHING_GIVEN,
) -> dict[str, dict[str, float | None]]:
    """Score a finished run's model again; returns each figure with the one that the run recorded.

    `plugins` are those that the run was made with. The copies in its folder are not executed unless they are given.
    """
    recorded, experiment = read_result(path), read_experiment(path)
    is_federation, names = experiment.federation is not None, list[str]()
    roles = None
    if is_federation:
        names = [one for one in overrides if one.partition("=")[0].strip() == "data.name"]
        overrides = [one for one in overrides if one not in names]
        lies_at_path = experiment.data.name in ("folder", "npz")
        has_path = lies_at_path and any(one.partition("=")[0].strip() == "data.path" for one in overrides)
        if not names and not has_path and given.data is None:
            roles = _roles_of_its_server(experiment)
    experiment = elsewhere(experiment.model_copy(update={"engine": "local"}), overrides)
    if names:
        experiment = parse_experiment(experiment.to_yaml(), "the run's experiment", names)
    with with_same_plugins(path, experiment, recorded, plugins) as known:
        settings = known.resolved()
        if is_federation and roles is None:
            roles = _roles_with(given.dataset(settings.data) or load(settings.data), settings, path)
        return _evaluate(settings, path, recorded, given, roles)


def _roles_of_its_server(experiment: Experiment) -> Roles:
    """The validation and test images of a federation's server; InputError if it has none."""
    assert experiment.federation is not None
    manifest = experiment.federation.manifest
    roles = roles_by_manifest(experiment) if manifest is not None and Path(manifest).is_file() else None
    if roles is None or not len(roles.data.train) + len(roles.data.test):
        gone = f" (its manifest {manifest} is not there)" if roles is None and manifest is not None else ""
        raise InputError(
            f"the server of this federation has no images{gone}; give some, such as data.name=npz data.path=FILE"
        )
    return roles


def _roles_with(data: Dataset, experiment: Experiment, path: Path) -> Roles:
    """Images for the model of the federation in `path`, prepared as the nodes prepared theirs."""
    federation = federation_of(path)
    if data.classes != federation.classes:
        mine, theirs = (", ".join(classes[:5])[:100] for classes in (data.classes, federation.classes))
        raise InputError(f"these data have other classes ({mine}) than the federation ({theirs}); give some that fit")
    return dataclasses.replace(roles_of(experiment, data), statistics=federation.statistics)


def _evaluate(
    experiment: Experiment, path: Path, recorded: dict[str, Any], given: Given, roles: Roles | None
) -> dict[str, dict[str, float | None]]:
    configure_torch(experiment)
    classifier = load_classifier(path, given.model)
    data = given.dataset(experiment.data) if roles is None else None
    context = RunContext(experiment, Callback(), classifier, data, given.model, roles)
    phases = plan(experiment, context)
    with engine_for(context, phases, path) as engine:
        publish_phase(engine, phases[0], context.model.vector.clone(), is_whole=True)
        evaluator = Evaluator(context, engine, 0, depth=0)
        measured = {**score_as("val", evaluator.validation()), **score_as("test", evaluator.test())}
    return {name: {"measured": value, "recorded": recorded[name]} for name, value in measured.items()}
