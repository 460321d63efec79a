"""What `fedsieve reproduce --dry-run` says: how many runs of each row are left, and how long they would take."""

from dataclasses import dataclass
from pathlib import Path

from fedsieve.analysis.estimate import Estimator
from fedsieve.analysis.reproduce.plan import Plan


@dataclass(frozen=True)
class Estimate:
    """Of the runs of one row that are not finished."""

    left: int
    seconds: float


def estimates_of(plan: Plan) -> dict[str, Estimate]:
    """By preset, for the first row of each experiment; features are counted where they are first needed."""
    folders: dict[str, list[Path]] = {}
    for row, _, folder in plan.runs():
        folders.setdefault(row.preset, []).append(folder)
    estimator, estimates = Estimator(), {}
    for row in (row for row in plan.rows if row.preset in folders):
        left = sum(not (folder / "result.json").exists() for folder in folders[row.preset])
        estimates[row.preset] = Estimate(left, estimator.seconds(row.experiment, left))
    return estimates
