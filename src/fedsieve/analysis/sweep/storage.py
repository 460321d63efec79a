"""trials.sqlite, the file in which Optuna keeps the trials of a sweep: opened, and checked for damage.

SQLite notices damage to its own structure, but not to what is written in it, so each trial that is over has a digest.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from fedsieve.analysis.sweep.sweep_file import Point
from fedsieve.errors import InputError

FILE = "trials.sqlite"
VALUES, REASON, DIGEST = "values", "reason", "digest"  # what a trial carries beside Optuna's own
DISK = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL)  # primary error codes, the lowest byte
WAIT = 120  # seconds for other processes that use the file


@contextmanager
def opened(folder: Path) -> Iterator[optuna.storages.RDBStorage]:
    """The trials' file of a sweep, made where there is none. What goes wrong while it is looked through is one line."""
    path = folder / FILE
    try:
        if path.exists():
            _check_structure(path)
        yield optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": WAIT}})
    except InputError:
        raise
    except Exception as error:  # Optuna, SQLAlchemy and SQLite raise many kinds for a damaged file
        if _is_of_the_disk(error):
            raise
        reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        raise InputError(
            f"{path} cannot be used, and is probably damaged ({reason}); bring back what it was, or delete it: "
            "the same command then takes what is finished from the runs"
        ) from None


def _is_of_the_disk(error: BaseException | None) -> bool:
    """Whether SQLite could not read or write, as on a full disk, which says nothing of what is in the file."""
    while error is not None:
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in DISK:
            return True
        error = error.__cause__
    return False


def _check_structure(path: Path) -> None:
    with closing(sqlite3.connect(path, timeout=WAIT)) as database:
        (told,) = database.execute("pragma integrity_check(1)").fetchone()
    if told != "ok":
        raise ValueError(told)


def check_trials(trials: Sequence[FrozenTrial]) -> None:
    """ValueError if one of them is not as it was written; trials from before there were digests are not looked at."""
    for trial in trials:
        if not isinstance(values_of(trial), dict):
            raise ValueError(f"trial {trial.number} has no readable values")
        told = trial.user_attrs.get(DIGEST)
        if trial.state.is_finished() and told not in (
            None,
            _digest(trial.number, trial.state, trial.value, trial.params, trial.user_attrs),
        ):
            raise ValueError(f"trial {trial.number} was changed since it ended")


def end_trial(study: optuna.Study, trial: optuna.Trial, state: TrialState, value: float | None = None) -> None:
    """Tell the study how a trial ended; with a digest, which it must have before, for then it can no longer change."""
    known = study.get_trials(deepcopy=False)[trial.number]
    at_end = known.intermediate_values.get(known.last_step or 0) if state == TrialState.PRUNED else value  # as Optuna
    trial.set_user_attr(DIGEST, _digest(known.number, state, at_end, known.params, known.user_attrs))
    study.tell(trial, value, state=state)


def _digest(
    number: int, state: TrialState, value: float | None, params: Mapping[str, Any], attributes: Mapping[str, Any]
) -> str:
    known = {key: attribute for key, attribute in attributes.items() if key != DIGEST}
    text = json.dumps([number, state.name, value, params, known], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def values_of(trial: FrozenTrial) -> Point:
    return json.loads(trial.user_attrs.get(VALUES, "{}"))
