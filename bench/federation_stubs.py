"""Nodes that have no data and do not train, for bench/federation.py: many of them fit into one process.

Each speaks the relay's protocol with the real SuperLink, with its own key over TLS, and answers requests itself instead
of handing them to a node. Replies to `train` are valid updates of random content. They wait until all nodes have been
asked, so that all replies of a round are under way at the same time.
"""

import threading
from pathlib import Path
from typing import Any

import torch
from federation_ours import Ours
from workload import as_experiment

from fedsieve.context import RunContext
from fedsieve.data.manifest import read_federation
from fedsieve.engine.node_facts import facts, versions
from fedsieve.engine.torch_setup import configure_torch
from fedsieve.federate.transport import Transport
from fedsieve.federate.types import Update
from fedsieve.federate.versions import Versions
from fedsieve.federation.keys import read_private_key
from fedsieve.federation.relay import FleetConnection, Relay
from fedsieve.federation.socket_frames import LARGEST, Frame
from fedsieve.observe.callbacks import Callback
from fedsieve.phase import plan

PATIENCE = 300.0  # seconds that a reply waits for the others
STEP = 1e-3  # about how far a weight goes


class Stubs:
    """A stub for each client of a federation, in threads of this process."""

    def __init__(self, ours: Ours) -> None:
        experiment = as_experiment(ours.settings).resolved()
        configure_torch(experiment)
        self.facts = facts(experiment)
        phase = plan(experiment, context := RunContext(experiment, Callback()))[0]
        nobody = Versions.of_nobody()
        self.transport = Transport(phase.scope, "all", experiment.wire, nobody, experiment.seed, None, phase.method)
        self.weights, self.federation = phase.scope.size, read_federation(ours.loopback.manifest)
        self.everybody = threading.Barrier(len(context.partition.clients), timeout=PATIENCE)
        place, authority = ours.loopback.place, ours.loopback.superlink.files[0]
        self.relays = []
        for client, name in enumerate(ours.loopback.clients):
            key = read_private_key(ours.loopback.folder / "keys" / name)
            self.relays.append(Stub(self, client, FleetConnection.at(place, authority, key)))
        self.threads = [threading.Thread(target=relay.run, daemon=True) for relay in self.relays]

    def start(self) -> None:
        for relay in self.relays:
            relay.begin()
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        self.everybody.abort()
        for relay in self.relays:
            relay.stop()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join(10)

    # What they answer.

    def hello(self, client: int) -> Frame:
        told = self.federation.clients[client]
        about = {"name": told.name, "samples": told.samples, "class_counts": told.class_counts}
        return Frame({**about, "classes": self.federation.classes, **versions()})

    def train(self, client: int, about: dict[str, Any]) -> Frame:
        """An update of this client and round, once all clients were asked."""
        generator = torch.Generator().manual_seed(1000 * about["round"] + client)
        delta = (torch.rand(self.weights, generator=generator) - 0.5).mul_(2 * STEP)
        metrics = {"train_loss": 1.0, "drift": float(torch.linalg.vector_norm(delta))}
        update = Update(client, self.federation.clients[client].samples, {"delta": delta}, metrics)
        encoded, _ = self.transport.encode_update(update, about["round"], {})
        self.everybody.wait()
        return Frame({"about": {"encodings": list(encoded.encodings.values()), "remembers": None}}, [encoded.data])


class Stub(Relay):
    """A relay whose node is `Stubs`."""

    def __init__(self, stubs: Stubs, client: int, superlink: FleetConnection) -> None:
        super().__init__(superlink, Path(), LARGEST, print)
        self.stubs, self.client = stubs, client

    def _asked(self, request: Frame, until: float) -> Frame:
        do = request.header["do"]
        if do == "hello":
            return self.stubs.hello(self.client)
        if do == "join":
            return Frame({"facts": self.stubs.facts})
        return self.stubs.train(self.client, request.header["about"]) if do == "train" else Frame({})
