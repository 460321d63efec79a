"""Which nodes are there before a federated run begins: each says who it is, and gets a client's number by its name."""

import json
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsieve.config.engine_settings import FederationSettings, FlowerSettings, SocketSettings
from fedsieve.config.schema import Experiment
from fedsieve.data.manifest import ClientFacts, Federation, read_federation
from fedsieve.data.pictures import shown
from fedsieve.engine.node_facts import difference, versions
from fedsieve.errors import InputError
from fedsieve.federation.links import Link, SocketLink, needs_flower
from fedsieve.federation.socket_frames import Frame
from fedsieve.federation.superlink_folder import SuperLinkFolder
from fedsieve.files.atomic import write_text
from fedsieve.runs.roster import ROSTER

RUN = re.compile(r"[0-9a-f]{32}")  # a run's name
HELLO = 60.0  # seconds that a node has to say who it is
OFTEN = 10.0  # seconds between two notes on who is waited for
AGAIN = 60.0  # seconds until a node that was refused is asked again
SOME = 5  # names in an error


def link_for(settings: FederationSettings, note: Callable[[str], None]) -> Link:
    """The way to the nodes that the settings describe."""
    if isinstance(settings, FlowerSettings):
        folder = SuperLinkFolder(Path(settings.folder))
        with needs_flower("engine: flower"):
            from fedsieve.federation.flower_link import FlowerLink
        return FlowerLink(folder, settings.superlink, note)
    assert isinstance(settings, SocketSettings)
    if not Path(settings.folder).is_dir():
        raise InputError(f"engine.sockets.folder: {settings.folder} is no folder; give the one with nodes' sockets")
    return SocketLink(Path(settings.folder))


@dataclass(frozen=True)
class NodeFacts:
    """What a node has said of itself."""

    address: str
    name: str
    samples: int
    classes: list[str]
    class_counts: list[int] | None
    versions: dict[str, Any]


@dataclass
class Gathering:
    """The nodes of a run. The roster, which says whose name has which number, is kept in the run's folder."""

    link: Link
    settings: FederationSettings
    count: int  # clients of the experiment
    minimum: int  # of them, to begin with
    folder: Path  # the run's
    note: Callable[[str], None]
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    numbers: dict[str, int] = field(default_factory=dict)  # by name
    addresses: dict[str, str] = field(default_factory=dict)  # by name
    facts: dict[str, NodeFacts] = field(default_factory=dict)  # by address
    refused: dict[str, str] = field(default_factory=dict)  # why a node is not used, by address
    federation: Federation | None = None
    _asked: dict[str, tuple[str, float]] = field(default_factory=dict)  # by address: the request, and until when
    _again: dict[str, float] = field(default_factory=dict)  # when a node that was refused is asked again, by address
    _here: set[str] = field(default_factory=set)  # addresses of the nodes that can be reached now

    @staticmethod
    def begin(link: Link, experiment: Experiment, folder: Path, note: Callable[[str], None]) -> "Gathering":
        """As the manifest says, and the roster of a run that was interrupted."""
        settings, clients = experiment.federation, experiment.clients
        assert settings is not None
        gathering = Gathering(link, settings, clients.count, clients.minimum, folder, note)
        if settings.manifest is not None:
            gathering.federation = read_federation(Path(settings.manifest))
            gathering.numbers = {one.name: number for number, one in enumerate(gathering.federation.clients)}
        gathering._read_roster()
        return gathering

    # Before the run.

    def wait(self) -> Federation:
        """Wait until all nodes have come, or enough of them after some time; what all need to know of the others."""
        started = told = time.monotonic()
        while (missing := self._missing()) and time.monotonic() - started < self.settings.wait:
            came = self.look()
            self._refuse()
            if time.monotonic() - told > OFTEN and (missing := self._missing()):
                told = time.monotonic()
                self.note(f"waiting for {_listed(missing)}")
            if not came:
                time.sleep(0.1)
        present = self.count - len(missing)
        if missing and (present < max(1, self.minimum) or self.federation is None):
            raise InputError(
                f"{present} of {self.count} nodes came within {self.settings.wait:g} s, and {_listed(missing)} did "
                f"not; start them, or raise engine's wait"
            )
        if missing:
            self.note(f"{_listed(missing)} did not come within {self.settings.wait:g} s; beginning without")
        if self.federation is None:
            self.federation = self._by_joining()
        return self.federation

    def _refuse(self) -> None:
        """InputError for the first node that cannot take part."""
        for address, reason in self.refused.items():
            raise InputError(f"{address}: {reason}")

    def _missing(self) -> list[str]:
        """Names of clients whose node is not there, or "a node" where they are not known."""
        here = {one.name for one in self.facts.values()}  # the roster may be that of a run that was interrupted
        missing = [name for name in self.numbers if name not in here]
        return missing + ["another node"] * (self.count - len(self.numbers))

    def _by_joining(self) -> Federation:
        """What nodes say of themselves, where there is no manifest."""
        facts = [self.facts[self.addresses[name]] for name in self.numbers]
        for one in facts[1:]:
            if one.classes != facts[0].classes:
                what = f"{one.name} has other classes than {facts[0].name}"
                raise InputError(
                    f"{what}; name them alike everywhere, or make a manifest with `fedsieve split --export`"
                )
        clients = [ClientFacts(name=one.name, samples=one.samples, class_counts=one.class_counts) for one in facts]
        return Federation(classes=facts[0].classes, clients=clients)

    # At any time.

    def look(self) -> list[str]:
        """Ask nodes that are new who they are, and hear those that were asked; the names of clients that came."""
        self._here = set(self.link.nodes())
        for address in sorted(self._here):
            if self._is_to_be_asked(address):
                request = self.link.push(address, Frame({"do": "hello", "run": self.run}), HELLO)
                self._asked[address] = request, time.monotonic() + HELLO
        came = list[str]()
        if self._asked:
            replies = self.link.pull([request for request, _ in self._asked.values()])
            for address, (request, until) in list(self._asked.items()):
                if (reply := replies.get(request)) is not None:
                    del self._asked[address]
                    if isinstance(reply, Frame) and (name := self._heard(address, reply)) is not None:
                        came.append(name)
                elif time.monotonic() > until:
                    del self._asked[address]
                    self.link.drop([request])
        return came

    def _is_to_be_asked(self, address: str) -> bool:
        """Whether a node is new, or was refused some time ago: its owner may have mended what was wrong."""
        if address in self.facts or address in self._asked:
            return False
        return address not in self.refused or time.monotonic() >= self._again[address]

    def refuse(self, address: str, reason: str) -> None:
        """Do without a node, for some time."""
        self.facts.pop(address, None)
        self.refused[address], self._again[address] = reason, time.monotonic() + AGAIN

    def _heard(self, address: str, reply: Frame) -> str | None:
        """Enter a node into the roster, under the name that it tells."""
        told = reply.header
        try:
            client = ClientFacts(name=told["name"], samples=told["samples"], class_counts=told["class_counts"])
            classes = Federation(classes=told["classes"], clients=[client]).classes  # with all checks
            theirs = {name: shown(str(told[name])[:60]) for name in versions()}
            facts = NodeFacts(address, client.name, client.samples, classes, client.class_counts, theirs)
        except (KeyError, ValueError):  # pydantic's are ValueErrors
            self.refuse(address, "it does not say who it is")
            return None
        if (reason := self._objection(facts)) is not None:
            self.refuse(address, reason if facts.name == address else f"{facts.name}: {reason}")
            return None
        self._enter(facts)
        return facts.name

    def _enter(self, facts: NodeFacts) -> None:
        """A node takes part, perhaps at another address than before."""
        name, address = facts.name, facts.address
        self.facts.pop(self.addresses.get(name, address), None)
        self.refused.pop(address, None)
        self.numbers.setdefault(name, len(self.numbers))
        self.addresses[name], self.facts[address] = address, facts

    def _objection(self, facts: NodeFacts) -> str | None:
        """Why a node cannot take part."""
        if (reason := difference(versions(), facts.versions, "the server")) is not None:
            return reason
        if self.link.binds_names and facts.name != facts.address:
            return f"its key is registered for {facts.address}; start the node with --name {facts.address}"
        bound = self.addresses.get(facts.name)
        if bound in self._here and bound != facts.address:
            return f"another node ({bound}) has this name already; give each its own --name"
        if facts.name not in self.numbers and len(self.numbers) >= self.count:
            return f"it is none of the federation's {self.count} clients: {_listed(list(self.numbers))}"
        federation = self.federation
        if federation is not None:
            client = federation.clients[self.numbers[facts.name]]
            if facts.samples not in (client.samples, 1):
                has = f"it has {facts.samples:,} samples, and the manifest says {client.samples:,}"
                return f"{has}; start it with the data that the manifest was made with"
            if unknown := sorted({*facts.classes} - {*federation.classes}):
                return f"it has a class '{unknown[0][:60]}' that the manifest does not have"
        return None

    # The roster.

    def _read_roster(self) -> None:
        try:
            saved = json.loads((self.folder / ROSTER).read_text(encoding="utf-8"))
            self.run = str(saved["run"])
            numbers = {str(name): int(number) for name, number in saved["numbers"].items()}
            if not RUN.fullmatch(self.run) or sorted(numbers.values()) != list(range(len(numbers))):
                raise ValueError
            self.addresses = {str(name): str(address) for name, address in saved["addresses"].items()}
            if self.federation is None:
                self.federation = Federation.model_validate_json(json.dumps(saved["federation"]))
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            what = f"{self.folder / ROSTER}, which says which node is which client, is damaged"
            raise InputError(f"{what}; start the run anew in another folder") from None
        if self.numbers and numbers != self.numbers:
            raise InputError(f"the manifest has other clients than {self.folder / ROSTER}; give the run's own manifest")
        self.numbers = numbers

    def save(self) -> None:
        """Write the roster into the run's folder."""
        assert self.federation is not None
        federation = json.loads(self.federation.model_dump_json())
        about = {"run": self.run, "numbers": self.numbers, "addresses": self.addresses, "federation": federation}
        write_text(self.folder / ROSTER, json.dumps(about, indent=1) + "\n")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SOME} more" if len(names) > SOME else ""
    return ", ".join(names[:SOME]) + more
