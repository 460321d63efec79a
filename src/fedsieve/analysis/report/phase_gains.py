"""What each phase of a run was good for: accuracy before and after it, and what it cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedsieve.analysis.collection import Run
from fedsieve.analysis.report.figures import figure
from fedsieve.config.model_settings import RidgeHead

SCORES = {"val": "val_accuracy", "test": "test_accuracy"}
COSTS = ("bytes_up", "bytes_down", "seconds")


@dataclass(frozen=True)
class PhaseOutcome:
    """A phase of one run, as far as it has come; accuracies are `val` and `test`, None where not known."""

    rounds: int
    of: int | None  # how many it will have; None: it is over
    before: dict[str, float | None]
    after: dict[str, float | None]
    costs: dict[str, float]

    def gain(self, score: str) -> float | None:
        before, after = self.before[score], self.after[score]
        return None if before is None or after is None else after - before


def phase_gains(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Of each phase that has begun, the means over the runs that have been in it."""
    found = [phase_outcomes(run) for run in runs]
    names = dict.fromkeys(name for outcomes in found for name in outcomes)
    return [_described(name, [outcomes[name] for outcomes in found if name in outcomes]) for name in names]


def _described(name: str, outcomes: Sequence[PhaseOutcome]) -> dict[str, Any]:
    told: dict[str, Any] = {"name": name, "rounds": figure([outcome.rounds for outcome in outcomes])}
    told["of"] = next((outcome.of for outcome in outcomes if outcome.of is not None), None)
    for score in SCORES:
        told[score] = {
            "before": figure([outcome.before[score] for outcome in outcomes]),
            "after": figure([outcome.after[score] for outcome in outcomes]),
            "gain": figure([outcome.gain(score) for outcome in outcomes]),  # its interval is that of pairs
        }
    return told | {cost: figure([outcome.costs[cost] for outcome in outcomes]) for cost in COSTS}


def phase_outcomes(run: Run) -> dict[str, PhaseOutcome]:
    """The phases of a run that have begun, by name. Nothing is known of the accuracy before the first."""
    rounds = {"ridge": 1} if isinstance(run.experiment.model.head, RidgeHead) else {}
    rounds |= {phase.name: phase.rounds for phase in run.experiment.phases}
    names = list(rounds)
    lines = {name: [line for line in run.metrics if line["phase"] == name] for name in names}
    results = {phase["name"]: phase for phase in (run.result or {}).get("phases", [])}
    found: dict[str, PhaseOutcome] = {}
    before: dict[str, float | None] = dict.fromkeys(SCORES)
    for place, name in enumerate(names):
        if not lines[name]:
            continue
        is_over = len(lines[name]) >= rounds[name] or any(lines[later] for later in names[place + 1 :])
        is_over = is_over or run.result is not None
        keeps_best = is_over and run.experiment.evaluate.keep == "best"
        after = scores_after(lines[name], keeps_best)
        costs = {cost: sum(line[cost] for line in lines[name]) for cost in COSTS}
        if name in results:  # it was tested at its end, and its time has more in it than rounds
            after["test"] = results[name]["test_accuracy"]
            costs = {cost: results[name][cost] for cost in COSTS}
        found[name] = PhaseOutcome(len(lines[name]), None if is_over else rounds[name], before, after, costs)
        before = after
    return found


def scores_after(lines: Sequence[dict[str, Any]], keeps_best: bool) -> dict[str, float | None]:
    """The accuracies of the weights that the rounds of a phase end with: those of the last round, or the best."""
    evaluated = [line for line in lines if line["val_accuracy"] is not None]
    if keeps_best and evaluated:
        kept = max(evaluated, key=lambda line: (line["val_accuracy"], -(line.get("val_loss") or 0.0)))
    else:
        kept = evaluated[-1] if evaluated else lines[-1]
    tested = kept if keeps_best else lines[-1]
    return {"val": kept["val_accuracy"], "test": tested.get("test_accuracy")}
