"""What a worker process does: jobs, one after another, until the main process is gone."""

import os
import signal
import socket
from pathlib import Path
from typing import Any

from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.data.load import Dataset
from fedsieve.engine.channel import SharedBuffer, receive, send
from fedsieve.engine.client_runtime import ClientRuntime
from fedsieve.engine.kept import KeptInFolder
from fedsieve.engine.published import VectorReader
from fedsieve.engine.torch_setup import configure_torch
from fedsieve.federate.blame import reason_of
from fedsieve.federate.types import Job
from fedsieve.model.given_module import Model
from fedsieve.observe.callbacks import Callback
from fedsieve.observe.profile import stopwatch
from fedsieve.phase import plan


def work(
    server: socket.socket,
    experiment: Experiment,
    data: Dataset,
    given: Model | None,
    folder: Path,
    vectors: SharedBuffer,
    slots: list[SharedBuffer],
    number: int,
) -> None:
    """Do jobs until the main process is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    configure_torch(experiment, number)
    try:
        context = RunContext(experiment, Callback(), data=data, given=given)
        runtime = ClientRuntime(context, plan(experiment, context), KeptInFolder(folder))
        fingerprint = context.fingerprint  # computed now, before the weights change
    except Exception as error:
        send(server, {"failed": reason_of(error)})
        return
    send(server, {"pid": os.getpid(), "fingerprint": fingerprint})
    reader, said = VectorReader(vectors), set(context.noted)  # the main process has these notes, too
    stopwatch.start()
    while True:
        try:
            do_next(server, runtime, reader, slots, said)
        except EOFError:
            return


def do_next(
    server: socket.socket, runtime: ClientRuntime, reader: VectorReader, slots: list[SharedBuffer], said: set[str]
) -> None:
    """Do the next job. When this returns, the memory of its result is free for the job after it."""
    about, payload = receive(server)
    stopwatch.take()  # the time since the last job was idle
    answer: dict[str, Any] = {}
    result: Any = b""
    try:
        if new := reader.new(about["vectors"]):
            runtime.take(new)
        done = runtime.do(Job(about["do"], about["about"], payload))
        answer, result = {"about": done.about}, memoryview(done.data).cast("B")
    except Exception as error:
        answer = {"failed": reason_of(error)}
    noted = runtime.context.noted
    answer["seconds"] = dict(stopwatch.take())
    answer["notes"] = {topic: text for topic, text in noted.items() if topic not in said}
    said |= noted.keys()
    send(server, answer, result, slots[about["slot"]])
