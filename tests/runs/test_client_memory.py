"""What clients remember, on disk: against a twin in memory, through kills, power cuts and damage."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fedsieve.errors import RunError
from fedsieve.federate.types import State
from fedsieve.files.sealed import write_tensors
from fedsieve.runs import client_memory
from fedsieve.runs.client_memory import ClientStore, States, first_damaged

CLIENTS = range(4)
KEPT = 2  # checkpoints
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def newest(store: ClientStore, client: int) -> State:
    """The client's newest state, {} if there is none."""
    round = store.newest(client)
    return store.read(client, round) if round is not None else {}


def state_of(number: int) -> State:
    return {"old": torch.full((5,), number / 8, dtype=torch.float16), "made": torch.tensor(number)}


def number_in(state: State) -> int:
    """0: there is no state. Else all of the state must be the one that `state_of` made."""
    if not state:
        return 0
    number = int(state["made"])
    assert state.keys() == {"old", "made"} and torch.equal(state["old"], state_of(number)["old"])
    return number


def reopened(store: ClientStore) -> ClientStore:
    """The store as another process finds it that knows the newest versions from a checkpoint."""
    return ClientStore(store.folder, [store.states()])


class Twin:
    """The same promises, kept the slow way: all versions in memory, forever."""

    def __init__(self) -> None:
        self.versions: dict[int, dict[int, int]] = {client: {} for client in CLIENTS}
        self.checkpoints: list[int] = []
        self.saved: dict[int, States] = {}  # what a checkpoint knows, by its round

    def save(self, round: int, states: States) -> None:
        self.checkpoints = [*self.checkpoints, round][-KEPT:]
        self.saved[round] = states

    def reopened(self, folder: Path, round: int) -> ClientStore:
        """The store of a process that goes on from the checkpoint of `round`."""
        kept = [self.saved[one] for one in self.checkpoints if one <= round]
        assert not kept or first_damaged(folder, kept[-1]) is None
        return ClientStore(folder, kept)

    def write(self, client: int, round: int, number: int) -> None:
        self.versions[client][round] = number

    def now(self) -> dict[int, int]:
        return {client: made[max(made)] if made else 0 for client, made in self.versions.items()}

    def rewind(self, round: int) -> None:
        for client, made in self.versions.items():
            self.versions[client] = {one: number for one, number in made.items() if one <= round}


class Comparison(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store, self.twin = ClientStore(self.folder / "clients"), Twin()
        self.round = self.made = 0
        self.views: list[tuple[State, int]] = []

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(chosen=st.sets(st.sampled_from(CLIENTS)), fails=st.booleans())
    def train(self, chosen: set[int], fails: bool) -> None:
        for client in sorted(chosen):
            self.made += 1
            self.store.write(client, self.round + 1, state_of(self.made))
            if not fails:
                self.twin.write(client, self.round + 1, self.made)
        if fails:
            self.store.rewind(self.round)
        else:
            self.store.commit()
            self.round += 1

    @rule(client=st.sampled_from(CLIENTS))
    def look(self, client: int) -> None:
        self.views.append((newest(self.store, client), self.twin.now()[client]))

    @precondition(lambda self: self.round not in self.twin.checkpoints)
    @rule()
    def checkpoint(self) -> None:
        self.store.flush()
        self.twin.save(self.round, self.store.states())
        self.store.prune(self.twin.checkpoints[0])
        for client in CLIENTS:  # one for each checkpoint is all that is needed
            assert len(list(self.folder.glob(f"clients/client-{client:06d}-*"))) <= KEPT

    @rule(newest_is_damaged=st.booleans(), reopened=st.booleans())
    def interrupt(self, newest_is_damaged: bool, reopened: bool) -> None:
        if newest_is_damaged:
            self.twin.checkpoints = self.twin.checkpoints[:-1]
            if not self.twin.checkpoints:  # then a run starts anew
                self.store.clear()
        self.round = self.twin.checkpoints[-1] if self.twin.checkpoints else 0
        if reopened:
            self.store = self.twin.reopened(self.folder / "clients", self.round)
        self.store.rewind(self.round)
        self.twin.rewind(self.round)

    @invariant()
    def states_agree(self) -> None:
        for store in (self.store, reopened(self.store)):
            assert {client: number_in(newest(store, client)) for client in CLIENTS} == self.twin.now()

    @invariant()
    def views_are_as_they_were(self) -> None:
        assert [number_in(state) for state, _ in self.views] == [number for _, number in self.views]

    @invariant()
    def few_versions_are_kept(self) -> None:
        assert len(list(self.folder.glob("clients/*"))) <= (KEPT + 1) * len(CLIENTS)
        assert not list(self.folder.glob("clients/.*"))


TestComparison = Comparison.TestCase
TestComparison.settings = settings(max_examples=20, stateful_step_count=16, deadline=None)


class Killed(BaseException):
    """Not an Exception: nothing may catch it."""


def die_after(operations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all changes to files fail after the first few, those of `finally` blocks too, as in a process that is gone.

    One that is killed while it writes a state leaves a file cut short.
    """
    left = operations

    def counted(function: Any, half_done: Any = lambda *_: None) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                half_done(*arguments)
            if left < 0:
                raise Killed
            return function(*arguments, **options)

        return call

    half_saved = lambda path, _: path.write_bytes(b"half")  # noqa: E731
    monkeypatch.setattr(client_memory, "write_tensors", counted(write_tensors, half_saved))
    monkeypatch.setattr(Path, "replace", counted(Path.replace))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))


@given(
    rounds=st.lists(st.tuples(st.sets(st.sampled_from(CLIENTS)), st.booleans()), min_size=1, max_size=8),
    operations=st.integers(0, 60),
    power_cut=st.booleans(),
)
def test_an_interruption_at_any_moment_gives_the_states_of_the_checkpoint(
    tmp_path_factory, rounds, operations: int, power_cut: bool
) -> None:
    """A killed process has done its first few changes; a power cut also empties whatever was not flushed."""
    folder = tmp_path_factory.mktemp("run") / "clients"
    twin, store, flushed = Twin(), ClientStore(folder), set()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(client_memory, "flush_to_disk", flushed.add)
        die_after(operations, monkeypatch)
        try:
            for round, (chosen, checkpoint) in enumerate(rounds, start=1):
                for client in sorted(chosen):
                    store.write(client, round, state_of(10 * round + client))
                    twin.write(client, round, 10 * round + client)
                store.commit()
                if checkpoint:
                    store.flush()
                    assert not folder.exists() or {folder, folder.parent} <= flushed
                    twin.save(round, store.states())
                    store.prune(twin.checkpoints[0])
        except Killed:
            pass
    for path in folder.glob("*") if power_cut else ():
        if path not in flushed:
            path.write_bytes(b"")
    for checkpoint in reversed([0, *twin.checkpoints][-KEPT:]):  # the newest, and the one before if that is damaged
        store = twin.reopened(folder, checkpoint)
        store.rewind(checkpoint)
        twin.rewind(checkpoint)
        assert {client: number_in(newest(store, client)) for client in CLIENTS} == twin.now()
        assert all(client_memory.VERSION.fullmatch(path.name) for path in folder.glob("*"))
        assert not list(folder.glob(".*"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_of_any_type_and_shape_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (4, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    state = {"matrix": values, "turned": values.T, "number": values[0, 0].clone(), "none": values[:0].clone()}
    store = ClientStore(tmp_path)
    store.write(1_234_567, 8, state)
    read = newest(reopened(store), 1_234_567)
    assert read.keys() == state.keys()
    for name, tensor in state.items():
        assert read[name].dtype == dtype and read[name].shape == tensor.shape and torch.equal(read[name], tensor)


def test_an_empty_state_is_a_state(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    store.write(1, 1, state_of(5))
    store.flush()
    store.write(1, 2, {})
    assert newest(reopened(store), 1) == {}
    store.rewind(1)
    assert number_in(newest(store, 1)) == 5


def test_nothing_is_made_before_the_first_write(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "run" / "clients")
    assert newest(store, 3) == {}
    store.flush()
    store.prune(1)
    store.rewind(0)
    store.clear()
    assert not list(tmp_path.iterdir())
    store.write(3, 1, state_of(1))
    assert [path.name for path in store.folder.iterdir()] == ["client-000003-round-00000001.safetensors"]


def test_views_survive_whatever_becomes_of_their_file(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "clients")
    store.write(0, 1, state_of(1))
    superseded = newest(store, 0)
    store.write(0, 2, state_of(2))
    store.commit()
    store.flush()
    pruned = newest(store, 0)
    store.write(0, 3, state_of(4))
    store.prune(3)
    cleared = newest(store, 0)
    store.clear()
    assert not store.folder.exists() and newest(store, 0) == {}
    assert [number_in(view) for view in (superseded, pruned, cleared)] == [1, 2, 4]


def test_what_is_done_to_a_view_stays_in_memory(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    store.write(0, 1, state_of(1))
    view = newest(store, 0)
    view["old"].mul_(3)
    assert number_in(newest(store, 0)) == 1
    store.write(0, 2, view)  # parts of one mapped file
    assert torch.equal(newest(store, 0)["old"], state_of(3)["old"])


@pytest.mark.parametrize("left", [0, 4, 20, -1])
def test_a_file_cut_short_or_gone_is_refused(tmp_path: Path, left: int) -> None:
    store = ClientStore(tmp_path)
    store.write(7, 2, state_of(1))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(RunError, match=rf"{path.name} cannot be read .*start it anew"):
        newest(store, 7)
    path.unlink()
    with pytest.raises(RunError, match="cannot be read"):
        newest(store, 7)
    assert newest(store, 8) == {}
    store.clear()
    assert newest(store, 7) == {}


def test_a_bit_flipped_a_file_gone_and_two_swapped_are_noticed(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    for client in CLIENTS:
        store.write(client, 1, state_of(client + 1))
    states = store.states()
    assert first_damaged(tmp_path, states) is None
    assert first_damaged(tmp_path, States.unpack(states.pack())) is None
    path, other = (tmp_path / f"client-00000{client}-round-00000001.safetensors" for client in (1, 2))
    content, others = path.read_bytes(), other.read_bytes()
    for damaged in (content[:-1] + bytes([content[-1] ^ 1]), others, content.replace(b"F16", b"I16"), b""):
        path.write_bytes(damaged)
        assert first_damaged(tmp_path, states) == path
    path.unlink()
    assert first_damaged(tmp_path, states) == path
    assert first_damaged(tmp_path, States.of([])) is None


def test_a_state_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch) -> None:
    def full(path: Path, _: State) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    store = ClientStore(tmp_path)
    store.write(0, 1, state_of(1))
    monkeypatch.setattr(client_memory, "write_tensors", full)
    for client in (0, 1):
        with pytest.raises(RunError, match="cannot be written: No space left"):
            store.write(client, 2, state_of(2))
    assert number_in(newest(store, 0)) == 1 and newest(store, 1) == {}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_checkpoints_states_are_not_overwritten(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    store.write(0, 5, state_of(1))
    store.flush()
    for round in (4, 5):
        with pytest.raises(ValueError, match="has a state of round 5; rewind"):
            store.write(0, round, state_of(2))
    assert number_in(newest(store, 0)) == 1


def test_only_what_checkpoints_need_is_kept(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)

    def rounds(client: int) -> list[int]:
        return sorted(int(path.stem[-8:]) for path in tmp_path.glob(f"client-{client:06d}-*"))

    for round in range(6):
        for client in (1, 2) if round in (0, 4) else (1,):
            store.write(client, round, state_of(round))
        store.flush()
    store.prune(3)
    assert rounds(1) == [3, 4, 5] and rounds(2) == [0, 4]
    store.write(2, 6, state_of(6))
    store.write(2, 7, state_of(7))
    assert rounds(2) == [0, 4, 6, 7]
    store.commit()  # no checkpoint can know of round 6's
    assert rounds(2) == [0, 4, 7]
    store.rewind(4)
    assert rounds(1) == [3, 4] and rounds(2) == [0, 4]
    store.clear()
    assert not tmp_path.exists()


def test_what_others_put_there_stays(tmp_path: Path) -> None:
    others = ("client-000001-round-00000001.safetensors.old", "client-notes.txt", ".keep", ".tmpA1b2C3", ".x.partial")
    for name in others:
        (tmp_path / name).write_text("mine")
    store = ClientStore(tmp_path)
    assert newest(store, 1) == {}
    store.write(0, 1, state_of(1))
    store.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_the_folder_is_not_listed(tmp_path: Path, monkeypatch) -> None:
    store = ClientStore(tmp_path)
    listings, glob = [], Path.glob
    monkeypatch.setattr(Path, "glob", lambda *arguments: listings.append(arguments) or glob(*arguments))
    for client in range(20):
        store.write(client, 1, {"made": torch.tensor(client)})
        assert int(newest(store, client)["made"]) == client
    store.flush()
    store.prune(1)
    assert not listings  # folders of many clients are slow to list


def test_all_that_was_written_is_flushed_once(tmp_path: Path, monkeypatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(client_memory, "flush_to_disk", flushed.append)
    store = ClientStore(tmp_path)
    for client in CLIENTS:
        store.write(client, 1, state_of(1))
    store.rewind(1)
    assert not flushed
    store.flush()
    assert sorted(flushed) == sorted([*tmp_path.iterdir(), tmp_path, tmp_path.parent])
    flushed.clear()
    store.flush()
    assert flushed == [tmp_path, tmp_path.parent]
