"""The process that worker processes are forked from.

It imports what workers need and loads the data, once. Each worker is a fork of it, so a new one starts quickly and
the images are in memory only once. It computes nothing itself: if its thread pools had been used, a forked worker
would wait for threads that it does not have.
"""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import torch

from fedsieve.config.experiment_file import parse_experiment
from fedsieve.config.plugins import activate
from fedsieve.data.load import load
from fedsieve.engine.channel import SharedBuffer, receive, send
from fedsieve.engine.parcel import unpacked
from fedsieve.engine.worker import work
from fedsieve.federate.blame import reason_of
from fedsieve.files.array_file import verified


def serve(
    tie: Callable[[int], None], control_fd: int, vectors_fd: int, verified_fd: int, parcel_fd: int, *slot_fds: int
) -> None:
    """Fork a worker whenever the main process requests one. The numbers are inherited file descriptors.

    `tie(parent)` makes a worker end with the main process, and with this process, its parent.
    """
    torch.set_num_threads(1)  # this process must have no thread pool when it forks
    verified.share(verified_fd)
    control = socket.socket(fileno=control_fd)
    setup, _ = receive(control)
    try:
        for path, text in setup["plugins"].items():  # the same text, even if the file was changed since
            activate(path, text)
        experiment = parse_experiment(setup["experiment"], "the experiment")
        data, given = unpacked(SharedBuffer(parcel_fd), setup["parcel"])
        data = data or load(experiment.data)
        data.train.fingerprint, data.test.fingerprint  # noqa: B018 (kept with the data, for all workers)
    except Exception as error:
        send(control, {"failed": reason_of(error)})
        return
    send(control, {})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers' exit codes are not needed
    own = os.getpid()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 4, 1)
        if not message:
            return
        if os.fork() == 0:
            try:
                tie(own)
                control.close()
                slots = [SharedBuffer(fd) for fd in slot_fds]
                work(
                    socket.socket(fileno=fds[0]),
                    experiment,
                    data,
                    given,
                    Path(setup["folder"]),
                    SharedBuffer(vectors_fd),
                    slots,
                    int(message),
                )
            finally:
                os._exit(0)
        os.close(fds[0])
