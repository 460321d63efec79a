"""The process that worker processes are born from, and what a worker does.

It imports what workers need and loads the data, once; each worker is a fork of it, so a new one is there in a moment
and the images are in memory only once. It computes nothing itself: forking a process whose thread pools have worked
would leave the child waiting for threads that it does not have.
"""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import torch

from fedsieve.array_file import verified
from fedsieve.config import Experiment
from fedsieve.data.load import Dataset, load
from fedsieve.experiment_file import parse_experiment
from fedsieve.federate.clients import reason_of
from fedsieve.federate.jobs import Job
from fedsieve.observer import Observer
from fedsieve.workbench import Workbench, configure_torch
from fedsieve.workers.channel import SharedBuffer, receive, send
from fedsieve.workers.leash import tie
from fedsieve.workers.twin import Twin


def serve(lifeline: int, control_fd: int, weights_fd: int, verified_fd: int, *slot_fds: int) -> None:
    """Make a worker whenever the main process asks for one. The numbers are inherited file descriptors."""
    torch.set_num_threads(1)  # of this process: it must have no pool of threads when it is forked
    verified.share(verified_fd)
    control = socket.socket(fileno=control_fd)
    setup, _ = receive(control)
    try:
        experiment = parse_experiment(setup["experiment"], "the experiment")
        data = load(experiment.data)
        data.train.fingerprint, data.test.fingerprint  # noqa: B018 (kept with the data, for all workers)
    except Exception as error:
        send(control, {"failed": reason_of(error)})
        return
    send(control, {})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how workers ended
    own = os.getpid()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 4, 1)
        if not message:
            return
        if os.fork() == 0:
            try:
                tie(lifeline, own)
                control.close()
                slots = [SharedBuffer(fd) for fd in slot_fds]
                work(
                    socket.socket(fileno=fds[0]),
                    experiment,
                    data,
                    Path(setup["folder"]),
                    SharedBuffer(weights_fd),
                    slots,
                    int(message),
                )
            finally:
                os._exit(0)
        os.close(fds[0])


def work(
    server: socket.socket,
    experiment: Experiment,
    data: Dataset,
    folder: Path,
    weights: SharedBuffer,
    slots: list[SharedBuffer],
    number: int,
) -> None:
    """Do jobs until the main process is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    configure_torch(experiment, number)
    try:
        bench = Workbench(experiment, Observer(), data=data)
        twin = Twin(experiment, bench, folder, weights)
    except Exception as error:
        send(server, {"failed": reason_of(error)})
        return
    send(server, {"pid": os.getpid()})
    said = set(bench.noted)  # also by the main process
    while True:
        try:
            _do_next(server, twin, slots, said)
        except EOFError:
            return


def _do_next(server: socket.socket, twin: Twin, slots: list[SharedBuffer], said: set[str]) -> None:
    """The next job; when this returns, the memory of its result is free for the one after it."""
    about, payload = receive(server)
    answer: dict[str, Any] = {}
    result: Any = b""
    try:
        done = twin.do(Job(about["do"], about["about"], payload), about["weights"])
        answer, result = {"about": done.about}, memoryview(done.data).cast("B")
    except Exception as error:
        answer = {"failed": reason_of(error)}
    noted = twin.bench.noted
    answer["seconds"] = twin.take_seconds()
    answer["notes"] = {topic: text for topic, text in noted.items() if topic not in said}
    said |= noted.keys()
    send(server, answer, result, slots[about["slot"]])
