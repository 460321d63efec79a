"""The resident process of a federation's node: it belongs to the owner of the data, and answers at a Unix socket.

It holds the data, the model, what the client remembers and its masks. Connections are served by threads, and all jobs
by the main thread, one after another, since torch's settings are those of a thread.
"""

import errno
import fcntl
import os
import queue
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128

from fedsieve.config.data_settings import DataSettings
from fedsieve.config.experiment_file import parse_experiment
from fedsieve.config.plugins import active
from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.data.manifest import federation_in
from fedsieve.data.pictures import shown
from fedsieve.data.roles import roles_of_node, training_samples
from fedsieve.data.shards import read_shard
from fedsieve.engine.node_facts import Facts, facts, versions
from fedsieve.engine.torch_setup import configure_torch
from fedsieve.errors import InputError, machine_error
from fedsieve.federate.blame import reason_of
from fedsieve.federation.links import SOCKET
from fedsieve.federation.node_run import LacksError, NodeRun
from fedsieve.federation.owner import Owner
from fedsieve.federation.socket_frames import PIECE, Frame, FrameError, receive, send
from fedsieve.observe.callbacks import Callback

RUN = re.compile(r"[0-9a-f]{32}")
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # for another connection
FILES = (".pth", ".pt", ".bin", ".safetensors")  # of backbones
PATIENCE = 10.0  # seconds, with what was refused
PARTS = 64  # of the weights whose norms are compared
LONGEST_PATH = 100  # of a socket's name, on every system


@dataclass(frozen=True)
class NodeSetup:
    """What a node's owner says when it is started."""

    name: str
    data: Path
    folder: Path  # where it keeps what it remembers, and its socket
    backbone: str | None = None  # where the model's file lies here
    init: str | None = None
    device: str | None = None
    plugins: tuple[str, ...] = ()  # loaded already
    pinned: Experiment | None = None  # the only one that it takes part in
    owner: Owner = field(default_factory=Owner)

    @property
    def socket(self) -> Path:
        return self.folder / SOCKET


@dataclass
class Visit:
    """A request that waits for its turn."""

    connection: socket.socket
    request: Frame
    reply: Frame | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for the reply."""
        with suppress(BlockingIOError, OSError):
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return False


class Node:
    """Answers requests, first of all `hello` and `join`."""

    def __init__(self, setup: NodeSetup, note: Callable[[str], None] = lambda _: None) -> None:
        self.setup, self.note = setup, note
        self.run: NodeRun | None = None
        self.run_id = ""
        self._visits: queue.Queue[Visit | None] = queue.Queue()
        self._lock: IO[str] | None = None
        samples, classes = read_shard(setup.data, DataSettings(image_size=32))
        counts = np.bincount(samples.labels.numpy(), minlength=len(classes)).tolist()
        self._take_folder()
        tells = setup.owner.tells
        self.about: Facts = {
            "name": setup.name,
            "samples": len(samples) if "samples" in tells else 1,
            "classes": classes,
            "class_counts": counts if {"samples", "classes"} <= tells else None,
            **versions(),
        }
        self.samples = len(samples)

    def _take_folder(self) -> None:
        """One process for each folder."""
        folder = self.setup.folder
        if len(str(self.setup.socket.absolute())) > LONGEST_PATH:
            raise InputError(f"--folder {folder} is too long a name for a socket; use a shorter one")
        try:
            if not folder.exists():
                folder.mkdir(parents=True)
                folder.chmod(0o710)  # the relay, perhaps of another user in the same group, may open the socket
            (folder / "runs").mkdir(mode=0o700, exist_ok=True)
            self._lock = (folder / ".lock").open("w", encoding="utf-8")
        except OSError as error:
            raise InputError(f"--folder {folder} cannot be made ({error.strerror}); give another one") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"--folder {folder} is in use by another node; give each its own") from None

    # The socket.

    def serve(self, ready: Callable[[], None] = lambda: None) -> None:
        """Answer until `stop` is called."""
        with socket.socket(socket.AF_UNIX) as listener:
            self.listen(listener)
            try:
                ready()
                while (visit := self._visits.get()) is not None:
                    if not visit.is_given_up:
                        visit.reply = self._answered(visit.request)
                    visit.done.set()
            finally:
                self.setup.socket.unlink(missing_ok=True)

    def listen(self, listener: socket.socket) -> None:
        """Take connections; their requests wait for the main thread."""
        path = self.setup.socket.absolute()
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        os.chown(path, -1, path.parent.stat().st_gid)
        path.chmod(0o660)  # the relay may be of another user in the same group
        listener.listen()
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def stop(self) -> None:
        self._visits.put(None)

    def close(self) -> None:
        """Let another node have the folder."""
        if self._lock is not None:
            self._lock.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno not in NO_ROOM:  # closed
                    return
                time.sleep(0.1)  # until others have ended
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """One connection: requests and replies in turn."""
        with connection, suppress(OSError):
            while True:
                try:
                    request = receive(connection, self.setup.owner.message)
                except FrameError as error:
                    send(connection, Frame({"refused": str(error)}))
                    _drain(connection)
                    return
                if request.header.get("do") == "hello":  # also while a job is done
                    send(connection, Frame(self.about))
                    continue
                visit = Visit(connection, request)
                self._visits.put(visit)
                visit.done.wait()
                if visit.reply is None:
                    return
                send(connection, visit.reply)

    # Requests.

    def _answered(self, request: Frame) -> Frame:
        """A reply to whatever was sent."""
        try:
            do, run = request.header.get("do"), str(request.header.get("run"))
            if not RUN.fullmatch(run):
                return Frame({"refused": "the request belongs to no run"})
            if do == "join":
                return Frame(self._join(request.header, run))
            if self.run is None or run != self.run_id:
                return Frame({"lacks": "run"})
            if do == "end":
                return Frame(self._end(run))
            return self.run.do(request)
        except LacksError:
            return Frame({"lacks": "weights"})
        except InputError as error:
            return Frame({"refused": reason_of(error)})
        except Exception as error:
            known = machine_error(error)
            self.note(shown(f"{str(request.header.get('do'))[:40]}: {reason_of(known or error)}"))
            return Frame({"failed": reason_of(known or error)})

    def _join(self, header: dict[str, Any], run: str) -> dict[str, Any]:
        """Take part in a run, from now on in no other."""
        self.run = None
        setup, client = self.setup, int(header["client"])
        federation = federation_in(str(header["federation"]), "the server")
        if not 0 <= client < len(federation.clients) or federation.clients[client].name != setup.name:
            raise InputError(f"the server says that it is client {client}, which is another one")
        experiment = self._experiment(str(header["experiment"]), dict(header["plugins"]))
        configure_torch(experiment)
        samples, _ = read_shard(setup.data, experiment.data, federation.classes, federation.image_shape)
        told = training_samples(experiment, federation.clients[client].samples)
        if "samples" not in setup.owner.tells:  # the server goes by the manifest, or believes that there is one
            federation = federation.with_samples(client, len(samples))
        roles = roles_of_node(experiment, federation, samples, client)
        context = RunContext(experiment, Callback(), roles=roles)
        if header["start"] is not None and not starts_alike(context.model.vector, header["start"]):
            raise InputError("its model begins with other weights than the server's; give --backbone the same file")
        folder = setup.folder / "runs" / run
        self.run, self.run_id = NodeRun(context, folder, client, setup.owner, told), run
        self.note(f"takes part in run {run[:8]} as client {client}")
        return {"facts": facts(experiment)}

    def _experiment(self, text: str, plugins: dict[str, str]) -> Experiment:
        """The server's experiment, with this node's own places; InputError if its owner does not allow it."""
        setup = self.setup
        mine = {plugin.name: plugin.digest for plugin in active(setup.plugins)}
        for name, digest in plugins.items():
            if name not in mine:
                what = f"the experiment needs the plugin {name}, and no code is taken from the server"
                raise InputError(f"{what}; get it from somebody you trust, and start the node with --plugin FILE")
            if mine[name] != digest:
                raise InputError(f"its plugin {name} is not the same as the server's; use the same file")
        theirs = parse_experiment(text, "the server's experiment")
        if setup.pinned is not None and not _anywhere(setup.pinned).same_outcome(_anywhere(theirs)):
            raise InputError("the server runs another experiment than the one that its owner allows (--experiment)")
        if (reason := setup.owner.refusal(theirs)) is not None:
            raise InputError(reason)
        model = theirs.model
        for key, place in (("backbone", setup.backbone), ("init", setup.init)):
            if place is not None:
                model = model.model_copy(update={key: place})
            elif (wanted := getattr(model, key)) is not None and (key == "init" or _is_place(wanted)):
                raise InputError(f"it does not know where its file for model.{key} lies; start it with --{key} FILE")
        device = setup.device or theirs.device
        update = {"model": model, "device": device, "plugins": (), "engine": "local", "workers": 1, "track": ()}
        return theirs.model_copy(update=update)

    def _end(self, run: str) -> dict[str, Any]:
        """The run is over: nothing of it is needed any more."""
        self.run, self.run_id = None, ""
        shutil.rmtree(self.setup.folder / "runs" / run, ignore_errors=True)
        self.note(f"run {run[:8]} is finished")
        return {}


def _drain(connection: socket.socket) -> None:
    """Let the other end send the rest of what was refused, for else it would not read why."""
    connection.shutdown(socket.SHUT_WR)
    connection.settimeout(PATIENCE)
    while connection.recv(PIECE):
        pass


def _is_place(backbone: str) -> bool:
    """Whether a backbone's name would open a file or a folder here, which the server has no business to choose."""
    path = Path(backbone)
    return backbone.startswith(("/", ".", "~")) or path.suffix in FILES or (backbone != "pico" and path.exists())


def _anywhere(experiment: Experiment) -> Experiment:
    """Without what depends on the machine: where files lie, and its device."""
    model, names = experiment.model, {}
    for key in ("backbone", "init"):
        if (place := getattr(model, key)) is not None:
            names[key] = Path(place).name
    phases = tuple(
        phase.model_copy(update={"mask": phase.mask.model_copy(update={"file": Path(phase.mask.file).name})})
        if phase.mask is not None and phase.mask.file is not None
        else phase
        for phase in experiment.phases
    )
    data = experiment.data.model_copy(update={"path": None})
    update = {"model": model.model_copy(update=names), "phases": phases, "data": data, "device": "auto"}
    return experiment.model_copy(update=update)


def start_of(vector: Tensor) -> dict[str, Any]:
    """By which server and nodes find that they start from the same weights."""
    digest = xxh3_128(vector.detach().cpu().contiguous().numpy().data).hexdigest()
    return {"digest": digest, "norms": [float(part.double().norm()) for part in vector.detach().cpu().chunk(PARTS)]}


def starts_alike(vector: Tensor, theirs: Any) -> bool:
    """Whether weights are those of another machine; last bits of a new head may differ where the CPU is another one."""
    mine = start_of(vector)
    if not isinstance(theirs, dict) or mine["digest"] == theirs.get("digest"):
        return isinstance(theirs, dict)
    norms = torch.tensor(mine["norms"]), torch.tensor([float(one) for one in theirs["norms"]])
    return len(norms[0]) == len(norms[1]) and torch.allclose(*norms, rtol=1e-5, atol=1e-6)
