"""What nodes remember is committed with the server's checkpoints: a run that was stopped ends in the same model."""

import shutil
from pathlib import Path

import pytest
import torch

from federation_nodes import Acting, FederationHere
from fedsieve.engine.client_runtime import ClientRuntime
from fedsieve.errors import InputError, RunError
from fedsieve.experiment import run
from fedsieve.federation.node_memory import NodeStates
from fedsieve.files.sealed import digest_of_file
from fedsieve.runs import folder as run_folder
from listeners import interrupt
from small_runs import edit, outcome

CARRY = [
    "clients.count=4",
    "clients.fraction=0.75",
    "wire.values=int8",
    edit("scope: client", more=", optimizer_state: carry"),
    "phases.0.optimizer_state=carry",
    "phases.0.rounds=2",
    "phases.1.rounds=3",
]
OTHERS = {
    "a mask from everybody": ["clients.count=4", edit("scope: federated"), "phases.1.rounds=3"],
    "SCAFFOLD": [
        "clients.count=4",
        "phases.0.rounds=1",
        "phases.1.method=scaffold",
        "phases.1.local.momentum=0",
        "phases.1.rounds=3",
    ],
    "in secret": ["clients.count=4", "clients.fraction=0.75", "clients.secure=zero_sum", "phases.1.rounds=1"],
}


def memory(federation: FederationHere, client: int) -> list[Path]:
    """The files of a client's states at its node, in the only run."""
    return sorted((federation.node(client).setup.folder / "runs").glob("*/clients/*/*"))


@pytest.mark.parametrize("is_started_again", [False, True], ids=["nodes stay", "nodes are started again"])
def test_the_server_is_stopped_after_any_round(federation: FederationHere, is_started_again: bool) -> None:
    changes = [*CARRY, "phases.0.rounds=1", "phases.1.rounds=2"]
    expected = federation.simulate(*changes)
    federation.begin(*changes)
    for rounds in (1, 2, 3):
        out = f"stopped-{rounds}"
        with pytest.raises(KeyboardInterrupt):
            federation.run(*changes, out=out, callback=interrupt(rounds))
        for client in range(4) if is_started_again else ():
            federation.again(f"client-{client}")
        result = federation.run(*changes, out=out, resume=True)
        assert outcome(federation.place / "simulated", expected) == outcome(federation.place / out, result), rounds


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS.keys())
def test_the_server_is_stopped_in_each_round(changes: list[str], federation: FederationHere) -> None:
    expected = federation.simulate(*changes)
    federation.begin(*changes)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            federation.run(*changes, callback=interrupt(1), resume=True)
        federation.again("client-2")
    result = federation.run(*changes, resume=True)
    assert outcome(federation.place / "simulated", expected) == outcome(federation.place / "federated", result)


def test_an_older_checkpoint(federation: FederationHere) -> None:
    """The newest one is damaged: nodes still have what they remembered at the time of the one before."""
    expected = federation.simulate(*CARRY)
    federation.begin(*CARRY)
    with pytest.raises(KeyboardInterrupt):
        federation.run(*CARRY, callback=interrupt(4))
    *_, before, newest = sorted((federation.place / "federated" / "checkpoints").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    result = federation.run(*CARRY, resume=True)
    assert before.name < newest.name
    assert outcome(federation.place / "simulated", expected) == outcome(federation.place / "federated", result)


@pytest.mark.parametrize("damage", ["changed", "gone", "swapped"])
def test_a_state_that_was_altered(federation: FederationHere, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is left out as long as the server goes by this state, and nothing is made of it."""
    monkeypatch.setattr(run_folder, "CHECKPOINT_SHARE", 1e9)  # after each round
    changes = [*CARRY, "clients.fraction=1.0"]
    federation.begin(*changes)
    with pytest.raises(KeyboardInterrupt):
        federation.run(*changes, callback=interrupt(4))
    path, other = (max(memory(federation, client), key=lambda one: one.name) for client in (1, 2))
    if damage == "changed":
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    elif damage == "gone":
        path.unlink()
    else:
        shutil.copy(other, path)
    listener = Acting({})
    federation.run(*changes, resume=True, callback=listener)
    (line,) = listener.lines
    assert list(line["failed"]) == [1]
    assert line["failed"][1].startswith("what it remembered in round 4 is gone or was changed")


def test_nodes_delete_what_no_checkpoint_needs(federation: FederationHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a phase they keep the states of two checkpoints, the newest one, and that of the round under way."""
    monkeypatch.setattr(run_folder, "CHECKPOINT_SHARE", 1e9)  # after each round
    changes = [*CARRY, "phases.0.rounds=1", "phases.1.rounds=7", "clients.fraction=1.0"]
    federation.begin(*changes)
    found: list[int] = []

    def count() -> None:
        found.extend(sum("edit" in path.parts for path in memory(federation, client)) for client in range(4))

    federation.run(*changes, callback=Acting(dict.fromkeys(range(2, 9), count)))
    assert found[:4] == [1] * 4 and 2 <= max(found) <= 4
    assert not list(federation.link.folder.glob("*/runs/*"))
    assert all("is finished" in federation.node(client).said[-1] for client in range(4))


def test_a_repeated_request_is_not_done_twice(federation: FederationHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may ask again after a lost reply; the same bytes come, and the state is the same."""
    federation.begin(*CARRY)
    trained, done, same = ClientRuntime._trained, list[int](), list[bool]()

    def count(self: ClientRuntime, *arguments: object) -> object:
        done.append(arguments[1].data.client)  # type: ignore[attr-defined]
        return trained(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ClientRuntime, "_trained", count)

    def repeat() -> None:
        for client in range(4):
            node = federation.node(client)
            if node.asked[-1].header["do"] != "train":
                continue
            before, files = len(done), [path.read_bytes() for path in memory(federation, client)]
            reply = node._answered(node.asked[-1])
            same.append(
                (reply.header, bytes(reply.blobs[0])) == (node.replied[-2].header, bytes(node.replied[-2].blobs[0]))
            )
            assert len(done) == before and [path.read_bytes() for path in memory(federation, client)] == files

    expected = federation.simulate(*CARRY)
    done.clear()
    result = federation.run(*CARRY, callback=Acting(dict.fromkeys(range(1, 6), repeat)))
    assert len(done) == 15 and len(same) > 10 and all(same)
    assert outcome(federation.place / "simulated", expected) == outcome(federation.place / "federated", result)


def test_states_that_may_still_be_asked_for(tmp_path: Path) -> None:
    states = NodeStates(tmp_path / "phase")
    digests = {round: states.put(3, round, {"momentum": torch.full((4,), float(round))}) for round in (1, 2, 3, 4)}
    (tmp_path / "phase" / ".client-000003-round-00000009.safetensors.partial").write_text("cut")
    (tmp_path / "phase" / "other").write_text("not ours")
    states.tidy({2: digests[2], 3: digests[3]}, 4)
    assert sorted(path.name[-13:-12] for path in (tmp_path / "phase").glob("client-*")) == ["2", "3", "4"]
    assert sorted(path.name for path in (tmp_path / "phase").iterdir())[-1] == "other"
    assert not any(path.name.startswith(".") for path in (tmp_path / "phase").iterdir())
    assert states.read(3, 2)["momentum"].tolist() == [2.0] * 4
    for round in (1, 4, 5):  # gone, not one that the server knows, and never made
        with pytest.raises(RunError, match=f"what it remembered in round {round} is gone or was changed"):
            states.read(3, round)
    path = next((tmp_path / "phase").glob("*3.safetensors"))
    assert digest_of_file(path) == digests[3]


@pytest.mark.parametrize("begun", ["here", "at nodes"])
def test_a_run_goes_on_where_its_clients_are(federation: FederationHere, begun: str) -> None:
    folder = federation.place / "run"
    federation.begin(*CARRY)
    here, at_nodes = federation.experiment(*CARRY), federation.settings(*CARRY)
    first, other = (here, at_nodes) if begun == "here" else (at_nodes, here)
    with pytest.raises(KeyboardInterrupt):
        run(first, folder, callback=interrupt(4))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=f"began with clients {begun}; go on with engine: (local|that)"):
        run(other, folder, resume=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    run(first, folder, resume=True)
