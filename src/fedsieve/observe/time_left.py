"""The time that a run has left: its estimate, corrected by what its rounds took so far.

An estimate says how long each round takes compared with the others, since some evaluate and the first ones calibrate
masks. The rounds of the current phase say how far the estimate is off:

    left = pace × estimate of the phase's rounds that are left  +  correction × estimate of the later phases

Without an estimate, all rounds of a phase count the same, and nothing is known of later phases.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WINDOW = 10  # rounds: older ones do not tell the pace
FEW = 5  # rounds: from here on, the quickest and the slowest are left out
DOUBT = 0.2  # a phase's estimate counts like measurements of a fifth of its time


@dataclass(frozen=True)
class PhaseEstimate:
    """Estimated seconds of a phase."""

    name: str
    rounds: tuple[float, ...]  # of each round
    clients: int = 0  # in a round
    start: float = 0.0  # before the first round: masks
    features: float = 0.0  # before the first round, if no earlier run has computed them
    end: float = 0.0  # after the last round: the test

    @property
    def seconds(self) -> float:
        return self.features + self.start + sum(self.rounds) + self.end


@dataclass
class Others:
    """Runs of the same experiment with other seeds: how many are still to come, and how long finished ones took."""

    left: int = 0
    took: list[float] = field(default_factory=list)


class TimeLeft:
    """Hears of rounds and clients' replies, and says how many seconds are left.

    `seconds` may be called from another thread.
    """

    def __init__(
        self,
        phases: Sequence[PhaseEstimate],
        done: int = 0,
        is_timed: bool = True,
        others: Others | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """After `done` rounds in all phases. `is_timed`: estimates are in seconds, not just relative to each other."""
        self.phases, self.is_timed, self.clock = phases, is_timed, clock
        self.others = others or Others()
        self.is_resumed = done > 0
        self.phase, self.done = 0, done  # the current phase, and rounds done in it
        while self.phase < len(phases) - 1 and self.done >= len(phases[self.phase].rounds):
            self.done -= len(phases[self.phase].rounds)
            self.phase += 1
        self._measured: list[tuple[float, float]] = []  # of the phase's rounds: seconds, and as estimated
        self._before = (0.0, 0.0)  # the same for all rounds of earlier phases
        self._began = self._since = clock()  # of the run; of whatever came last
        self._round_began: float | None = None  # the training of its clients
        self._round_ended: float | None = None  # the last one in this phase
        self._replied = 0.0  # share of the clients in the current round

    def enter(self, phase: str) -> None:
        """A phase begins. It may be a later one than the next, since phases may end early."""
        names = [one.name for one in self.phases]
        if phase in names and names.index(phase) != self.phase:
            self._begin(names.index(phase))

    def client(self, done: int, total: int) -> None:
        """So many of a round's clients have replied; 0 when their training begins."""
        self._since = self.clock()
        if not done:
            self._round_began = self._since
        self._replied = done / max(1, total)  # none may be chosen

    def round(self, number: int) -> None:
        """A round of the current phase is done."""
        now = self.clock()
        here = self.phases[self.phase]
        began = self._round_ended if self._round_ended is not None else self._round_began
        if began is not None:
            self._measured.append((now - began, here.rounds[min(number, len(here.rounds)) - 1]))
        self._since, self._round_began, self._round_ended, self._replied = now, None, now, 0.0
        self.done = number
        if number >= len(here.rounds) and self.phase < len(self.phases) - 1:
            self._begin(self.phase + 1)

    def _begin(self, phase: int) -> None:
        self._before = self._sums()
        self._measured, self._round_ended = [], None
        self.phase, self.done = phase, 0

    def finished(self) -> None:
        """The run is over: it says how long another one takes."""
        if not self.is_resumed:
            self.others.took.append(self.clock() - self._began)

    @property
    def is_whole(self) -> bool:
        """Whether `seconds` covers the whole run, and not the current phase only."""
        return self.is_timed or (self.phase == len(self.phases) - 1 and not self.others.left)

    def seconds(self) -> float | None:
        """Estimated seconds until the end (or that of the phase, unless `is_whole`); None if nothing is known yet."""
        now, here, done = self.clock(), self.phases[self.phase], self.done
        correction = self._correction() if self.is_timed else None
        pace = self._pace(now, correction)
        if pace is None:
            return None
        # The current round, the others of the phase, and the test after them.
        is_over = done >= len(here.rounds)
        left = 0.0 if is_over else pace * (sum(here.rounds[done + 1 :]) + here.end)
        current = pace * (here.end if is_over else here.rounds[done] * (1 - self._replied))
        if self._round_began is None and not done:
            current += pace * (here.features + here.start)
        left += max(0.0, current - (now - self._since))
        if correction is None:
            return left
        left += correction * sum(phase.seconds for phase in self.phases[self.phase + 1 :])
        return left + self.others.left * self._another(now, left, correction)

    def _pace(self, now: float, correction: float | None) -> float | None:
        """Seconds for an estimated second in the current phase."""
        if self._measured:
            return trimmed_ratio(self._measured)
        here, began, done = self.phases[self.phase], self._round_began, self.done
        if began is None or done >= len(here.rounds):
            return correction
        # In the first round, clients' replies tell the more of the pace the more of them there are.
        taken, share = self._since - began, self._replied
        foreseen = here.rounds[done]
        if not share:
            return None if correction is None else max(correction, (now - began) / foreseen)
        by_clients = taken / (share * foreseen)
        return by_clients if correction is None else (1 - share) * correction + share * by_clients

    def _sums(self) -> tuple[float, float]:
        """Seconds of the rounds so far, measured and estimated."""
        seconds, foreseen = self._before
        return seconds + sum(one for one, _ in self._measured), foreseen + sum(one for _, one in self._measured)

    def _correction(self) -> float:
        """Seconds for an estimated second in later phases, by the rounds so far; short ones count little."""
        seconds, foreseen = self._sums()
        prior = DOUBT * sum(phase.seconds for phase in self.phases[self.phase :])
        return (seconds + prior) / (foreseen + prior) if foreseen + prior else 1.0

    def _another(self, now: float, left: float, correction: float) -> float:
        """Seconds of a run with another seed, for which features need not be computed again."""
        if self.others.took:
            return sum(self.others.took) / len(self.others.took)
        if self.is_resumed:
            return correction * sum(phase.seconds - phase.features for phase in self.phases)
        features = sum(phase.features for phase in self.phases)
        return max(0.0, now - self._began + left - correction * features)


def trimmed_ratio(measured: Sequence[tuple[float, float]]) -> float:
    """Measured over estimated seconds in a phase's last rounds, without the first round and without extremes."""
    last = list(measured[1:] if len(measured) > 2 else measured)[-WINDOW:]
    if len(last) >= FEW:
        last = sorted(last, key=lambda pair: pair[0] / pair[1])[1:-1]
    return sum(seconds for seconds, _ in last) / sum(estimated for _, estimated in last)
