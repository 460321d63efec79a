"""Who is there before a run begins, and whose name has which number."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from federation_nodes import Acting, FederationHere, LocalNode
from fedsieve.errors import InputError
from fedsieve.federation.gathering import Gathering
from listeners import Listener, interrupt
from small_runs import outcome

HEADS = [
    "clients.count=3",
    "clients.fraction=1.0",
    "data.normalize=imagenet",
    "phases=[{name: head, train: head, rounds: 3, local: {steps: 2, lr: 0.05}}]",
]


@pytest.fixture
def heads(federation: FederationHere) -> FederationHere:
    federation.export(*HEADS)
    return federation


def gathering(federation: FederationHere, *changes: str, out: str = "run", **engine: Any) -> Gathering:
    settings = federation.settings(*HEADS, *changes, **{"wait": 0.3, **engine})
    return Gathering.begin(federation.link, settings, federation.place / out, lambda text: None)


def numbers(out: Path) -> dict[str, int]:
    return json.loads((out / "roster.json").read_text())["numbers"]


def test_the_manifest_gives_the_numbers(heads: FederationHere) -> None:
    """Whoever comes first."""
    expected = heads.simulate(*HEADS)
    for name in ("client-2", "client-0", "client-1"):
        heads.start(name)
    result = heads.run(*HEADS)
    assert outcome(heads.place / "simulated", expected) == outcome(heads.place / "federated", result)
    assert numbers(heads.place / "federated") == {"client-0": 0, "client-1": 1, "client-2": 2}


def test_without_a_manifest_by_the_order_of_joining(heads: FederationHere) -> None:
    found = gathering(heads, manifest=False, wait=20)
    for name, shard in {"zebra": 0, "ant": 1, "cat": 2}.items():
        heads.link.start(name, heads.shards / f"client-{shard}.npz", backbone=str(heads.backbone))
        while name not in found.numbers:
            found.look()
    found.wait()
    assert found.numbers == {"zebra": 0, "ant": 1, "cat": 2}
    assert found.federation is not None and [one.name for one in found.federation.clients] == ["zebra", "ant", "cat"]
    (heads.place / "run").mkdir()
    found.save()
    again = gathering(heads, manifest=False)
    assert (again.numbers, again.run, again.federation) == (found.numbers, found.run, found.federation)


def test_numbers_are_kept_for_the_whole_run(heads: FederationHere) -> None:
    """After an interruption nodes come in another order."""
    for name in ("client-2", "client-0", "client-1"):
        heads.start(name)
    with pytest.raises(KeyboardInterrupt):
        heads.run(*HEADS, manifest=False, callback=interrupt(1))
    before = numbers(heads.place / "federated")
    for name in ("client-0", "client-1", "client-2"):
        heads.link.stop(name)
    for name in reversed(before):
        heads.start(name)
    result = heads.run(*HEADS, manifest=False, resume=True)
    assert numbers(heads.place / "federated") == before
    roster = json.loads((heads.place / "federated" / "roster.json").read_text())
    (heads.shards / "federation.json").write_text(json.dumps(roster["federation"]))
    (heads.shards / "server.npz").unlink()
    whole = heads.run(*HEADS, out="whole")
    assert numbers(heads.place / "whole") == before
    assert result["model_sha256"] == whole["model_sha256"]


def test_a_run_goes_on_only_when_all_have_come_again(heads: FederationHere) -> None:
    """The roster says where nodes were, not that they are there."""
    changes = [*HEADS, "clients.minimum=3"]
    expected = heads.simulate(*changes)
    for client in range(3):
        heads.start(f"client-{client}")
    with pytest.raises(KeyboardInterrupt):
        heads.run(*changes, callback=interrupt(1))
    heads.link.stop("client-1")
    with pytest.raises(InputError, match=r"2 of 3 nodes came within 0.3 s, and client-1 did not"):
        heads.run(*changes, resume=True, wait=0.3)
    heads.start("client-1")
    result = heads.run(*changes, resume=True)
    assert outcome(heads.place / "simulated", expected) == outcome(heads.place / "federated", result)


def test_nobody_is_there(heads: FederationHere) -> None:
    with pytest.raises(InputError, match=r"^0 of 3 nodes came within 0.3 s, and client-0, client-1, client-2 did not"):
        heads.run(*HEADS, wait=0.3)
    with pytest.raises(
        InputError, match=r"^0 of 3 nodes came within 0 s, and another node, another node, another node"
    ):
        heads.run(*HEADS, wait=0, manifest=False)
    assert not (heads.place / "federated").exists()


def test_without_a_manifest_all_must_come(heads: FederationHere) -> None:
    heads.start("client-0")
    heads.start("client-1")
    with pytest.raises(InputError, match=r"^2 of 3 nodes came within 0.3 s, and another node did not; start them"):
        heads.run(*HEADS, wait=0.3, manifest=False)


@pytest.mark.parametrize("manifest", [True, False])
def test_one_node_too_many(heads: FederationHere, manifest: bool) -> None:
    for client in range(3):
        heads.start(f"client-{client}")
    heads.link.start("stranger", heads.shards / "client-0.npz", backbone=str(heads.backbone))
    found = gathering(heads, manifest=manifest, wait=20)
    while len({*found.facts, *found.refused}) < 4:
        found.look()
    (reason,) = found.refused.values()
    assert "it is none of the federation's 3 clients: " in reason
    if manifest:
        assert list(found.refused) == ["stranger"]


def test_a_stranger_that_comes_later_is_not_used(heads: FederationHere) -> None:
    expected = heads.simulate(*HEADS)
    for client in range(3):
        heads.start(f"client-{client}")
    come = lambda: heads.link.start("stranger", heads.shards / "client-0.npz", backbone=str(heads.backbone))  # noqa: E731
    listener = Acting({1: come})
    result = heads.run(*HEADS, callback=listener)
    assert listener.warnings == [
        "node stranger is not used: it is none of the federation's 3 clients: client-0, client-1, client-2"
    ]
    assert result["model_sha256"] == expected["model_sha256"]


def test_two_nodes_of_one_name(heads: FederationHere) -> None:
    for client in range(3):
        heads.start(f"client-{client}")
    heads.link.start("twin", heads.shards / "client-1.npz", called="client-1", backbone=str(heads.backbone))
    found = gathering(heads, wait=20)
    while len({*found.facts, *found.refused}) < 4:
        found.look()
    ((address, reason),) = found.refused.items()
    first = {"client-1", "twin"} - {address}
    assert reason == f"client-1: another node ({first.pop()}) has this name already; give each its own --name"


def start_twin(heads: FederationHere) -> LocalNode:
    """Another node that says it is client-1."""
    return heads.link.start("twin", heads.shards / "client-1.npz", called="client-1", backbone=str(heads.backbone))


def place_of(out: Path, name: str) -> str:
    return json.loads((out / "roster.json").read_text())["addresses"][name]


def test_a_name_stays_with_its_address(heads: FederationHere) -> None:
    """Also after an interruption, while there is a node at this address."""
    for client in range(3):
        heads.start(f"client-{client}")
    with pytest.raises(KeyboardInterrupt):
        heads.run(*HEADS, callback=interrupt(1))
    heads.link.stop("client-2")  # so that the run waits
    start_twin(heads)
    with pytest.raises(InputError, match=r"^twin: client-1: another node \(client-1\) has this name already"):
        heads.run(*HEADS, resume=True)


def test_a_node_comes_back_at_another_address(heads: FederationHere) -> None:
    """As one does that has no key, when its relay is started again: it has its name and number still."""
    expected = heads.simulate(*HEADS)
    for client in range(3):
        heads.start(f"client-{client}")
    came = list[LocalNode]()

    def move() -> None:
        heads.link.stop("client-1")
        came.append(start_twin(heads))

    listener = Acting({1: move})
    result = heads.run(*HEADS, callback=listener)
    assert [line["failed"] for line in listener.lines] == [{}] * 3 and listener.warnings == []
    assert outcome(heads.place / "simulated", expected) == outcome(heads.place / "federated", result)
    asked = [one.header["do"] for one in came[0].asked]
    assert asked == ["join", "train", "train", "train", "end"]  # at first it lacks the weights
    assert place_of(heads.place / "federated", "client-1") == "twin"


def test_a_node_is_at_another_address_after_an_interruption(heads: FederationHere) -> None:
    expected = heads.simulate(*HEADS)
    for client in range(3):
        heads.start(f"client-{client}")
    with pytest.raises(KeyboardInterrupt):
        heads.run(*HEADS, callback=interrupt(1))
    heads.link.stop("client-1")
    start_twin(heads)
    result = heads.run(*HEADS, resume=True)
    assert outcome(heads.place / "simulated", expected) == outcome(heads.place / "federated", result)
    assert place_of(heads.place / "federated", "client-1") == "twin"


def test_a_node_comes_back_at_another_address_before_the_run(heads: FederationHere) -> None:
    heads.start("client-0")
    heads.start("client-1")
    found = gathering(heads)
    while len(found.facts) < 2:
        found.look()
    heads.link.stop("client-1")
    start_twin(heads)
    while "twin" not in found.facts:
        found.look()
    assert sorted(found.facts) == ["client-0", "twin"] and found.addresses["client-1"] == "twin"
    assert not found.refused and found.numbers["client-1"] == 1


def test_a_node_that_was_refused_is_asked_again(heads: FederationHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some time, since its owner may have mended what was wrong."""
    monkeypatch.setattr("fedsieve.federation.gathering.AGAIN", 1.0)
    node = heads.start("client-1")
    true = dict(node.about)
    node.about["torch"] = "1.0"
    found = gathering(heads)
    while not found.refused:
        found.look()
    began = time.monotonic()
    node.about.update(true)
    while not found.facts:
        found.look()
    assert time.monotonic() - began > 0.9 and found.refused == {} and found.addresses["client-1"] == "client-1"


def test_a_node_that_was_refused_is_let_in_during_the_run(
    heads: FederationHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong with it is said once, and again when it is something else."""
    monkeypatch.setattr("fedsieve.federation.gathering.AGAIN", 0.0)
    heads.start("client-0")
    heads.start("client-1")

    def come() -> None:
        heads.start("client-2").about["torch"] = "1.0"

    def mend_half() -> None:
        heads.node(2).about |= {"torch": heads.node(1).about["torch"], "fedsieve": "0.0"}

    def mend() -> None:
        heads.node(2).about["fedsieve"] = heads.node(1).about["fedsieve"]

    listener = Acting({1: come, 3: mend_half, 5: mend})
    heads.run(*HEADS, "clients.minimum=2", "phases.0.rounds=7", callback=listener, wait=0.3)
    said = [one for one in listener.warnings if "is not used" in one]
    assert len(said) == 2
    assert said[0].startswith("node client-2 is not used: it has torch 1.0")
    assert said[1].startswith("node client-2 is not used: it has fedsieve 0.0")
    reasons = [line["failed"].get(2, "") for line in listener.lines]
    assert reasons == [*5 * ["its node is not there"], "", ""]


def test_classes_must_be_the_same(heads: FederationHere) -> None:
    for client in range(3):
        heads.start(f"client-{client}")
    heads.node(1).about["classes"] = ["0", "1", "3", "2"]
    with pytest.raises(InputError, match=r"client-\d has other classes than client-\d; name them alike everywhere"):
        heads.run(*HEADS, manifest=False)


def test_other_samples_than_the_manifest_says(heads: FederationHere) -> None:
    for client, shard in ((0, 1), (1, 0), (2, 2)):
        heads.link.start(f"client-{client}", heads.shards / f"client-{shard}.npz", backbone=str(heads.backbone))
    manifest = json.loads((heads.shards / "federation.json").read_text())
    counts = [one["class_counts"] for one in manifest["clients"]]
    assert counts[0] != counts[1]
    with pytest.raises(
        InputError, match=r"^node client-[01]: client-[01] has other samples: \d+ of class \d here, and \d+"
    ):
        heads.run(*HEADS)


DAMAGE = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "a list": lambda text: "[]",
    "no run": lambda text: text.replace('"run"', '"ran"'),
    "a path as run": lambda text: json.dumps(json.loads(text) | {"run": "../../x"}),
    "a number twice": lambda text: json.dumps(json.loads(text) | {"numbers": {"client-0": 0, "client-1": 0}}),
    "a number too many": lambda text: json.dumps(json.loads(text) | {"numbers": {"client-0": 7}}),
    "numbers in words": lambda text: json.dumps(json.loads(text) | {"numbers": {"client-0": "x"}}),
    "numbers that are none": lambda text: json.dumps(json.loads(text) | {"numbers": 5}),
    "no federation": lambda text: json.dumps(json.loads(text) | {"federation": {}}),
    "addresses that are none": lambda text: json.dumps(json.loads(text) | {"addresses": [1]}),
}


def test_a_damaged_roster(heads: FederationHere) -> None:
    for client in range(3):
        heads.start(f"client-{client}")
    with pytest.raises(KeyboardInterrupt):
        heads.run(*HEADS, manifest=False, callback=interrupt(1))
    path = heads.place / "federated" / "roster.json"
    whole = path.read_text()
    for name, damage in DAMAGE.items():
        path.write_text(damage(whole))
        with pytest.raises(InputError) as error:
            heads.run(*HEADS, manifest=False, resume=True)
        assert str(error.value) == (
            f"{path}, which says which node is which client, is damaged; start the run anew in another folder"
        ), name
    path.write_text(whole)
    heads.run(*HEADS, manifest=False, resume=True)


def test_the_manifest_of_another_federation(heads: FederationHere) -> None:
    for client in range(3):
        heads.start(f"client-{client}")
    with pytest.raises(KeyboardInterrupt):
        heads.run(*HEADS, callback=interrupt(1))
    path = heads.shards / "federation.json"
    path.write_text(path.read_text().replace('"client-1"', '"client-7"'))
    with pytest.raises(InputError, match=r"the manifest has other clients than .*roster.json; give the run's own"):
        heads.run(*HEADS, resume=True)


def test_the_server_has_no_images(heads: FederationHere) -> None:
    """Then nothing is evaluated at the server; the model is the same."""
    expected = heads.simulate(*HEADS)
    for client in range(3):
        heads.start(f"client-{client}")
    (heads.shards / "server.npz").unlink()
    with pytest.raises(InputError, match=r"server.npz is not there; copy it beside the manifest, or set `server` to"):
        heads.run(*HEADS)
    path = heads.shards / "federation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"server": None}))
    result = heads.run(*HEADS)
    assert result["model_sha256"] == expected["model_sha256"] and result["test_accuracy"] is None
    with pytest.raises(InputError, match=r"evaluate.keep: best needs validation images, and the server has none"):
        heads.run(*HEADS, "evaluate.keep=best", out="best")


def test_who_is_waited_for_is_told(heads: FederationHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsieve.federation.gathering.OFTEN", 0.0)
    heads.start("client-1")
    listener = Listener()
    with pytest.raises(InputError):
        heads.run(*HEADS, "clients.minimum=2", callback=listener, wait=0.4)
    assert "waiting for client-0, client-2" in listener.notes
