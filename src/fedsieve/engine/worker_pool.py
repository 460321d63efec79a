"""Worker processes on this machine do the jobs of a run.

As long as no worker is ready, jobs are done in this process, so a short run never waits for processes to start. A
worker that dies is replaced, and its job is given to another one.
"""

import os
import selectors
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from fedsieve.config.plugins import active
from fedsieve.engine.channel import SharedBuffer, receive, send
from fedsieve.engine.client_runtime import ClientRuntime
from fedsieve.engine.dispatch import AHEAD, ATTEMPTS, Dispatcher, Ticket
from fedsieve.engine.kept import KeptInFolder
from fedsieve.engine.lifeline import parent_to_die_with
from fedsieve.engine.parcel import Parcel
from fedsieve.engine.published import PublishedVectors
from fedsieve.federate.types import Answer, Job
from fedsieve.files.array_file import verified


@dataclass
class Worker:
    number: int
    line: socket.socket
    pid: int | None = None  # None: it is not ready yet
    ticket: Ticket | None = None


class WorkerPool(Dispatcher):
    """Worker processes, which start and end with the run."""

    def __init__(self, runtime: ClientRuntime, parcel: Parcel) -> None:
        super().__init__(runtime)
        assert isinstance(self.context.experiment.workers, int)
        self.size = self.context.experiment.workers
        self.vectors, self.verified = PublishedVectors(SharedBuffer()), SharedBuffer()
        verified.share(self.verified.fd)
        self.parcel = parcel
        # Workers load what the run starts from themselves. It must be the same, unless they are sent a whole model.
        self.fingerprint = self.context.fingerprint if self.context.is_as_started else None
        self.slots: list[SharedBuffer] = []
        self.workers: list[Worker] = []
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lifeline: socket.socket | None = None  # all processes of the pool end when it is closed
        self._interrupted = False
        self._begun = False  # whether any worker has been ready
        self._stillborn = 0  # workers that died before they were ready, since the last one that was
        self._start()

    def publish(self, vectors: Mapping[str, Tensor]) -> None:
        """Copy the vectors to memory shared with all workers."""
        super().publish(vectors)
        self.vectors.write(vectors)

    def map(self, jobs: Iterable[Job]) -> Generator[Answer]:
        if self._interrupted:
            self._interrupted = self._begun = False
            self._start()
        return super().map(jobs)

    def wait(self) -> None:
        """Wait until all workers are ready or have failed to start; for measurements and tests."""
        while any(worker.pid is None for worker in self.workers):
            self._listen(deque(), None)

    def _is_up(self) -> bool:
        return bool(self.workers)

    def _must_do_here(self) -> bool:
        return not (self.workers and self._begun)

    def _give_up_jobs(self) -> None:
        self._stop()  # workers may be doing them
        self._interrupted = True

    def _hand_out(self, waiting: deque[Ticket]) -> None:
        for worker in self.workers:
            if waiting and worker.pid and worker.ticket is None:
                ticket = worker.ticket = waiting.popleft()
                about = {"do": ticket.job.do, "about": ticket.job.about, "slot": ticket.place}
                with suppress(OSError):  # the worker is gone, and `_listen` will notice
                    send(worker.line, about | {"vectors": self.vectors.places}, ticket.job.data)

    def _listen(self, waiting: deque[Ticket], timeout: float | None) -> None:
        with selectors.DefaultSelector() as selector:
            if self._control is not None:
                selector.register(self._control, selectors.EVENT_READ)
            for worker in self.workers:
                selector.register(worker.line, selectors.EVENT_READ, worker)
            ready = [key.data for key, _ in selector.select(timeout)]
        for worker in sorted(ready, key=lambda worker: worker is not None):  # the fork server first: workers end too
            try:
                self._hear(worker) if worker is not None else self._hear_fork_server()
            except EOFError:
                self._lost(worker, waiting)
            if worker is None:
                return  # the others may be gone with it, or can wait until the next call

    def _hear(self, worker: Worker) -> None:
        ticket = worker.ticket
        heard, data = receive(worker.line, self.slots[ticket.place] if ticket is not None else None)
        if ticket is None:  # its first message: it is ready, or has failed
            if "failed" in heard:
                self._dismiss(worker, heard["failed"])
            elif self.fingerprint is not None and heard["fingerprint"] != self.fingerprint:
                self._dismiss(worker, "the data or weights on disk have changed since the run began")
            else:
                worker.pid, self._begun, self._stillborn = heard["pid"], True, 0
            return
        self._told(heard)
        ticket.answer, worker.ticket = Answer(heard["about"], data), None

    # Processes.

    def _start(self) -> None:
        """Start the fork server and request workers; if the system refuses, go on without them."""
        try:
            self._start_fork_server()
        except OSError as error:
            self._give_up(error.strerror or str(error))

    def _start_fork_server(self) -> None:
        self.slots = [SharedBuffer() for _ in range(AHEAD * self.size)]
        (self._control, theirs), (self._lifeline, end) = socket.socketpair(), socket.socketpair()
        fds = [
            end.fileno(),
            theirs.fileno(),
            self.vectors.buffer.fd,
            self.verified.fd,
            self.parcel.buffer.fd,
            *(slot.fd for slot in self.slots),
        ]
        command = [sys.executable, "-P", "-m", "fedsieve.engine.lifeline", str(parent_to_die_with()), *map(str, fds)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        quiet = subprocess.DEVNULL
        self._fork_server = subprocess.Popen(
            command, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=fds, env=environment
        )
        end.close()
        theirs.close()
        assert isinstance(self.runtime.kept, KeptInFolder)
        experiment = self.context.experiment
        setup = {
            "experiment": experiment.to_yaml(),
            "plugins": {plugin.path: plugin.text for plugin in active(experiment.plugins)},
            "folder": str(self.runtime.kept.folder.resolve()),
            "parcel": self.parcel.about,
        }
        send(self._control, setup)
        for number in range(self.size):
            self._hire(number)

    def _hire(self, number: int) -> None:
        """Request a new worker; the fork server makes it as soon as it is ready."""
        ours, theirs = socket.socketpair()
        assert self._control is not None
        with suppress(OSError):  # the fork server is gone, and `_listen` will notice
            socket.send_fds(self._control, [b"%4d" % number], [theirs.fileno()])
        theirs.close()
        self.workers.append(Worker(number, ours))

    def _hear_fork_server(self) -> None:
        assert self._control is not None
        heard, _ = receive(self._control)
        if "failed" in heard:
            self._give_up(heard["failed"])

    def _give_up(self, reason: str) -> None:
        self.context.note(f"workers could not start ({reason}); going on in one process")
        self._stop()

    def _dismiss(self, worker: Worker, reason: str) -> None:
        """Go on without a worker that cannot start."""
        worker.line.close()
        self.workers.remove(worker)
        if self.workers:
            self.context.note(f"a worker could not start ({reason}); going on with {len(self.workers)}")
        else:
            self._give_up(reason)

    def _lost(self, worker: Worker | None, waiting: deque[Ticket]) -> None:
        """Replace a lost worker and do its job again; if the fork server is lost (None), replace all workers."""
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
            ticket.died("worker processes")
        if lost:
            self.context.callback.warning("a worker process died; what it was doing is done again")

    def _stop(self) -> None:
        """End all processes at once; their work is no longer needed."""
        if self._lifeline is not None:
            self._lifeline.close()
        if self._fork_server is not None:
            self._fork_server.kill()
            self._fork_server.wait()
        for line in [self._control, *(worker.line for worker in self.workers)]:
            if line is not None:
                line.close()
        for slot in self.slots:
            slot.close()
        self.workers, self.slots, self._fork_server, self._control, self._lifeline = [], [], None, None, None

    def close(self) -> None:
        """End all processes for good: the run is over."""
        self._stop()
        self._interrupted = False
        verified.share(None)
        for shared in (self.vectors.buffer, self.verified, self.parcel.buffer):
            shared.close()
