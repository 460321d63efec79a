"""Nodes that leave and come back, or come late: the run goes on, and they get what they lack."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from federation_nodes import Acting, FederationHere, LocalNode, no_reply, only
from fedsieve.errors import InputError, RunError
from fedsieve.federation.socket_frames import Frame
from fedsieve.runs.read import read_metrics
from listeners import Listener
from small_runs import edit, outcome

FEW = ["clients.count=4", "clients.fraction=1.0"]
OWN = [*FEW, edit("scope: client", more=", optimizer_state: carry"), "phases.1.rounds=4"]
KINDS = {
    "its own mask, drawn once": OWN,
    "a mask from everybody, drawn once": [*FEW, edit("scope: federated"), "phases.1.rounds=4"],
    "the server's mask": [*FEW, edit("scope: server, rule: random"), "phases.1.rounds=4"],
    "SCAFFOLD": [
        *FEW,
        "phases.1.method=scaffold",
        "phases.1.local.momentum=0",
        "phases.1.rounds=4",
        "phases.0.rounds=1",
    ],
    "all weights": [*FEW, "phases.0.rounds=1", "phases.1.rounds=4"],
}


def failures(out: Path) -> list[list[str]]:
    """Who was left out, by round."""
    return [sorted(line["failed"]) for line in read_metrics(out)]


def less_reasons(found: tuple[str, str], out: Path) -> tuple[str, str]:
    """An outcome in which only matters who failed, not why."""
    lines, scores = found
    for line in read_metrics(out):
        for reason in line["failed"].values():
            lines = lines.replace(reason, "")
    return lines, scores


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
def test_a_node_that_is_gone_for_a_round(changes: list[str], federation: FederationHere) -> None:
    """It is killed, misses a round, and goes on as one that only did not reply in this round."""
    federation.begin(*changes)
    place, phase = federation.place, "edit" if "edit" in str(changes) else "all"
    acts = {2: lambda: federation.link.stop("client-1"), 3: lambda: federation.start("client-1")}
    gone = federation.run(*changes, out="gone", callback=Acting(acts))
    federation.node(1).lie = only(phase, 2, no_reply)
    silent = federation.run(*changes, out="silent")
    assert failures(place / "gone") == failures(place / "silent") == [[], [], ["1"], [], []]
    assert [line["clients"] for line in read_metrics(place / "gone")] == [[0, 1, 2, 3]] * 5
    assert gone["model_sha256"] == silent["model_sha256"]
    found = outcome(place / "gone", gone), outcome(place / "silent", silent)
    assert less_reasons(found[0], place / "gone") == less_reasons(found[1], place / "silent")


def test_a_node_that_is_started_again_between_rounds(federation: FederationHere) -> None:
    """Nothing is lost: what it remembers is on disk, and the rest is sent again."""
    expected = federation.simulate(*OWN)
    federation.begin(*OWN)
    acts = {done: lambda client=done: federation.again(f"client-{client % 4}") for done in range(1, 5)}
    result = federation.run(*OWN, callback=Acting(acts))
    assert outcome(federation.place / "simulated", expected) == outcome(federation.place / "federated", result)


def test_one_client_more_than_may_be_missing(federation: FederationHere) -> None:
    """The run ends, and goes on to the simulation's model when the node is back."""
    changes = [*OWN, "clients.minimum=4"]
    expected = federation.simulate(*changes)
    federation.begin(*changes)
    with pytest.raises(RunError, match=r"3 of 4 clients replied, fewer than clients.minimum 4; client 2: it cannot be"):
        federation.run(*changes, callback=Acting({3: lambda: federation.link.stop("client-2")}))
    with pytest.raises(InputError, match=r"3 of 4 nodes came within 0.3 s, and client-2 did not; start them"):
        federation.run(*changes, resume=True, wait=0.3)
    federation.start("client-2")
    result = federation.run(*changes, resume=True)
    assert outcome(federation.place / "simulated", expected) == outcome(federation.place / "federated", result)


def test_a_node_that_does_not_reply_in_time(federation: FederationHere) -> None:
    federation.begin(*FEW)
    acts: dict[int, Any] = {
        1: lambda: setattr(federation.node(3), "is_stuck", True),
        2: lambda: setattr(federation.node(3), "is_stuck", False),
    }
    listener = Acting(acts)
    federation.run(*FEW, callback=listener, timeout=1)
    assert listener.lines[1]["failed"] == {3: "it did not reply within 1 s"}
    assert [list(line["failed"]) for line in listener.lines] == [[], [3], [], [], []]
    assert listener.warnings == ["phase head, round 2: client 3 was left out: it did not reply within 1 s"]
    assert len(federation.node(3).jobs("train")) == 4  # what nobody waits for is not done


def test_a_node_that_comes_late(federation: FederationHere) -> None:
    """The manifest says who it is; it begins with the weights of that time."""
    changes = [*OWN, "clients.minimum=3"]
    federation.begin(*changes)
    shutil.rmtree(federation.link.folder / "client-0" / "runs")
    federation.link.stop("client-0")
    listener = Acting({2: lambda: federation.start("client-0")})
    federation.run(*changes, callback=listener, wait=0.3)
    assert listener.notes[0] == "client-0 did not come within 0.3 s; beginning without"
    assert [line["failed"] for line in listener.lines[:2]] == [{0: "its node is not there"}] * 2
    assert [line["failed"] for line in listener.lines[2:]] == [{}] * 3
    assert "client-0" in (federation.place / "federated" / "roster.json").read_text()


def test_a_node_that_may_not_take_part_when_it_comes(federation: FederationHere) -> None:
    changes = [*FEW, "clients.minimum=3"]
    federation.begin(*changes)
    federation.link.stop("client-0")
    listener = Acting({1: lambda: federation.start("client-0", backbone=None)})
    federation.run(*changes, callback=listener, wait=0.3)
    problem = "it does not know where its file for model.backbone lies; start it with --backbone FILE"
    assert listener.warnings[1] == f"node client-0 cannot take part: {problem}"
    assert [line["failed"] for line in listener.lines[1:]] == [{0: problem}] * 4


def hang_at_join(node: LocalNode) -> None:
    """It says that it lacks the run, and nothing any more when it is asked to join."""

    def told(request: Frame, reply: Frame) -> Frame:
        node.is_stuck = reply.header.get("lacks") == "run"
        return reply

    node.lie = told


def test_a_node_that_hangs_when_it_joins_again(federation: FederationHere) -> None:
    """The others do not wait for it longer than for any reply, also one of them that joins again at this time."""
    federation.begin(*FEW)

    def fall() -> None:
        hang_at_join(federation.again("client-0"))
        federation.again("client-2")

    def stand_up() -> None:
        federation.node(0).lie, federation.node(0).is_stuck = None, False

    listener = Acting({1: fall, 2: stand_up})
    hung = federation.run(*FEW, out="hung", callback=listener, timeout=2)
    assert [line["failed"] for line in listener.lines] == [{}, {0: "it did not reply within 2 s"}, {}, {}, {}]
    federation.node(0).lie = only("head", 2, no_reply)
    silent = federation.run(*FEW, out="silent")
    assert failures(federation.place / "silent") == [[], ["0"], [], [], []]
    assert hung["model_sha256"] == silent["model_sha256"]


def test_a_newcomer_that_hangs_when_it_joins(federation: FederationHere) -> None:
    """Rounds go on without it, and with it once it has joined."""
    changes = [*FEW, "clients.minimum=3"]
    federation.begin(*changes)
    federation.link.stop("client-0")
    acts = {
        1: lambda: setattr(federation.start("client-0"), "is_stuck", True),
        3: lambda: setattr(federation.node(0), "is_stuck", False),
    }
    listener, began = Acting(acts), time.monotonic()
    federation.run(*changes, callback=listener, wait=0.3, timeout=60)
    assert time.monotonic() - began < 30
    reasons = ["its node is not there", *2 * ["its node does not take part yet"]]
    assert [line["failed"] for line in listener.lines] == [*({0: reason} for reason in reasons), {}, {}]
    assert [one.header["do"] for one in federation.node(0).asked].count("join") == 1
    assert not any("cannot take part" in one for one in listener.warnings)


def test_a_newcomer_that_does_not_join_in_time(federation: FederationHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again, and that is said once."""
    monkeypatch.setattr("fedsieve.federation.gathering.AGAIN", 0.0)
    changes = [*FEW, "clients.minimum=3"]
    federation.begin(*changes)
    federation.link.stop("client-0")
    acts = {
        1: lambda: setattr(federation.start("client-0"), "is_stuck", True),
        2: lambda: time.sleep(2.1),
        3: lambda: time.sleep(2.1),
        4: lambda: setattr(federation.node(0), "is_stuck", False),
    }
    listener = Acting(acts)
    federation.run(*changes, callback=listener, wait=0.3, timeout=2)
    told = [one for one in listener.warnings if "was left out" not in one]
    assert told == ["node client-0 cannot take part: it said nothing for 2 s"]
    assert [list(line["failed"]) for line in listener.lines] == [*4 * [[0]], []]


# ------------------------------------------------------------------------------------- secure sums

SECURE = [*FEW, "clients.secure=zero_sum", "phases.0.rounds=2", "phases.1.rounds=1"]


def test_a_secure_round_is_done_again_without_who_left(federation: FederationHere) -> None:
    """A node that leaves between its key and its update: the same as one that made no key."""
    federation.begin(*SECURE)
    federation.node(2).lie = only("head", 2, no_reply)
    listener = Acting({})
    late = federation.run(*SECURE, out="late", callback=listener)
    assert [list(line["failed"]) for line in listener.lines] == [[], [2], []]
    places = [one["place"] for one in federation.node(0).jobs("key")]
    assert places == [
        "phase head, round 1",
        "phase head, round 2",
        "phase head, round 2, attempt 2",
        "phase all, round 1",
    ]
    federation.node(2).lie = lambda request, reply: (
        None if request.header["do"] == "key" and "round 2" in request.header["about"]["place"] else reply
    )
    early = federation.run(*SECURE, out="early")
    assert late["model_sha256"] == early["model_sha256"]


def test_a_secure_round_with_too_few(federation: FederationHere) -> None:
    """The sum over two would show single updates."""
    federation.begin(*SECURE)
    for client in (0, 3):
        federation.node(client).lie = only("head", 1, no_reply)
    listener = Listener()
    with pytest.raises(RunError, match=r"2 clients are left, and clients.secure: zero_sum needs 3 \(client 0: it can"):
        federation.run(*SECURE, callback=listener)


def test_a_secure_request_that_is_repeated_is_refused(federation: FederationHere) -> None:
    """With two updates under the same noise a server could read their difference."""
    federation.begin(*SECURE)
    node = federation.node(1)
    replies = []

    def repeat() -> None:
        last = next(one for one in reversed(node.asked) if one.header["do"] == "train")
        replies.append(node._answered(last))

    federation.run(*SECURE, callback=Acting({2: repeat}))
    assert replies[0].header["about"] == {"failed": "its key for this round was used already, or never made"}
