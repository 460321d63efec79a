"""How long jobs of a kind take, to do those here that take less time than sending them."""

import time
from collections.abc import Callable

from fedsieve.federate.types import Answer, Job

TINY = 0.003  # seconds: for shorter jobs, sending one and waking another process takes as long


class Pace:
    """The mean over all jobs of one kind in one call of `map`, since a round's last clients are its smallest."""

    def __init__(self) -> None:
        self.means: dict[str, float] = {}  # seconds, in the current phase
        self._took: list[float] = []  # seconds of each job of the current call

    def is_tiny(self, job: Job) -> bool:
        """Whether jobs like this one, the first of a call, are done sooner than sent."""
        self._took = []
        return self.means.get(job.do, 0.0 if job.is_light else TINY) < TINY

    def timed(self, do: Callable[[Job], Answer], job: Job) -> Answer:
        started = time.perf_counter()
        answer = do(job)
        self.add(time.perf_counter() - started)
        return answer

    def add(self, seconds: float) -> None:
        self._took.append(seconds)

    def end(self, kind: str) -> None:
        """End a call, of jobs of this kind."""
        if self._took:
            self.means[kind] = sum(self._took) / len(self._took)

    def forget(self) -> None:
        self.means.clear()
