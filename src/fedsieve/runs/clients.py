"""What clients remember between their rounds, on disk: memory is taken only by the states in use.

A client's state is a file per version, named after the client and the round (counted over the whole run) that
made it. Versions are written beside one another and never in place, so a state that someone still looks at
does not change under them, and a checkpoint that was saved some rounds ago still finds the states of its time:

    state of a client as of round r = its newest version made in a round <= r

A version is renamed into place as a whole, so a killed process leaves nothing half written under a version's
name. It is not flushed to disk at once, for that would cost more than the training of small models. A power
cut may thus damage versions, but only those written since the last `flush`, and a checkpoint is saved only after
a `flush`: whatever is damaged is newer than the checkpoint, and its rounds are done again anyway.

So `rewind(r)` gives, after an interruption at any moment, exactly the states as of a checkpoint's round r, if

    `flush` was called before that checkpoint was saved, and since then
    `prune(p)` only with p <= r: when no checkpoint older than p was left, and `clear` not at all.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedsieve.errors import RunError
from fedsieve.federate.client import ClientState
from fedsieve.runs.atomic import flush_to_disk

VERSION = re.compile(r"client-(\d+)-round-(\d+)\.safetensors")
UNFINISHED = (".*.partial", ".tmp*")  # ours, and what safetensors writes before it renames to ours


class ClientStore:
    """One safetensors file per client and round, memory-mapped when read. For one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._unflushed: dict[int, list[int]] = {}  # the versions of each client written since the last flush

    @cached_property
    def _rounds(self) -> dict[int, list[int]]:
        """The rounds of each client's versions, ascending. Listed once: folders of many clients are slow to list."""
        found: dict[int, list[int]] = {}
        for path in self.folder.glob("client-*"):
            if version := VERSION.fullmatch(path.name):
                found.setdefault(int(version[1]), []).append(int(version[2]))
        return {client: sorted(rounds) for client, rounds in found.items()}

    def _path(self, client: int, round: int) -> Path:
        return self.folder / _name(client, round)

    def newest(self, client: int) -> Path | None:
        """The file of the client's newest version."""
        rounds = self._rounds.get(client)
        return self._path(client, rounds[-1]) if rounds else None

    def read(self, client: int) -> ClientState:
        """The client's newest version, {} if there is none."""
        path = self.newest(client)
        return read_state(path) if path is not None else {}

    def place(self, client: int, round: int) -> Path:
        """Where `save_state` may put a new version before `keep` makes it the client's newest."""
        rounds = self._rounds.get(client)
        if rounds and round <= rounds[-1]:
            raise ValueError(f"client {client} has a state of round {rounds[-1]}; rewind before writing {round}'s")
        return self.folder / f".{_name(client, round)}.partial"

    def keep(self, client: int, round: int) -> None:
        """Add the version that was put into its place; it is for good once `commit` is called, `rewind` undoes it."""
        path = self._path(client, round)
        try:
            self.place(client, round).replace(path)
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error}") from None
        self._rounds.setdefault(client, []).append(round)
        self._unflushed.setdefault(client, []).append(round)

    def drop(self, client: int, round: int) -> None:
        """Delete what was put into the place of a version that is not to be kept."""
        self.place(client, round).unlink(missing_ok=True)

    def write(self, client: int, round: int, state: ClientState) -> None:
        """Add a version."""
        save_state(self.place(client, round), state)
        self.keep(client, round)

    def commit(self) -> None:
        """The round is done. Versions that no checkpoint can know, since there are newer ones and no flush came, go."""
        for client, (*older, _) in self._unflushed.items():
            self._drop(client, older)
            del self._unflushed[client][:-1]

    def flush(self) -> None:
        """Wait until all versions would survive a power cut; to be called right before a checkpoint is saved."""
        for client, rounds in self._unflushed.items():
            for round in rounds:
                flush_to_disk(self._path(client, round))
        self._unflushed.clear()
        if self.folder.exists():
            flush_to_disk(self.folder)  # the names of the versions
            flush_to_disk(self.folder.parent)  # the name of the folder

    def rewind(self, round: int) -> None:
        """Forget what was made after `round`, the newest checkpoint's: those rounds will be done again."""
        self._drop_unfinished()
        for client, rounds in self._rounds.items():
            self._drop(client, [one for one in rounds if one > round])
        kept = {client: [one for one in rounds if one <= round] for client, rounds in self._unflushed.items()}
        self._unflushed = {client: rounds for client, rounds in kept.items() if rounds}

    def prune(self, round: int) -> None:
        """Drop what no checkpoint of `round` or later needs: all that is older than the states as of `round`."""
        for client, rounds in self._rounds.items():
            self._drop(client, [one for one in rounds if one <= round][:-1])

    def clear(self) -> None:
        """Delete everything; only when no checkpoint is left that would be resumed with these states."""
        self.rewind(-1)
        with suppress(OSError):  # it was never made, or holds something of someone else's
            self.folder.rmdir()

    def _drop(self, client: int, rounds: Iterable[int]) -> None:
        for round in rounds:
            self._path(client, round).unlink(missing_ok=True)
            self._rounds[client].remove(round)

    def _drop_unfinished(self) -> None:
        for pattern in UNFINISHED:
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)


def _name(client: int, round: int) -> str:
    return f"client-{client:06d}-round-{round:08d}.safetensors"


def read_state(path: str | Path) -> ClientState:
    """A client's state in a file.

    Its tensors are views of the file that cost nothing until they are used. What is written to them stays in
    memory. RunError if the file is missing or cut short; a flipped bit goes unnoticed, for to check all of
    them is to read all of the file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except Exception as error:
        raise RunError(
            f"{path} cannot be read ({error}), so this run cannot go on; start it anew in another folder"
        ) from None


def save_state(path: Path, state: ClientState) -> None:
    """Write a client's state to a file in the place of a version that is not there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, path)
    except (SafetensorError, OSError) as error:  # a full disk, say
        path.unlink(missing_ok=True)
        raise RunError(f"{path} cannot be written: {error}") from None
