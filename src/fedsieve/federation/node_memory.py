"""What a client keeps at its node between rounds: states by round, and its own masks.

The server decides which of them count: each of its requests names the states that a checkpoint of its own may still
need, with their digests, and the one to go on from. The node keeps these, and the one that it makes next. So a server
that was killed and goes on from a checkpoint finds what the node remembered at that time.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedsieve.engine.kept import KeptInFolder
from fedsieve.errors import RunError
from fedsieve.federate.types import State
from fedsieve.files.atomic import flush_to_disk
from fedsieve.files.sealed import digest_of_file
from fedsieve.phase import Phase
from fedsieve.runs.client_memory import StateFiles

VERSION = re.compile(r"client-\d{6,}-round-(\d{8,})\.safetensors")


class NodeStates(StateFiles):
    """The states of a node's only client in one phase."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.known: Mapping[int, str] = {}  # digests of the states that the server may still ask for, by round

    def read(self, client: int, round: int) -> State:
        path = self._path(client, round)
        if digest_of_file(path) != self.known.get(round):
            raise RunError(f"what it remembered in round {round} is gone or was changed ({path})")
        return super().read(client, round)

    def put(self, client: int, round: int, state: State) -> str:
        digest = super().put(client, round, state)
        partial, path = self._partial(client, round), self._path(client, round)
        flush_to_disk(partial)
        partial.replace(path)
        flush_to_disk(self.folder)
        return digest

    def tidy(self, known: Mapping[int, str], next_round: int) -> None:
        """Delete all states but those that the server may ask for, and the one of the round under way."""
        self.known = known
        for path in self.folder.glob("*client-*"):
            version = VERSION.fullmatch(path.name)
            if version is None or int(version[1]) not in {*known, next_round}:
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class KeptAtNode(KeptInFolder):
    """In a node's folder for one run."""

    def states(self, phase: Phase) -> NodeStates:
        return NodeStates(self.folder / "clients" / phase.settings.name)
