"""The trials of a sweep, kept in an SQLite file by Optuna: one study for each arm.

Any number of processes may take trials from it. A lock on the whole decides who gets the next one, and a lock on each
trial says whether whoever took it is still alive: locks die with their process, so a trial of a killed one is taken up
again, from its last checkpoint, and is neither lost nor run twice.
"""

import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    check_distribution_compatibility,
)
from optuna.trial import FrozenTrial, TrialState

from fedsieve.analysis.sweep.storage import FILE, VALUES, check_trials, opened, values_of
from fedsieve.analysis.sweep.sweep_file import Point, Range, Sweep
from fedsieve.errors import InputError
from fedsieve.randomness import seed_at

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass(frozen=True)
class Arm:
    """One way of doing things, with the trials of what is searched in it."""

    name: str  # of its folder
    values: Point
    study: optuna.Study

    def trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def best(self) -> FrozenTrial | None:
        return best_of(self.trials())


@dataclass
class Taken:
    """A trial that this process, and no other, works at."""

    arm: Arm
    trial: optuna.Trial
    values: Point
    folder: Path
    lock: IO[str]

    def release(self) -> None:
        self.lock.close()


class Trials:
    """All trials of the sweep in a folder; to be made by one process at a time."""

    def __init__(self, folder: Path, sweep: Sweep) -> None:
        self.folder, self.sweep = folder, sweep
        points = sweep.arm_points()
        with opened(folder) as storage:
            strangers = set(optuna.get_all_study_names(storage)) - {json.dumps(values) for values in points}
            if strangers:
                raise InputError(f"{folder} holds a sweep with other arms ({min(strangers)}); give another --out")
            self.arms = [self._arm(storage, values) for values in points]
            for arm in self.arms:
                check_trials(arm.trials())
                self._refuse_another_search(arm)
                self._enqueue(arm)

    def _arm(self, storage: optuna.storages.BaseStorage, values: Point) -> Arm:
        name, experiment = arm_name(values), self.sweep.experiment_at(values, self.sweep.middle())
        warm_up = sum(phase.rounds for phase in experiment.phases) // 3  # no trial is ended in its first rounds
        study = optuna.create_study(
            study_name=json.dumps(values),
            storage=storage,
            sampler=AddressedTPE(experiment.seed, name),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=warm_up),
            direction="maximize",
            load_if_exists=True,
        )
        return Arm(name, values, study)

    def _refuse_another_search(self, arm: Arm) -> None:
        """A Bayesian search learns from its trials, so they must be of the same keys and of values like these."""
        if not self.sweep.is_bayesian:
            return
        wanted = {key: distribution(choices) for key, choices in self.sweep.search.items()}
        for trial in arm.trials():
            try:
                keys = trial.distributions.keys()
                if not keys <= wanted.keys() or (trial.state.is_finished() and keys < wanted.keys()):
                    raise ValueError("other keys")
                for key, known in trial.distributions.items():
                    check_distribution_compatibility(known, wanted[key])
            except ValueError:
                keys_then = ", ".join(trial.distributions)
                raise InputError(f"{self.folder} holds a search over other {keys_then}; give another --out") from None

    def _enqueue(self, arm: Arm) -> None:
        """The points that are to be tried next: all of a grid at the beginning, later those of values that are new."""
        if self.sweep.is_bayesian:
            return
        known = known_of(arm.trials())
        if gone := [point for point, _ in known if point not in self.sweep.grid_points()]:
            raise InputError(
                f"{self.folder} holds trials that are not in this sweep, such as {gone[0]}; give another --out"
            )
        for point in self.sweep.points_to_try(known):
            arm.study.enqueue_trial({}, user_attrs={VALUES: json.dumps(point)})

    def take(self) -> Taken | None:
        """A trial nobody works at: one that was left behind, else a new one; None if there is none (left)."""
        with alone(self.folder):
            for arm in self.arms:
                for trial in arm.trials():
                    if trial.state == TrialState.RUNNING and (lock := self.try_lock(self.trial_folder(arm, trial))):
                        if arm.trials()[trial.number].state == TrialState.RUNNING:
                            return self._taken(arm, optuna.Trial(arm.study, trial._trial_id), lock)
                        lock.close()  # it was finished between the look and the lock
            for arm in self.arms:
                self._enqueue(arm)
                states = [trial.state for trial in arm.trials()]
                if TrialState.WAITING in states or len(states) < (self.sweep.trials or 0):
                    new = arm.study.ask()
                    lock = self.try_lock(self.trial_folder(arm, new))
                    assert lock is not None  # the number is new
                    return self._taken(arm, new, lock)
        return None

    def _taken(self, arm: Arm, trial: optuna.Trial, lock: IO[str]) -> Taken:
        if self.sweep.is_bayesian:
            values = {key: suggest(trial, key, choices) for key, choices in self.sweep.search.items()}
            trial.set_user_attr(VALUES, json.dumps(values))
        else:
            values = json.loads(trial.user_attrs[VALUES])
        return Taken(arm, trial, values, self.trial_folder(arm, trial), lock)

    def trial_folder(self, arm: Arm, trial: FrozenTrial | optuna.Trial) -> Path:
        return trial_folder(self.folder, arm.name, trial)

    def is_searched(self, arm: Arm) -> bool:
        """Whether no trial of the arm is waiting, under way or still to come."""
        return trials_left(self.sweep, arm.trials()) == 0

    def try_lock(self, folder: Path) -> IO[str] | None:
        """A lock on a folder for as long as the file is open and this process alive; None if another one has it."""
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".claim").open("w", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            file.close()
            return None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Of all processes that work at the sweep in a folder, one at a time is in here.

    SQLite alone would let two of them take the same trial between a look and a change.
    """
    with (folder / ".lock").open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class AddressedTPE(optuna.samplers.BaseSampler):
    """Optuna's TPE (Bergstra et al., NeurIPS 2011), seeded from the trial's number.

    So a sweep that is resumed, or shared by processes, does not draw the same points again.
    """

    def __init__(self, seed: int, arm: str) -> None:
        self.seed, self.arm = seed, arm

    def _sampler(self, trial: FrozenTrial, key: str = "") -> optuna.samplers.BaseSampler:
        seed = seed_at(self.seed, "sweep", self.arm, trial.number, key) % 2**32
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=8)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._sampler(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._sampler(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._sampler(trial, param_name).sample_independent(study, trial, param_name, param_distribution)


def distribution(choices: list[Any] | Range) -> BaseDistribution:
    if isinstance(choices, list):
        return CategoricalDistribution([json.dumps(choice) for choice in choices])
    if choices.is_whole:
        return IntDistribution(int(choices.low), int(choices.high), log=choices.log)
    return FloatDistribution(choices.low, choices.high, log=choices.log)


def suggest(trial: optuna.Trial, key: str, choices: list[Any] | Range) -> Any:
    """The trial's value, which is drawn when it is first asked for, and kept."""
    if isinstance(choices, list):
        return json.loads(trial.suggest_categorical(key, [json.dumps(choice) for choice in choices]))
    if choices.is_whole:
        return trial.suggest_int(key, int(choices.low), int(choices.high), log=choices.log)
    return trial.suggest_float(key, choices.low, choices.high, log=choices.log)


def best_of(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The complete trial of highest validation accuracy, the first of them."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return max(complete, key=lambda trial: (trial.value or 0.0, -trial.number), default=None)


def trial_folder(sweep: Path, arm: str, trial: FrozenTrial | optuna.Trial) -> Path:
    return sweep / "runs" / arm / f"trial-{trial.number:03d}"


def known_of(trials: Sequence[FrozenTrial]) -> list[tuple[Point, float | None]]:
    """The points of trials and their validation accuracies: 0 for a failed one, None for one that is not over."""
    return [(values_of(trial), (trial.value or 0.0) if trial.state.is_finished() else None) for trial in trials]


def trials_left(sweep: Sweep, trials: Sequence[FrozenTrial]) -> int:
    """How many trials of an arm are waiting, under way or still to come; of a climb, how many are known to come."""
    known = known_of(trials)
    under_way = sum(accuracy is None for _, accuracy in known)
    if sweep.is_bayesian:
        return under_way + max(0, (sweep.trials or 0) - len(known))
    return under_way + len(sweep.points_to_try(known))


def trials_in(folder: Path, arm: Point) -> list[FrozenTrial]:
    """Those of an arm of the sweep in a folder, without making or changing anything; none where there is no sweep."""
    if not (folder / FILE).exists():
        return []
    with opened(folder) as storage:
        if json.dumps(arm) not in optuna.get_all_study_names(storage):
            return []
        trials = optuna.load_study(study_name=json.dumps(arm), storage=storage).get_trials(deepcopy=False)
        check_trials(trials)
        return trials


def arm_name(values: Point) -> str:
    """A folder's name that stays the same whatever other arms there are: `iid-random`, `classes-5-random-3f2a`.

    The digits are a hash of values that the words do not tell exactly.
    """
    texts = []
    for value in values.values():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        texts += [str(part) for part in parts]
    said = "-".join(texts)
    words = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in said)[:60].lstrip(".-")
    is_exact = words == said and not any(isinstance(value, dict | list) for value in values.values())
    digest = hashlib.blake2b(json.dumps(values).encode(), digest_size=2).hexdigest()
    return "-".join(filter(None, [words, "" if is_exact else digest])) or "as-it-is"
