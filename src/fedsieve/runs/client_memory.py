"""Clients' states between their rounds, on disk: only states in use take memory.

A client's state is a file per version, named after the client and the round (counted over the whole run) that
made it. Versions are never overwritten, so a state that is still in use does not change, and a checkpoint that was
saved some rounds ago still finds the states of its time:

    state of a client as of round r = its newest version made in a round <= r

A version is renamed into place as a whole, so a killed process leaves nothing half written under a version's
name. It is not flushed to disk at once, since that would take longer than training a small model. So a power cut
may damage versions, but only those written since the last `flush`, and a checkpoint is saved only after a `flush`:
damaged versions are newer than the checkpoint, and their rounds are done again anyway.

The digest of a version is taken when it is written, and kept in memory. A checkpoint holds `states()`, the versions
of its time with their digests, so a version that was altered, lost or swapped with another one is noticed
(`first_damaged`) before a run resumes. A store that is made with the `states()` of a checkpoint of round r gives,
after an interruption at any moment and `rewind(r)`, exactly the states as of round r, if

    `flush` was called before that checkpoint was saved, and since then
    `prune(p)` only with p <= r, when no checkpoint older than p was left, and `clear` not at all.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import zstandard
from safetensors import safe_open
from torch import Tensor

from fedsieve.errors import MachineError, RunError
from fedsieve.federate.types import State
from fedsieve.files.atomic import flush_to_disk
from fedsieve.files.sealed import digest_of_file, write_tensors

VERSION = re.compile(r"client-(\d{6,})-round-(\d{8,})\.safetensors")
DIGEST = 16  # bytes


@dataclass(frozen=True)
class States:
    """One version of each of some clients, and the digests of their files."""

    versions: np.ndarray  # int32, a row for each: the client and the round
    digests: np.ndarray  # uint8, a row for each

    @staticmethod
    def of(found: Iterable[tuple[int, int, bytes]]) -> "States":
        rows = list(found)
        versions = np.empty((len(rows), 2), dtype=np.int32)
        versions[:, 0] = [client for client, _, _ in rows]
        versions[:, 1] = [round for _, round, _ in rows]
        digests = np.frombuffer(b"".join([digest for _, _, digest in rows]), dtype=np.uint8)
        return States(versions, digests.reshape(-1, DIGEST))

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        """Clients, rounds and digests."""
        for (client, round), digest in zip(self.versions.tolist(), self.digests, strict=True):
            yield client, round, digest.tobytes()

    def pack(self) -> dict[str, Tensor]:
        """As tensors for a file; digests cannot be compressed."""
        numbers = zstandard.compress(self.versions.tobytes(), 1)
        return {
            "states": torch.from_numpy(np.frombuffer(numbers, dtype=np.uint8).copy()),
            "states_digests": torch.from_numpy(self.digests.copy()),
        }

    @staticmethod
    def unpack(tensors: Mapping[str, Tensor]) -> "States":
        numbers = zstandard.decompress(tensors["states"].numpy().tobytes())
        return States(np.frombuffer(numbers, dtype=np.int32).reshape(-1, 2), tensors["states_digests"].numpy())


def first_damaged(folder: Path, states: States) -> Path | None:
    """The first file that is missing or was changed. All files up to it are read."""
    paths = ((folder / _name(client, round), digest.hex()) for client, round, digest in states)
    return next((path for path, digest in paths if digest_of_file(path) != digest), None)


class StateFiles:
    """The files of clients' states, by client and round: enough for a process that trains clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, client: int, round: int) -> State:
        """Read a state that was kept.

        Its tensors are views of the file that cost nothing until they are used. What is written to them stays in
        memory. RunError if the file is missing or cut short. Single bits are checked only when a run is resumed
        (`first_damaged`), since that reads the whole file.
        """
        path = self._path(client, round)
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except Exception as error:
            raise RunError(
                f"{path} cannot be read ({error}), so this run cannot go on; start it anew in another folder"
            ) from None

    def put(self, client: int, round: int, state: State) -> str:
        """Write a state to a temporary file, where `keep` finds it; returns the file's digest."""
        path = self._partial(client, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return write_tensors(path, {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})
        except OSError as error:  # a full disk, say
            path.unlink(missing_ok=True)
            raise MachineError(f"{path} cannot be written: {error}") from None

    def _path(self, client: int, round: int) -> Path:
        return self.folder / _name(client, round)

    def _partial(self, client: int, round: int) -> Path:
        return self.folder / _partial(_name(client, round))


class ClientStore(StateFiles):
    """One safetensors file per client and round, memory-mapped when read. For one process at a time.

    It holds the versions in `kept`, which are on disk and undamaged (`first_damaged`), and those written to it.
    """

    def __init__(self, folder: Path, kept: Iterable[States] = ()) -> None:
        super().__init__(folder)
        before = sorted({version for states in kept for version in states})
        self._versions: dict[int, list[tuple[int, bytes]]] = {}  # of each client, ascending: the round and the digest
        for client, round, digest in before:
            self._versions.setdefault(client, []).append((round, digest))
        self._unflushed: dict[int, list[int]] = {}  # the versions of each client written since the last flush

    def newest(self, client: int) -> int | None:
        """The round of the client's newest version; None if it has none."""
        versions = self._versions.get(client)
        return versions[-1][0] if versions else None

    def known(self, client: int) -> dict[int, str]:
        """The client's versions, and their digests."""
        return {round: digest.hex() for round, digest in self._versions.get(client, ())}

    def states(self) -> States:
        """The newest version of each client, for a checkpoint."""
        return States.of((client, *versions[-1]) for client, versions in self._versions.items() if versions)

    def keep(self, client: int, round: int, digest: str) -> None:
        """Add the version that was `put`; `commit` makes it final, `rewind` undoes it."""
        path = self._path(client, round)
        self._must_be_newer(client, round)
        try:
            self._partial(client, round).replace(path)
        except OSError as error:
            raise MachineError(f"{path} cannot be written: {error}") from None
        self._versions.setdefault(client, []).append((round, bytes.fromhex(digest)))
        self._unflushed.setdefault(client, []).append(round)

    def drop(self, client: int, round: int) -> None:
        """Delete a version that was `put` but is not kept."""
        self._partial(client, round).unlink(missing_ok=True)

    def write(self, client: int, round: int, state: State) -> None:
        """Add a version."""
        self._must_be_newer(client, round)
        self.keep(client, round, self.put(client, round, state))

    def _must_be_newer(self, client: int, round: int) -> None:
        last = self.newest(client)
        if last is not None and round <= last:
            raise ValueError(f"client {client} has a state of round {last}; rewind before writing {round}'s")

    def commit(self) -> None:
        """End a round: delete versions that no checkpoint can need, since they are not the newest and not flushed."""
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
        """Delete the versions made after `round`, since those rounds will be done again.

        Versions that the store does not know are deleted, too: they are newer than the checkpoint, or unfinished.
        """
        for client, versions in self._versions.items():
            self._versions[client] = [version for version in versions if version[0] <= round]
        kept = {client: [one for one in rounds if one <= round] for client, rounds in self._unflushed.items()}
        self._unflushed = {client: rounds for client, rounds in kept.items() if rounds}
        self._drop_unknown()

    def prune(self, round: int) -> None:
        """Delete what no checkpoint of `round` or later needs: all that is older than the states as of `round`."""
        for client, versions in self._versions.items():
            self._drop(client, [one for one, _ in versions if one <= round][:-1])

    def clear(self) -> None:
        """Delete everything; only to be called when no checkpoint needs these states."""
        self.rewind(-1)
        with suppress(OSError):  # it was never made, or holds other files
            self.folder.rmdir()

    def _drop(self, client: int, rounds: list[int]) -> None:
        if rounds:
            for round in rounds:
                self._path(client, round).unlink(missing_ok=True)
            self._versions[client] = [version for version in self._versions[client] if version[0] not in rounds]

    def _drop_unknown(self) -> None:
        for path in self.folder.glob("*client-*"):
            name = path.name.removeprefix(".").removesuffix(".partial")
            version = VERSION.fullmatch(name)
            if version is None or path.name not in (name, _partial(name)):
                continue  # not a file of this store
            client, round = int(version[1]), int(version[2])
            is_known = path.name == name and any(one == round for one, _ in self._versions.get(client, ()))
            if not is_known:
                path.unlink(missing_ok=True)


class StoreElsewhere(ClientStore):
    """Which versions clients have, where they keep them at their own nodes: there are no files here."""

    def keep(self, client: int, round: int, digest: str) -> None:
        self._must_be_newer(client, round)
        self._versions.setdefault(client, []).append((round, bytes.fromhex(digest)))
        self._unflushed.setdefault(client, []).append(round)

    def drop(self, client: int, round: int) -> None:
        pass

    def flush(self) -> None:
        self._unflushed.clear()

    def _drop_unknown(self) -> None:
        pass


def _name(client: int, round: int) -> str:
    return f"client-{client:06d}-round-{round:08d}.safetensors"


def _partial(name: str) -> str:
    return f".{name}.partial"
