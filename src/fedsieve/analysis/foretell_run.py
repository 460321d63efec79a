"""What `fedsieve run --dry-run` says: the phases, how long each would take here, and how much would be sent."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsieve.analysis.estimate import PER_RUN, Estimator
from fedsieve.analysis.repeat import refuse_unless_ours, seeded_runs
from fedsieve.config.schema import Experiment
from fedsieve.experiment import check
from fedsieve.experiment.notes import notes_on
from fedsieve.experiment.results import why_over
from fedsieve.observe.time_left import PhaseEstimate
from fedsieve.phase import Phase
from fedsieve.runs.checkpoint import Progress, find_newest
from fedsieve.runs.folder import RunFolder, settled
from fedsieve.runs.read import read_metrics
from fedsieve.runs.replace import refuse_to_lose_input, runs_to_replace

WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}  # bytes of a value


@dataclass(frozen=True)
class ForetoldPhase:
    """What is left of a phase, in the runs of all seeds together."""

    name: str
    rounds: int
    clients: int  # in a round
    seconds: float
    up: float  # bytes a round, about
    down: float  # at most
    notes: list[str]  # that a run begins with


def foretold(experiment: Experiment, folder: Path, seeds: int, resume: bool, force: bool) -> list[ForetoldPhase]:
    """The phases of a run, after the same checks as for a run; with `resume`, what is left of those in the folder."""
    check_folder(experiment, folder, seeds, resume, force)
    phases = check(experiment, folder)
    folders = [folder] if seeds == 1 else [place for _, place in seeded_runs(experiment, folder, seeds)]
    passed = [rounds_passed(phases, place) if resume else [0] * len(phases) for place in folders]
    estimates = Estimator().phases(experiment)
    first = [next((n for n, one in enumerate(estimates) if done[n] < len(one.rounds)), None) for done in passed]
    found = []
    for number, (phase, estimate) in enumerate(zip(phases, estimates, strict=True)):
        done = [run[number] for run in passed]
        rounds = sum(len(estimate.rounds[before:]) for before in done)
        seconds = first.count(number) * PER_RUN + sum(seconds_left(estimate, before) for before in done)
        seconds += 0.0 if any(done) else estimate.features  # else they are in the cache, as they are for later seeds
        notes = notes_on(experiment, phase) if rounds else []
        up, down = bytes_up(phase, experiment), bytes_down(phase)
        found.append(ForetoldPhase(estimate.name, rounds, phase.per_round, seconds, up, down, notes))
    return found


def check_folder(experiment: Experiment, folder: Path, seeds: int, resume: bool, force: bool) -> None:
    """InputError if the folder is not one to run into."""
    if force:
        if runs_to_replace(folder):
            refuse_to_lose_input(experiment, folder)
    elif seeds > 1:
        refuse_unless_ours(folder, experiment, resume)
    else:
        RunFolder(folder, settled(experiment, folder, resume), resume)


def seconds_left(estimate: PhaseEstimate, done: int) -> float:
    """Of a phase in one run after so many rounds, without its features."""
    left = estimate.rounds[done:]
    return sum(left) + (0.0 if done else estimate.start) + (estimate.end if left else 0.0)


def rounds_passed(phases: Sequence[Phase], folder: Path) -> list[int]:
    """The rounds of each phase that are done or, since the phase ended early, will never be done."""
    done = Counter(line["phase"] for line in read_metrics(folder))
    checkpoints, _ = find_newest(folder)
    progress = checkpoints[0].progress if checkpoints else Progress()
    begun = [number for number, phase in enumerate(phases) if done[phase.settings.name]]
    current = len(phases) if (folder / "result.json").exists() else max([progress.phase, *begun])
    passed = []
    for number, phase in enumerate(phases):
        settings = phase.settings
        is_over = number < current or (number == progress.phase and why_over(settings.stop, progress) is not None)
        passed.append(settings.rounds if is_over else min(done[settings.name], settings.rounds))
    return passed


def bytes_up(phase: Phase, experiment: Experiment) -> float:
    """What the clients of a round send, uncompressed, without their masks: about."""
    replies = phase.method.replies
    is_sums = "delta" not in replies  # these are float64, and so are the numbers that are summed in secret
    width = 8 if is_sums or experiment.clients.zero_sum else WIDTHS[experiment.wire.values]
    return float(width * phase.per_round * sum(sent(phase, name, length) for name, length in replies.items()))


def bytes_down(phase: Phase) -> float:
    """What the clients of a round are sent: at most, since they are sent what they lack."""
    mask, extras = phase.settings.mask, phase.method.extras
    is_shared = mask is not None and mask.has_one_for_all  # else other clients need other values
    others = sum(sent(phase, name, length) if is_shared else length for name, length in extras.items())
    return 4.0 * phase.per_round * (phase.scope.size + others)


def sent(phase: Phase, name: str, length: int) -> float:
    """How many values of a method's vector are sent: those that the mask leaves active, if it is under the mask."""
    mask = phase.settings.mask
    if mask is None or name not in phase.method.masked:
        return length
    return length - (mask.sparsity or 0.0) * phase.scope.sieved_weights
