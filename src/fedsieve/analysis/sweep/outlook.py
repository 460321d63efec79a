"""How much of a sweep is left: runs, and about how many seconds."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from optuna.trial import FrozenTrial

from fedsieve.analysis.estimate import Estimator
from fedsieve.analysis.sweep.storage import values_of
from fedsieve.analysis.sweep.sweep_file import Point, Range, Sweep
from fedsieve.analysis.sweep.trials import Trials, arm_name, best_of, known_of, trial_folder, trials_in, trials_left

CLIMB = 4  # trials that a climb is expected to take, at least
MOST = 50  # points whose time is estimated in an arm; of more, a part stands for all


def foretell(sweep: Sweep, out: Path, estimator: Estimator | None = None) -> list[tuple[Point, int, float]]:
    """Each arm, how many of its runs are left, and about how many seconds they would take."""
    estimator, rows = estimator or Estimator(), []
    for arm in sweep.arm_points():
        trials = trials_in(out, arm)
        tries, repeats = runs_left(sweep, trials, out, arm)
        points = likely_points(sweep, trials)
        best = best_of(trials) if not tries else None
        seconds = 0.0
        if tries:
            some = points[:: -(-len(points) // MOST)]
            each = [estimator.seconds(sweep.experiment_at(arm, point), 1) for point in some]  # features in the first
            rest = estimator.seconds(sweep.experiment_at(arm, points[0]), 1)
            once = each[0] - rest  # for features
            seconds = once + (tries + repeats) * fmean([rest, *each[1:]])
        elif repeats and best is not None:
            seconds = estimator.seconds(sweep.experiment_at(arm, values_of(best)), repeats)
        rows.append((arm, tries + repeats, seconds))
    return rows


def runs_left(sweep: Sweep, trials: Sequence[FrozenTrial], out: Path, arm: Point) -> tuple[int, int]:
    """How many trials of an arm are left, and how many runs with other seeds."""
    tries = trials_left(sweep, trials)
    if sweep.climb and tries:
        tried = sum(trial.state.is_finished() for trial in trials)
        tries = min(max(tries, CLIMB - tried), len(sweep.grid_points()) - tried)  # it may need more or fewer
    if tries or not trials:
        return tries, sweep.seeds - 1
    best = best_of(trials)
    if best is None:
        return 0, 0
    done = list(trial_folder(out, arm_name(arm), best).glob("seed-*/result.json"))
    return 0, max(0, sweep.seeds - len(done))


def likely_points(sweep: Sweep, trials: Sequence[FrozenTrial]) -> list[Point]:
    """Points of a search like those that are still to be tried."""
    known = known_of(trials)
    if not sweep.is_bayesian:
        waiting = [point for point, accuracy in known if accuracy is None]
        return waiting + sweep.points_to_try(known) or [sweep.middle()]
    values = {key: _spread(one) if isinstance(one, Range) else one for key, one in sweep.search.items()}
    middle = {key: some[len(some) // 2] for key, some in values.items()}
    return [{**middle, key: value} for key, some in values.items() for value in some]


def _spread(choices: Range) -> list[float | int]:
    """The ends of a range, and what lies in the middle of it."""
    middle = (choices.low * choices.high) ** 0.5 if choices.log else (choices.low + choices.high) / 2
    return [choices.low, round(middle) if choices.is_whole else middle, choices.high]


def run_number(sweep: Sweep, trials: Trials) -> str:
    """`run 3 of 6`: the one that begins now; there may be more of a climb, and fewer if trials fail."""
    done = left = 0
    for arm in trials.arms:
        tried = arm.trials()
        finished = sum(trial.state.is_finished() for trial in tried)
        tries, repeats = runs_left(sweep, tried, trials.folder, arm.values)
        done += finished + (sweep.seeds - 1 - repeats if not tries and best_of(tried) is not None else 0)
        left += tries + repeats
    return f"run {done + 1} of {done + left}"
