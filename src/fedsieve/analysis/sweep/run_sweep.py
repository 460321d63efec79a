"""A sweep from beginning to end.

    sweep file ─► arms ─► in each, trials with the first seed ─► the best by validation accuracy ─► the other seeds
               ─► results.json, best/ARM (the runs), experiments/ARM.yaml, pictures

The same command goes on with a sweep that was ended, and run once more beside it, shares the work.
"""

import json
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState

from fedsieve.analysis.collection import read_run
from fedsieve.analysis.repeat import refuse_unless_any_seed, with_seed
from fedsieve.analysis.report.sweep_plots import plot_importances, plot_parallel, tried
from fedsieve.analysis.sweep.outlook import run_number
from fedsieve.analysis.sweep.storage import REASON, end_trial, values_of
from fedsieve.analysis.sweep.sweep_file import Sweep
from fedsieve.analysis.sweep.trials import (
    Arm,
    Taken,
    Trials,
    alone,
)
from fedsieve.config.experiment_file import all_paths, parse_kept
from fedsieve.config.plugins import active
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError, MachineError, RunError, WorkerError
from fedsieve.experiment import check_all, run
from fedsieve.files.atomic import write_text
from fedsieve.observe.callbacks import Callback, Forward
from fedsieve.runs.read import read_metrics

ObserverFor = Callable[[str], AbstractContextManager[Callback]]  # of a run with this title
PATIENCE = 0.5  # seconds between two looks at what other processes do


def run_sweep(sweep: Sweep, out: Path, callback_for: ObserverFor) -> dict[str, Any]:
    """Run what is left of the sweep in the folder `out`; what results.json says."""
    trials = prepare(sweep, out)
    while not all(trials.is_searched(arm) for arm in trials.arms):
        if (taken := trials.take()) is None:
            time.sleep(PATIENCE)  # other processes are at the last trials; what they choose can be repeated together
            continue
        try:
            try_out(sweep, taken, callback_for, run_number(sweep, trials))
        finally:
            taken.release()
    left = [Repeat(arm, nth) for nth in range(sweep.seeds) for arm in trials.arms]  # the first seed's may be gone
    while left := [one for one in left if not repeat(sweep, trials, one, callback_for)]:
        time.sleep(PATIENCE)  # another process is at them; should it be killed, they are ours
    with alone(out):
        return conclude(sweep, trials, out)


def prepare(sweep: Sweep, out: Path) -> Trials:
    """Make the folder, or open the one that is there, unless it holds something else or the input is wrong."""
    file = out / "sweep.yaml"
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; give the name of a new folder")
    ours = ("sweep.yaml", "trials.sqlite")
    there = [entry.name for entry in out.iterdir() if not entry.name.startswith(".")] if out.exists() else []
    if there and not any(name in there for name in ours):
        raise InputError(f"--out {out} holds something else than a sweep; give the name of a new folder")
    if file.exists():
        refuse_another_experiment(sweep, file)
    experiments = sweep.experiments()
    for experiment in experiments:
        refuse_unless_any_seed(experiment, sweep.seeds)
    check_all(experiments)
    out.mkdir(parents=True, exist_ok=True)
    with alone(out):
        trials = Trials(out, sweep)
        at = {**sweep.arm_points()[0], **sweep.middle()}
        everything = {
            **sweep.model_dump(mode="json"),
            "at": at,
            "base": sweep.experiment_at(at).model_dump(mode="json"),
            "plugins": plugin_digests(sweep),
        }
        write_text(file, yaml.safe_dump(everything, sort_keys=False))
    return trials


def refuse_another_experiment(sweep: Sweep, file: Path) -> None:
    """Fail if the sweep in a folder varied another experiment: at a point it wrote down, both must be the same."""
    try:
        before = yaml.safe_load(file.read_bytes())
        base = parse_kept(yaml.safe_dump(before["base"]), f"{file}, base")
        is_same = base.same_outcome(sweep.experiment_at(before.get("at", {})))
        known = dict(before.get("plugins", {}))
    except (yaml.YAMLError, InputError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(f"{file} is damaged ({reason}); delete it, and the same command writes it anew") from None
    if not is_same:
        raise InputError(
            f"--out {file.parent} holds a sweep of another experiment, as its {file.name} says; give another folder"
        )
    for name, digest in plugin_digests(sweep).items():
        if known.get(name, digest) != digest:
            raise InputError(f"plugin {name} was changed since the sweep in {file.parent} began; give another folder")


def plugin_digests(sweep: Sweep) -> dict[str, str]:
    """SHA-256 of each plugin of the sweep's experiments, by name."""
    paths = all_paths(*(experiment.plugins for experiment in sweep.experiments()))
    return {plugin.name: plugin.digest for plugin in active(paths)}


def try_out(sweep: Sweep, taken: Taken, callback_for: ObserverFor, place: str) -> None:
    """Run a trial with the first seed, and tell its study the validation accuracy."""
    study, trial = taken.arm.study, taken.trial
    title = f"{place}: {taken.arm.name}, trial {trial.number}: {as_words(taken.values) or 'as it is'}"
    experiment = sweep.experiment_at(taken.arm.values, taken.values)
    try:
        with callback_for(title) as callback:
            folder = taken.folder / f"seed-{experiment.seed}"
            watching = Pruner(callback, trial, folder) if sweep.is_bayesian and sweep.prune else callback
            result = run_slim(experiment, folder, watching)
    except optuna.TrialPruned:
        end_trial(study, trial, TrialState.PRUNED)
    except (MachineError, WorkerError):  # of this machine, not of these settings
        raise
    except RunError as error:
        trial.set_user_attr(REASON, str(error))
        end_trial(study, trial, TrialState.FAIL)
    else:
        accuracy = result["val_accuracy"] or 0.0  # without validation data there is nothing to choose
        end_trial(study, trial, TrialState.COMPLETE, accuracy)


@dataclass(frozen=True)
class Repeat:
    """What was chosen in an arm, with another seed: the nth after the first, which is 0."""

    arm: Arm
    nth: int


def repeat(sweep: Sweep, trials: Trials, one: Repeat, callback_for: ObserverFor) -> bool:
    """Run it, unless it is done already; False if another process is at it."""
    best = one.arm.best()
    if best is None:
        return True  # nothing worked, so there is nothing to repeat
    experiment = sweep.experiment_at(one.arm.values, values_of(best))
    experiment = with_seed(experiment, experiment.seed + one.nth)
    folder = trials.trial_folder(one.arm, best) / f"seed-{experiment.seed}"
    if (folder / "result.json").exists():
        return True
    if (lock := trials.try_lock(folder)) is None:
        return False
    place, values = run_number(sweep, trials), as_words(values_of(best))
    title = f"{place}: {one.arm.name}, seed {experiment.seed}: {values or 'as it is'}"
    try:
        with callback_for(title) as callback:
            run_slim(experiment, folder, callback)
    except (MachineError, WorkerError):
        raise
    except RunError as error:
        callback.warning(f"{folder}: {error}")
    finally:
        lock.close()
    return True


def run_slim(experiment: Experiment, folder: Path, callback: Callback) -> dict[str, Any]:
    """Run, or go on; of a finished run only the model and what was measured are kept, for there may be hundreds."""
    result = run(experiment, folder, True, callback)
    for name in ("checkpoints", "masks"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return result


class Pruner(Forward):
    """Tells a trial's study about each round, and ends the trial if it is a poor one."""

    def __init__(self, callback: Callback, trial: optuna.Trial, folder: Path) -> None:
        super().__init__(callback)
        self.trial, self.folder = trial, folder
        self.rounds = 0

    def started(self, rounds: int, done: int) -> None:
        self.inner.started(rounds, done)
        known = self.trial.study.trials[self.trial.number].intermediate_values
        for line in read_metrics(self.folder)[:done]:  # the study may have missed the last rounds before an end
            self._judge(line, is_known=self.rounds + 1 in known)

    def round(self, line: dict[str, Any]) -> None:
        self.inner.round(line)
        self._judge(line)

    def _judge(self, line: dict[str, Any], is_known: bool = False) -> None:
        self.rounds += 1
        if line["val_accuracy"] is not None:
            if not is_known:
                self.trial.report(line["val_accuracy"], self.rounds)
            if self.trial.should_prune():
                raise optuna.TrialPruned


# -------------------------------------------------------------------------------------------- results


def conclude(sweep: Sweep, trials: Trials, out: Path) -> dict[str, Any]:
    """Write down what is known: of each arm its trials, the best, and its runs over seeds."""
    arms: list[dict[str, Any]] = []
    for name in ("best", "experiments"):
        (out / name).mkdir(exist_ok=True)
    for arm in trials.arms:
        best = arm.best() if trials.is_searched(arm) else None
        runs = {}
        if best is not None:
            experiment = sweep.experiment_at(arm.values, values_of(best))
            write_text(out / "experiments" / f"{arm.name}.yaml", experiment.to_yaml())
            link, target = out / "best" / arm.name, Path("..") / trials.trial_folder(arm, best).relative_to(out)
            link.unlink(missing_ok=True)
            link.symlink_to(target)
            runs = runs_in(trials.trial_folder(arm, best), experiment.seed, sweep.seeds)
        arms.append(
            {
                "name": arm.name,
                "values": arm.values,
                "chosen": None if best is None else values_of(best),
                "trials": [trial_summary(trial) for trial in arm.trials()],
                "seeds": runs,
            }
        )
    results = {"experiment": sweep.experiment, "set": sweep.set, "seeds": sweep.seeds, "arms": arms}
    write_text(out / "results.json", in_lines(results))
    winner = max(arms, key=_validation_accuracy)
    if winner["chosen"] is not None:
        write_text(out / "best.yaml", sweep.experiment_at(winner["values"], winner["chosen"]).to_yaml())
    known = tried(results)
    plot_importances(known, out / "importance.png")
    plot_parallel(known, out / "parallel.png")
    return results


def in_lines(results: dict[str, Any]) -> str:
    """As JSON, with a line for each arm."""
    rest = json.dumps({key: value for key, value in results.items() if key != "arms"})
    arms = ",\n".join(json.dumps(arm) for arm in results["arms"])
    return f'{rest[:-1]}, "arms": [\n{arms}\n]}}\n'


def _validation_accuracy(arm: dict[str, Any]) -> float:
    """The mean over the seeds that are done; -1 for an arm without a chosen trial."""
    values = [run["val_accuracy"] or 0.0 for run in arm["seeds"].values()]
    return sum(values) / len(values) if values else -1.0


def trial_summary(trial: FrozenTrial) -> dict[str, Any]:
    summary = {"values": values_of(trial), "state": trial.state.name.lower(), "val_accuracy": trial.value}
    return summary | ({"reason": trial.user_attrs[REASON]} if REASON in trial.user_attrs else {})


def runs_in(folder: Path, first: int, count: int) -> dict[str, dict[str, Any]]:
    """What came out for each seed: the end, what was before the last phase, and the way there."""
    found = {}
    for seed in range(first, first + count):
        if not (folder / f"seed-{seed}" / "result.json").exists():
            continue
        one = read_run(folder / f"seed-{seed}")
        assert one.result is not None
        keys = ("test_accuracy", "test_loss", "val_accuracy", "val_loss", "bytes_up", "bytes_down", "seconds")
        phases = one.result["phases"]
        last = [line for line in one.metrics if line["phase"] == phases[-1]["name"]]
        found[str(seed)] = {
            **{key: rounded(one.result[key]) for key in keys},
            "test_accuracy_before": phases[-2]["test_accuracy"] if len(phases) > 1 else None,
            "phase_bytes_up": phases[-1]["bytes_up"],
            "phase_bytes_down": phases[-1]["bytes_down"],
            "phase_seconds": rounded(phases[-1]["seconds"]),
            "val_curve": [[line["round"], line["val_accuracy"]] for line in last if line["val_accuracy"] is not None],
            "drift": [rounded(line.get("drift_mean")) for line in last],
        }
    return found


def rounded(value: float | None) -> float | None:
    """To six digits: the runs themselves have the rest."""
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")


def as_words(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items())
