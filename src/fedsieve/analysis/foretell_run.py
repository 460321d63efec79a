"""What `fedsieve run --dry-run` says: the phases, how long each would take here, and how much would be sent."""

from dataclasses import dataclass
from pathlib import Path

from fedsieve.analysis.estimate import PER_RUN, Estimator
from fedsieve.analysis.repeat import refuse_unless_ours
from fedsieve.config.schema import Experiment
from fedsieve.experiment import check
from fedsieve.phase import Phase
from fedsieve.runs.folder import RunFolder, settled
from fedsieve.runs.read import read_metrics
from fedsieve.runs.replace import runs_to_replace

WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}  # bytes of a value


@dataclass(frozen=True)
class ForetoldPhase:
    """What is left of a phase."""

    name: str
    rounds: int
    clients: int  # in a round
    seconds: float
    features: float  # of these, for what later runs need not compute again
    up: float  # bytes a round, about
    down: float  # at most


def foretold(experiment: Experiment, folder: Path, seeds: int, resume: bool, force: bool) -> list[ForetoldPhase]:
    """The phases of a run, after the same checks as for a run; with `resume`, what is left of the one in the folder."""
    done = 0
    if force:
        runs_to_replace(folder)
    elif seeds > 1:
        refuse_unless_ours(folder, experiment, resume)
    else:
        RunFolder(folder, settled(experiment, folder, resume), resume)
        done = len(read_metrics(folder)) if resume and (folder / "metrics.jsonl").exists() else 0
    phases = check(experiment, folder)
    found: list[ForetoldPhase] = []
    for phase, estimate in zip(phases, Estimator().phases(experiment), strict=True):
        passed = min(done, len(estimate.rounds))
        done -= passed
        left = estimate.rounds[passed:]
        seconds = sum(left) + (0.0 if passed else estimate.start + estimate.features) + (estimate.end if left else 0.0)
        seconds += PER_RUN if not found else 0.0
        features = 0.0 if passed else estimate.features
        up, down = bytes_up(phase, experiment), bytes_down(phase)
        found.append(ForetoldPhase(estimate.name, len(left), phase.per_round, seconds, features, up, down))
    return found


def bytes_up(phase: Phase, experiment: Experiment) -> float:
    """What the clients of a round send, uncompressed, without their masks: about."""
    mask, scope = phase.settings.mask, phase.scope
    sieved = sum(one.numel() for one in scope.sieved.values()) if mask is not None else 0
    frozen = (mask.sparsity or 0.0) if mask is not None else 0.0
    width = 8 if experiment.clients.zero_sum else WIDTHS[experiment.wire.values]
    replies = phase.method.replies
    others = sum(length for name, length in replies.items() if name != "delta")
    changed = scope.size - frozen * sieved if "delta" in replies else 0.0
    return phase.per_round * (width * changed + (4 if changed else 8) * others)


def bytes_down(phase: Phase) -> float:
    """What the clients of a round are sent: at most, since they are sent what they lack."""
    return 4.0 * phase.per_round * (phase.scope.size + sum(phase.method.extras.values()))
