"""What clients remember between their rounds, on disk: memory is taken only by the states in use.

A client's state is a file per version, named after the client and the round (counted over the whole run) that
made it. Versions are written beside one another and never in place, so a state that someone still looks at
does not change under them, and a checkpoint that was saved some rounds ago still finds the states of its time:

    state of a client as of round r = its newest version made in a round <= r

A version is renamed into place as a whole, so a killed process leaves nothing half written under a version's
name. It is not flushed to disk at once, for that would cost more than the training of small models. A power
cut may thus damage versions, but only those written since the last `flush`, and a checkpoint is saved only after
a `flush`: whatever is damaged is newer than the checkpoint, and its rounds are done again anyway.

The digest of a version is taken when it is written, and kept in memory. A checkpoint holds `states()`, the versions
of its time with their digests, so a version that was altered, lost or swapped with another one is noticed
(`first_damaged`) before a run goes on. So a store that is made with the `states()` of a checkpoint of round r gives,
after an interruption at any moment and `rewind(r)`, exactly the states as of round r, if

    `flush` was called before that checkpoint was saved, and since then
    `prune(p)` only with p <= r: when no checkpoint older than p was left, and `clear` not at all.
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
from fedsieve.federate.client import ClientState
from fedsieve.runs.atomic import flush_to_disk
from fedsieve.runs.sealed import digest_of_file, write_tensors

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
        """As tensors for a file; a digest cannot be made smaller."""
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
    """The first file that is not there, or not as it was written. All of them are read."""
    paths = ((folder / _name(client, round), digest.hex()) for client, round, digest in states)
    return next((path for path, digest in paths if digest_of_file(path) != digest), None)


class ClientStore:
    """One safetensors file per client and round, memory-mapped when read. For one process at a time.

    It holds the versions in `kept`, which were there before and are whole (`first_damaged`), and what is written to it.
    """

    def __init__(self, folder: Path, kept: Iterable[States] = ()) -> None:
        self.folder = folder
        before = sorted({version for states in kept for version in states})
        self._versions: dict[int, list[tuple[int, bytes]]] = {}  # of each client, ascending: the round and the digest
        for client, round, digest in before:
            self._versions.setdefault(client, []).append((round, digest))
        self._unflushed: dict[int, list[int]] = {}  # the versions of each client written since the last flush

    def _path(self, client: int, round: int) -> Path:
        return self.folder / _name(client, round)

    def newest(self, client: int) -> Path | None:
        """The file of the client's newest version."""
        versions = self._versions.get(client)
        return self._path(client, versions[-1][0]) if versions else None

    def read(self, client: int) -> ClientState:
        """The client's newest version, {} if there is none."""
        path = self.newest(client)
        return read_state(path) if path is not None else {}

    def states(self) -> States:
        """The newest version of each client, for a checkpoint."""
        return States.of((client, *versions[-1]) for client, versions in self._versions.items() if versions)

    def place(self, client: int, round: int) -> Path:
        """Where `save_state` may put a new version before `keep` makes it the client's newest."""
        versions = self._versions.get(client)
        if versions and round <= (last := versions[-1][0]):
            raise ValueError(f"client {client} has a state of round {last}; rewind before writing {round}'s")
        return self.folder / _partial(_name(client, round))

    def keep(self, client: int, round: int, digest: str) -> None:
        """Add the version that was put into its place; it is for good once `commit` is called, `rewind` undoes it."""
        path = self._path(client, round)
        try:
            self.place(client, round).replace(path)
        except OSError as error:
            raise MachineError(f"{path} cannot be written: {error}") from None
        self._versions.setdefault(client, []).append((round, bytes.fromhex(digest)))
        self._unflushed.setdefault(client, []).append(round)

    def drop(self, client: int, round: int) -> None:
        """Delete what was put into the place of a version that is not to be kept."""
        self.place(client, round).unlink(missing_ok=True)

    def write(self, client: int, round: int, state: ClientState) -> None:
        """Add a version."""
        self.keep(client, round, save_state(self.place(client, round), state))

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
        """Forget what was made after `round`, the newest checkpoint's: those rounds will be done again.

        Versions that the store does not know are deleted: they were made after the checkpoint, or are unfinished.
        """
        for client, versions in self._versions.items():
            self._versions[client] = [version for version in versions if version[0] <= round]
        kept = {client: [one for one in rounds if one <= round] for client, rounds in self._unflushed.items()}
        self._unflushed = {client: rounds for client, rounds in kept.items() if rounds}
        self._drop_unknown()

    def prune(self, round: int) -> None:
        """Drop what no checkpoint of `round` or later needs: all that is older than the states as of `round`."""
        for client, versions in self._versions.items():
            self._drop(client, [one for one, _ in versions if one <= round][:-1])

    def clear(self) -> None:
        """Delete everything; only when no checkpoint is left that would be resumed with these states."""
        self.rewind(-1)
        with suppress(OSError):  # it was never made, or holds something of someone else's
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
                continue  # it is not ours
            client, round = int(version[1]), int(version[2])
            is_known = path.name == name and any(one == round for one, _ in self._versions.get(client, ()))
            if not is_known:
                path.unlink(missing_ok=True)


def _name(client: int, round: int) -> str:
    return f"client-{client:06d}-round-{round:08d}.safetensors"


def _partial(name: str) -> str:
    return f".{name}.partial"


def read_state(path: str | Path) -> ClientState:
    """A client's state in a file.

    Its tensors are views of the file that cost nothing until they are used. What is written to them stays in
    memory. RunError if the file is missing or cut short. Whether each bit is as it was is checked when a run is
    resumed (`first_damaged`), for to check it is to read all of the file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except Exception as error:
        raise RunError(
            f"{path} cannot be read ({error}), so this run cannot go on; start it anew in another folder"
        ) from None


def save_state(path: Path, state: ClientState) -> str:
    """Write a client's state to a file in the place of a version that is not there yet; the file's digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return write_tensors(path, {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})
    except OSError as error:  # a full disk, say
        path.unlink(missing_ok=True)
        raise MachineError(f"{path} cannot be written: {error}") from None
