"""Many processes do the jobs of a run; the answers come in the order of the jobs, so nobody can tell how many it were.

Whoever asks for answers gets them from a generator that hands out jobs to free workers, never more than a few ahead of
the answers already taken. As long as no worker is ready, jobs are done in this process, so a short run never waits
for processes that start, and so are jobs that are done sooner than they are sent. A worker that dies is replaced and
its job given to another one.
"""

import os
import selectors
import socket
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch

from fedsieve.array_file import verified
from fedsieve.config import Experiment
from fedsieve.errors import WorkerError
from fedsieve.federate.jobs import Answer, Job
from fedsieve.profile import section
from fedsieve.workbench import Workbench
from fedsieve.workers.channel import SharedBuffer, receive, send
from fedsieve.workers.leash import parent_to_die_with
from fedsieve.workers.twin import Published

AHEAD = 2  # jobs per worker that may be under way or done before the answer that is waited for
TINY = 0.003  # seconds: jobs that take less are done here, for to send one and wake another process takes as long
ATTEMPTS = 3  # at one job, before it is to blame for the death of workers


@dataclass
class Ticket:
    """A job on its way."""

    job: Job
    slot: int  # where large data of its answer goes
    deaths: int = 0
    answer: Answer | None = None


@dataclass
class Worker:
    number: int
    line: socket.socket
    pid: int | None = None  # None: it is not ready yet
    ticket: Ticket | None = None


@contextmanager
def at_work(experiment: Experiment, bench: Workbench, folder: Path) -> Iterator["Crew | None"]:
    """Within it, the workers that the experiment asks for do the bench's jobs; None: there is only this process."""
    if experiment.workers == 1:
        yield None
        return
    crew = Crew(experiment, bench, folder)
    bench.ask = crew.ask
    try:
        yield crew
    finally:
        bench.ask = bench.desk.ask
        crew.close()


class Crew:
    """The workers of a run: made with it, and gone with it."""

    def __init__(self, experiment: Experiment, bench: Workbench, folder: Path) -> None:
        assert isinstance(experiment.workers, int)
        self.experiment, self.bench, self.folder, self.size = experiment, bench, folder, experiment.workers
        self.weights, self.verified = SharedBuffer(), SharedBuffer()
        verified.share(self.verified.fd)
        self.shared = torch.frombuffer(self.weights.view(4 * len(bench.model.vector)), dtype=torch.float32)
        self.slots: list[SharedBuffer] = []
        self.seconds: dict[str, float] = defaultdict(float)  # of all workers, by section
        self.pace: dict[tuple[str, int], float] = {}  # what jobs of a kind took lately, in the phase under way
        self._took: list[float] = []  # what those of the asking under way took
        self.published = Published(0, -1, -1, [])
        self.workers: list[Worker] = []
        self._nursery: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lifeline: socket.socket | None = None  # all processes of the crew end when it is closed
        self._asking = self._interrupted = False
        self._begun = False  # whether any worker was ready yet
        self._stillborn = 0  # workers that died before they were ready, since the last one that was
        self._start()

    def ask(self, jobs: Iterable[Job]) -> Generator[Answer]:
        """Answers in the order of the jobs. Who is asked while doing a job here does it alone."""
        if self._interrupted:
            self._interrupted = self._begun = False
            self._start()
        if self._asking or not self.workers:
            return self.bench.desk.ask(jobs)
        return self._answers(iter(jobs))

    def wait(self) -> None:
        """Until all workers are ready, or it turns out that there will be none: for who measures or tests."""
        while any(worker.pid is None for worker in self.workers):
            self._listen(deque(), None)

    def _answers(self, jobs: Iterator[Job]) -> Generator[Answer]:
        """How long jobs take is judged by all of one asking: a round's last clients are its smallest."""
        if (first := next(jobs, None)) is None:
            return
        self._asking, self._took = True, []
        kind, jobs = (first.do, self.bench.begun), chain([first], jobs)
        is_tiny = self.pace.get(kind, 0.0 if first.is_light else TINY) < TINY
        try:
            yield from map(self._done_here, jobs) if is_tiny else self._gathered(jobs)
        except BaseException:
            if not is_tiny:
                self._stop()  # workers may be in the midst of jobs that nobody waits for any more
                self._interrupted = True
            raise
        finally:
            self._asking = False
            if self._took:
                self.pace[kind] = sum(self._took) / len(self._took)

    def _done_here(self, job: Job) -> Answer:
        started = time.perf_counter()
        answer = next(self.bench.desk.ask([job]))
        self._took.append(time.perf_counter() - started)
        return answer

    def _gathered(self, jobs: Iterator[Job]) -> Iterator[Answer]:
        free = list(range(len(self.slots)))
        under_way: deque[Ticket] = deque()  # in the order of the jobs, the next answer's first
        waiting: deque[Ticket] = deque()  # those that no worker has
        job = next(jobs, None)
        self._publish()
        while True:
            while free and job is not None:
                under_way.append(Ticket(job, free.pop()))
                waiting.append(under_way[-1])
                job = next(jobs, None)
            if not self.workers:  # any more: what they had is to be done here
                waiting = deque(ticket for ticket in under_way if ticket.answer is None)
            self._hand_out(waiting)
            if not under_way:
                return
            if (answer := under_way[0].answer) is not None:
                yield answer
                free.append(under_way.popleft().slot)
            elif waiting and not (self.workers and self._begun):
                ticket = waiting.popleft()
                ticket.answer = _kept(self._done_here(ticket.job))
                self._listen(waiting, 0)
            else:
                with section("idle"):
                    self._listen(waiting, None)

    def _publish(self) -> None:
        """Let workers see the weights as they are now: those that a phase changes or, if it is a new one, all."""
        vector, begun, last = self.bench.model.vector, self.bench.begun, self.published
        for start, stop in self.bench.moving if begun == last.begun else [(0, len(vector))]:
            self.shared[start:stop] = vector[start:stop].cpu()
        self.published = Published(last.version + 1, self.bench.phase, begun, self.bench.moving)

    def _hand_out(self, waiting: deque[Ticket]) -> None:
        for worker in self.workers:
            if waiting and worker.pid and worker.ticket is None:
                ticket = worker.ticket = waiting.popleft()
                about = {"do": ticket.job.do, "about": ticket.job.about, "slot": ticket.slot}
                with suppress(OSError):  # it is gone, and `_listen` will find out
                    send(worker.line, about | {"weights": asdict(self.published)}, ticket.job.data)

    def _listen(self, waiting: deque[Ticket], timeout: float | None) -> None:
        """Take what workers have to say, and see who is gone; `timeout` None: until there is something."""
        with selectors.DefaultSelector() as selector:
            if self._control is not None:
                selector.register(self._control, selectors.EVENT_READ)
            for worker in self.workers:
                selector.register(worker.line, selectors.EVENT_READ, worker)
            ready = [key.data for key, _ in selector.select(timeout)]
        for worker in sorted(ready, key=lambda worker: worker is not None):  # the nursery first: it takes all along
            try:
                self._hear(worker) if worker is not None else self._hear_nursery()
            except EOFError:
                self._lost(worker, waiting)
            if worker is None:
                return  # the others may be gone with it, or wait until the next time

    def _hear(self, worker: Worker) -> None:
        ticket = worker.ticket
        heard, data = receive(worker.line, self.slots[ticket.slot] if ticket is not None else None)
        if ticket is None:  # it says that it is ready
            if "failed" in heard:
                self._dismiss(worker, heard["failed"])
            else:
                worker.pid, self._begun, self._stillborn = heard["pid"], True, 0
            return
        for name, seconds in heard["seconds"].items():
            self.seconds[name] += seconds
        self._took.append(sum(heard["seconds"].values()))
        for topic, note in heard["notes"].items():
            self.bench.note(note, topic)
        if "failed" in heard:
            raise WorkerError(heard["failed"])
        ticket.answer, worker.ticket = Answer(heard["about"], data), None

    # Processes.

    def _start(self) -> None:
        """Start the nursery, and ask it for workers; if the system has no room for them, do without."""
        try:
            self._start_nursery()
        except OSError as error:
            self._give_up(error.strerror or str(error))

    def _start_nursery(self) -> None:
        self.slots = [SharedBuffer() for _ in range(AHEAD * self.size)]
        (self._control, theirs), (self._lifeline, end) = socket.socketpair(), socket.socketpair()
        fds = [end.fileno(), theirs.fileno(), self.weights.fd, self.verified.fd, *(slot.fd for slot in self.slots)]
        command = [sys.executable, "-P", "-m", "fedsieve.workers.leash", str(parent_to_die_with()), *map(str, fds)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        quiet = subprocess.DEVNULL
        self._nursery = subprocess.Popen(
            command, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=fds, env=environment
        )
        end.close()
        theirs.close()
        send(self._control, {"experiment": self.experiment.to_yaml(), "folder": str(self.folder.resolve())})
        for number in range(self.size):
            self._hire(number)

    def _hire(self, number: int) -> None:
        """A new worker; the nursery makes it when it is ready to."""
        ours, theirs = socket.socketpair()
        assert self._control is not None
        with suppress(OSError):  # the nursery is gone, and `_listen` will find out
            socket.send_fds(self._control, [b"%4d" % number], [theirs.fileno()])
        theirs.close()
        self.workers.append(Worker(number, ours))

    def _hear_nursery(self) -> None:
        assert self._control is not None
        heard, _ = receive(self._control)
        if "failed" in heard:
            self._give_up(heard["failed"])

    def _give_up(self, reason: str) -> None:
        self.bench.note(f"workers could not start ({reason}); going on in one process")
        self._stop()

    def _dismiss(self, worker: Worker, reason: str) -> None:
        """Go on without a worker that cannot start."""
        worker.line.close()
        self.workers.remove(worker)
        if self.workers:
            self.bench.note(f"a worker could not start ({reason}); going on with {len(self.workers)}")
        else:
            self._give_up(reason)

    def _lost(self, worker: Worker | None, waiting: deque[Ticket]) -> None:
        """Someone is gone: a worker is replaced, and its job done again; without the nursery (None) all are."""
        gone = [worker] if worker is not None else self.workers.copy()
        self._stillborn += all(one.pid is None for one in gone)
        if self._stillborn == ATTEMPTS:
            self._stillborn, reason = 0, "their processes ended; is there too little memory?"
            self._dismiss(worker, reason) if worker is not None else self._give_up(reason)
        elif worker is None:
            self._stop()
            self._start()
        else:
            worker.line.close()
            self.workers.remove(worker)
            self._hire(worker.number)
        lost = [one.ticket for one in gone if one.ticket is not None]
        waiting.extendleft(reversed(lost))
        for ticket in lost:
            ticket.deaths += 1
            if ticket.deaths == ATTEMPTS:
                what = f"{ticket.job.do} of client {ticket.job.about.get('client', 'all')}"
                raise WorkerError(f"{ATTEMPTS} worker processes died at the same job ({what}); too little memory?")
        if lost:
            self.bench.observer.warning("a worker process died; what it was doing is done again")

    def _stop(self) -> None:
        """End all processes at once; nothing of what they do is needed any more."""
        if self._lifeline is not None:
            self._lifeline.close()
        if self._nursery is not None:
            self._nursery.kill()
            self._nursery.wait()
        for line in [self._control, *(worker.line for worker in self.workers)]:
            if line is not None:
                line.close()
        for slot in self.slots:
            slot.close()
        self.workers, self.slots, self._nursery, self._control, self._lifeline = [], [], None, None, None

    def close(self) -> None:
        """The run is over."""
        self._stop()
        self._interrupted = False
        verified.share(None)
        for shared in (self.weights, self.verified):
            shared.close()


def _kept(answer: Answer) -> Answer:
    """An answer that stays as it is whatever is done next in this process."""
    return Answer(answer.about, bytearray(memoryview(answer.data).cast("B")))
