"""What a node's owner allows: everything else is refused at the start, in one line that says what to change."""

import json
import re

import pytest

from federation_nodes import Acting, FederationHere, Maker
from fedsieve.config.experiment_file import parse_experiment
from fedsieve.errors import InputError, RunError
from fedsieve.federation.owner import TOLD, Owner, told_of
from fedsieve.federation.socket_frames import Frame
from fedsieve.runs.read import read_metrics
from listeners import interrupt
from small_runs import edit, outcome

FEW = ["clients.count=4", "clients.fraction=1.0"]
EQUAL = [*FEW, "clients.weighting=equal"]
SECRET = [*FEW, "clients.secure=zero_sum"]

REFUSED = {
    "rounds": (Owner(rounds=4), FEW, "its owner allows 4 rounds, and the experiment has 5"),
    "epochs": (
        Owner(epochs=2),
        [*FEW, "phases.1.local={epochs: 3, lr: 0.1}"],
        "its owner allows 2 epochs in a round, and phase all asks for 3 epochs",
    ),
    "steps": (Owner(epochs=9), FEW, "its owner allows 9 epochs in a round, and phase all asks for a number of steps"),
    "no secure sums": (Owner(needs_secure=True), FEW, "its owner wants secure sums; set clients.secure: zero_sum"),
    "chosen by losses": (
        Owner(tells=frozenset({"samples", "classes"})),
        [*SECRET, "clients.fraction=0.75", "clients.select={high_loss: {candidates: 4}}"],
        "its owner does not tell losses, by which clients.select: high_loss chooses",
    ),
    "losses": (
        Owner(tells=frozenset({"samples", "classes"})),
        FEW,
        "its owner does not tell losses, which updates hold; clients.secure: zero_sum hides them",
    ),
    "samples": (
        Owner(tells=frozenset({"classes", "losses"})),
        FEW,
        "its owner does not tell its number of samples; set clients.weighting: equal",
    ),
}


@pytest.mark.parametrize(("owner", "changes", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_an_experiment_that_is_not_allowed(
    federation: FederationHere, owner: Owner, changes: list[str], reason: str
) -> None:
    assert owner.refusal(federation.experiment(*changes)) == reason
    federation.begin(*changes)
    federation.again("client-2", owner=owner)
    with pytest.raises(InputError, match=f"^node client-2: {re.escape(reason)}$"):
        federation.run(*changes)
    assert not (federation.place / "federated").exists()


ALLOWED = {
    "rounds": (Owner(rounds=5), FEW),
    "epochs": (Owner(epochs=1), [*FEW, "phases.1.local={epochs: 1, lr: 0.1}"]),
    "secure sums": (Owner(needs_secure=True, participants=4), SECRET),
    "no losses, in secure sums": (Owner(tells=frozenset({"samples", "classes"})), SECRET),
    "no classes": (Owner(tells=frozenset({"samples", "losses"})), FEW),
    "no samples": (Owner(tells=frozenset({"classes", "losses"})), EQUAL),
    "no samples, under a mask": (Owner(tells=frozenset({"classes", "losses"})), [*EQUAL, edit("scope: client")]),
    "nothing": (Owner(tells=frozenset()), [*SECRET, "clients.weighting=equal"]),
}


@pytest.mark.parametrize(("owner", "changes"), ALLOWED.values(), ids=ALLOWED.keys())
def test_an_experiment_that_is_allowed(federation: FederationHere, owner: Owner, changes: list[str]) -> None:
    """All owners limit their nodes; the model is that of the simulation."""
    expected = federation.simulate(*changes)
    federation.begin(*changes, owner=owner)
    result = federation.run(*changes)
    assert result["model_sha256"] == expected["model_sha256"]
    if "samples" in owner.tells:
        assert outcome(federation.place / "simulated", expected) == outcome(federation.place / "federated", result)
    told = federation.node(0).about
    assert told["samples"] == (45 if "samples" in owner.tells else 1)
    assert (told["class_counts"] is not None) == ({"samples", "classes"} <= owner.tells)


@pytest.mark.parametrize("secure", ["none", "zero_sum"])
def test_a_number_of_samples_that_nobody_knows(federation: FederationHere, secure: str) -> None:
    """The server goes by one sample each: with weighting: equal nothing depends on it."""
    changes = [*EQUAL, f"clients.secure={secure}"]
    expected = federation.simulate(*changes)
    federation.begin(*changes, owner=Owner(tells=frozenset({"classes", "losses"})))
    path = federation.shards / "federation.json"
    manifest = json.loads(path.read_text())
    manifest["clients"] = [{"name": one["name"], "samples": 1} for one in manifest["clients"]]
    path.write_text(json.dumps(manifest))
    result = federation.run(*changes, callback=(listener := Acting({})))
    assert result["model_sha256"] == expected["model_sha256"] and not listener.warnings
    roster = json.loads((federation.place / "federated" / "roster.json").read_text())
    assert [(one["samples"], one["class_counts"]) for one in roster["federation"]["clients"]] == [(1, None)] * 4


def test_held_out_samples_are_not_told(federation: FederationHere) -> None:
    """How many are right would tell how many there are."""
    changes = [*EQUAL, "clients.holdout=0.2", "evaluate.clients=true", "phases.0.rounds=1", "phases.1.rounds=1"]
    federation.begin(*changes)
    federation.again("client-1", owner=Owner(tells=frozenset({"classes", "losses"})))
    federation.again("client-2", owner=Owner(tells=frozenset({"samples", "classes"})))
    with pytest.raises(InputError, match="node client-2: its owner does not tell losses"):
        federation.run(*changes)
    federation.again("client-2")
    federation.run(*changes, callback=(listener := Acting({})))
    assert [warning.partition(": ")[0] for warning in listener.warnings] == ["client 1 was not evaluated"]
    assert "its owner does not tell its number of samples" in listener.warnings[0]


def test_too_few_participants(federation: FederationHere) -> None:
    """The node's own update is missing from the sum; the others do the round again."""
    changes = [*SECRET, "clients.fraction=0.75", "phases.0.rounds=1", "phases.1.rounds=1"]
    federation.begin("clients.count=4")
    for client in range(4):
        federation.again(f"client-{client}", owner=Owner(participants=4))
    with pytest.raises(RunError, match="its owner wants at least 4 participants in a sum, and there are 3"):
        federation.run(*changes)


def test_a_request_that_is_too_large(federation: FederationHere) -> None:
    federation.begin(*FEW)
    federation.again("client-1", owner=Owner(message=1000))
    listener = Acting({})
    federation.run(*FEW, callback=listener)
    assert [list(line["failed"]) for line in listener.lines] == [[1]] * 5
    assert all("and 1,000 are allowed" in line["failed"]["1"] for line in read_metrics(federation.place / "federated"))


# ----------------------------------------------------- a server that asks for more than it said when it was joined


def test_jobs_that_the_owner_does_not_allow(federation: FederationHere) -> None:
    changes = [*SECRET, "clients.weighting=equal"]
    federation.begin(*changes, owner=Owner(tells=frozenset(), needs_secure=True, rounds=5))
    with pytest.raises(KeyboardInterrupt):
        federation.run(*changes, callback=interrupt(1))
    node = federation.node(0)
    train = next(one for one in reversed(node.asked) if one.header["do"] == "train")

    def reason(do: str, **about: object) -> str:
        request = Frame({**train.header, "do": do, "about": {**train.header["about"], **about}}, train.blobs)
        return node._answered(request).header["failed"]

    assert reason("train", secret=None) == "its owner wants secure sums"
    assert reason("loss") == reason("evaluate") == "its owner does not tell losses"
    assert "rounds so far cannot be true" in reason("train", version=6)


def test_the_only_experiment(federation: FederationHere) -> None:
    """It may name other places, as it is a file of the owner's."""
    changes = [*FEW, "data.normalize=imagenet"]
    pinned = parse_experiment(
        federation.experiment(*changes).to_yaml(),
        "owner.yaml",
        ["data.path=/home/owner/own.npz", "model.backbone=/models/tiny.safetensors", "workers=3", "device=auto"],
    ).resolved()
    expected = federation.simulate(*changes)
    federation.begin(*changes, pinned=pinned)
    assert federation.run(*changes)["model_sha256"] == expected["model_sha256"]
    for change in ("phases.0.rounds=4", "seed=8", "model.backbone=pico", "wire.values=int8", "data.image_size=32"):
        with pytest.raises(InputError, match=r"runs another experiment than the one that its owner allows"):
            federation.run(*changes, change, manifest=False, out="other")


@pytest.mark.parametrize(
    ("text", "names"),
    [("samples,classes,losses", set(TOLD)), (" samples , losses ", {"samples", "losses"}), ("", set()), (",", set())],
)
def test_what_is_told(text: str, names: set[str]) -> None:
    assert told_of(text) == names


@pytest.mark.parametrize("text", ["sample", "samples;losses", "all", "none"])
def test_what_is_told_is_known(text: str, experiment: Maker) -> None:
    with pytest.raises(InputError, match=r"^--tell: '.*' is nothing that a node tells; use samples, classes, losses$"):
        told_of(text)
