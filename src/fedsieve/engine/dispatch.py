"""What engines share that hand jobs to other processes.

Answers come in the order of the jobs, so results do not depend on the number of processes. They come from a generator
that hands out jobs to free processes, never more than a few ahead of the answers already taken. Jobs that take less
time than sending them are done in this process.
"""

from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor

from fedsieve.engine.client_runtime import ClientRuntime
from fedsieve.engine.pace import Pace
from fedsieve.errors import WorkerError
from fedsieve.federate.transport import Transport
from fedsieve.federate.types import Answer, Courier, Job
from fedsieve.observe.profile import section

AHEAD = 2  # jobs per process that may be running or done ahead of the next answer
ATTEMPTS = 3  # at one job, before it is blamed for the death of processes


@dataclass
class Ticket:
    """A job whose answer is not yet taken."""

    job: Job
    place: int  # in the window
    deaths: int = 0
    answer: Answer | None = None

    def died(self, who: str) -> None:
        """Count the death of the process that had this job."""
        self.deaths += 1
        if self.deaths == ATTEMPTS:
            what = f"{self.job.do} of client {self.job.about.get('client', 'all')}"
            raise WorkerError(f"{ATTEMPTS} {who} died at the same job ({what}); too little memory?")


class Dispatcher:
    """Derived classes have the processes: they hand out jobs to them, listen to them, and replace those that die."""

    size: int  # how many processes there are
    courier: Courier | None = None

    def __init__(self, runtime: ClientRuntime) -> None:
        self.runtime, self.context = runtime, runtime.context
        self.pace = Pace()
        self.seconds: dict[str, float] = defaultdict(float)  # of all processes that do jobs, by section
        self._asking = False

    def begin(self, transport: Transport) -> None:
        """Jobs find what they need in what is published, so no messages are sent."""

    def publish(self, vectors: Mapping[str, Tensor]) -> None:
        """Let every job read these vectors. No job may be running when this is called."""
        if "model" in vectors:
            self.pace.forget()  # a phase begins
        self.runtime.take(vectors)

    def map(self, jobs: Iterable[Job]) -> Generator[Answer]:
        """Answers in the order of the jobs. If a job done here calls this, the inner jobs are done here, too."""
        if self._asking or not self._is_up():
            return (self.runtime.do(job) for job in jobs)
        return self._answers(iter(jobs))

    def _answers(self, jobs: Iterator[Job]) -> Generator[Answer]:
        if (first := next(jobs, None)) is None:
            return
        self._asking = True
        jobs, is_tiny = chain([first], jobs), self.pace.is_tiny(first) and self._may_do_here()
        try:
            yield from map(self._done_here, jobs) if is_tiny else self._gathered(jobs)
        except BaseException:
            if not is_tiny:
                self._give_up_jobs()
            raise
        finally:
            self._asking = False
            self.pace.end(first.do)

    def _done_here(self, job: Job) -> Answer:
        return self.pace.timed(self.runtime.do, job)

    def _gathered(self, jobs: Iterator[Job]) -> Iterator[Answer]:
        free, places = list[int](), 0
        under_way: deque[Ticket] = deque()  # in the order of the jobs, that of the next answer first
        waiting: deque[Ticket] = deque()  # for a process
        job = next(jobs, None)
        while True:
            while job is not None and len(under_way) < AHEAD * self.size:
                if not free:
                    free, places = [places], places + 1
                under_way.append(Ticket(job, free.pop()))
                waiting.append(under_way[-1])
                job = next(jobs, None)
            if not self._is_up():  # any more: their jobs are done here
                waiting = deque(ticket for ticket in under_way if ticket.answer is None)
            self._hand_out(waiting)
            if not under_way:
                return
            if (answer := under_way[0].answer) is not None:
                yield answer
                free.append(under_way.popleft().place)
            elif waiting and self._must_do_here():
                ticket = waiting.popleft()
                ticket.answer = _kept(self._done_here(ticket.job))
                self._listen(waiting, 0)
            else:
                with section("idle"):
                    self._listen(waiting, None)

    def _told(self, heard: Mapping[str, Any]) -> None:
        """Take what a process says beside the answer to a job: how long it took, notes, and why it failed."""
        for name, seconds in heard["seconds"].items():
            self.seconds[name] += seconds
        self.pace.add(sum(heard["seconds"].values()))
        for topic, note in heard["notes"].items():
            self.context.note(note, topic)
        if "failed" in heard:
            raise WorkerError(heard["failed"])

    # What derived classes have.

    def _is_up(self) -> bool:
        """Whether there are processes, or there will be."""
        raise NotImplementedError

    def _may_do_here(self) -> bool:
        """Whether jobs that are done here have the same bits."""
        return True

    def _must_do_here(self) -> bool:
        """Whether a job is better done here than kept waiting for a process."""
        return False

    def _hand_out(self, waiting: deque[Ticket]) -> None:
        """Give the first of the jobs to processes that are free."""
        raise NotImplementedError

    def _listen(self, waiting: deque[Ticket], timeout: float | None) -> None:
        """Hear of answers and deaths, and put lost jobs in front; `timeout` None: wait until there is something."""
        raise NotImplementedError

    def _give_up_jobs(self) -> None:
        """Jobs under way are no longer needed."""
        raise NotImplementedError


def _kept(answer: Answer) -> Answer:
    """A copy of an answer, which later jobs in this process do not change."""
    return Answer(answer.about, bytearray(memoryview(answer.data).cast("B")))
