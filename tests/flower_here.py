"""A federation over Flower on this machine, for tests: real processes, with TLS and keys."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from fedsieve.experiment.export_split import export_split
from fedsieve.federation.loopback import Loopback
from listeners import Listener

Maker = Callable[..., Experiment]
CLIENTS = ["clients.count=5", "clients.fraction=1.0"]


class FlowerHere:
    """A SuperLink with five nodes; runs of an experiment as a simulation, and over them."""

    def __init__(self, experiment: Maker, backbone: Path, place: Path) -> None:
        self.experiment, self.backbone = experiment, backbone
        export_split(experiment(*CLIENTS).resolved(), place / "shards")
        self.loopback = Loopback(place / "shards")
        self.names = list(self.loopback.clients)

    def start(self) -> None:
        self.loopback.start_superlink()
        self.start_nodes(*self.names)
        self.loopback.start_relays(self.names)

    def start_nodes(self, *names: str) -> None:
        self.loopback.start_nodes(names, "--backbone", str(self.backbone))

    def restore(self) -> None:
        """Start what an earlier test has killed."""
        running = self.loopback.processes
        if "superlink" not in running:
            self.loopback.start_superlink()
        self.start_nodes(*[name for name in self.names if f"node {name}" not in running])
        self.loopback.start_relays([name for name in self.names if f"relay {name}" not in running])

    def settings(self, *changes: str, timeout: float = 60, manifest: bool = True) -> Experiment:
        engine = self.loopback.engine.replace("wait: 60", f"wait: 60, timeout: {timeout}")
        engine = engine if manifest else engine.replace(f", manifest: {self.loopback.manifest}", "")
        return self.experiment(*CLIENTS, *changes, engine)

    def simulated(self, out: Path, *changes: str) -> dict[str, Any]:
        return run(self.experiment(*CLIENTS, *changes), out)


Act = Callable[[], object]


class Acting(Listener):
    """Does something after some rounds, counted over all phases, and keeps the lines of metrics.

    `within` has what to do in a round when so many of its clients have replied: when none has, before they are asked.
    """

    def __init__(self, acts: dict[int, Act], within: dict[tuple[int, int], Act] | None = None) -> None:
        super().__init__()
        self.acts, self.within, self.lines = acts, within or {}, list[dict[str, Any]]()

    def round(self, line: dict) -> None:
        self.lines.append(line)
        if (act := self.acts.get(len(self.lines))) is not None:
            act()

    def client(self, done: int, total: int) -> None:
        if (act := self.within.pop((len(self.lines) + 1, done), None)) is not None:
            act()


def wait_until(is_so: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.05)
