"""Nodes that lie or send damaged bytes are left out of the round, or refused at the start, in one line that names them.

What updates may say that are whole is in tests/federate/test_lies.py.
"""

import json
import re
import resource
from typing import Any

import pytest

from federation_nodes import (
    ESCAPES,
    HEADS,
    Bytes,
    FederationHere,
    Lie,
    about,
    flipped,
    header,
    only,
    told_by,
    whole,
)
from fedsieve.errors import RunError
from fedsieve.federation.socket_frames import LENGTH, MAGIC, START, Frame
from fedsieve.runs.read import read_metrics
from listeners import Listener
from small_runs import edit

LIES: dict[str, tuple[Lie, str]] = {
    "nothing": (lambda request, reply: Bytes(b""), "cannot be reached"),
    "noise": (lambda request, reply: Bytes(bytes(range(256)) * 9), "this is no frame"),
    "half of it": (lambda request, reply: Bytes(whole(reply)[: len(whole(reply)) // 2]), "in the midst of a message"),
    "a long header": (lambda request, reply: Bytes(START.pack(MAGIC, 2**32 - 1, 1)), "this is no frame"),
    "many blobs": (lambda request, reply: Bytes(START.pack(MAGIC, 10, 2**32 - 1)), "this is no frame"),
    "a huge blob": (
        lambda request, reply: Bytes(START.pack(MAGIC, 2, 1) + LENGTH.pack(2**63) + b"{}"),
        "9,223,372,036,854,775,808 bytes",
    ),
    "a long blob": (lambda request, reply: Frame(reply.header, [bytes(2**21)]), "are allowed"),
    "a blob that does not come": (
        lambda request, reply: Bytes(START.pack(MAGIC, 2, 1) + LENGTH.pack(2**16) + b"{}"),
        "in the midst of a message",
    ),
    "a flip in the update": (lambda request, reply: flipped(reply, 0.9), ""),
    "no JSON": (header(b"{"), "the header is no JSON"),
    "no object": (header([]), "the header is no JSON object"),
    "nested": (header(b"[" * 10**5), "the header is no JSON"),
    "a huge number": (header(b'{"about": ' + b"9" * 10**5 + b"}"), "the header is no JSON"),
    "no text": (header(b"\xff\xfe"), "the header is no JSON"),
    "nothing in the header": (header({}), "about"),
    "about a list": (header({"about": []}), ""),
    "about a number": (header({"about": 5}), ""),
    "about nothing": (header({"about": None}), ""),
    "no blob": (lambda request, reply: Frame(reply.header), ""),
    "an empty blob": (lambda request, reply: Frame(reply.header, [b""]), "cut short"),
    "a failure with escapes": (about(failed=ESCAPES), r"^\\x1b\[31m redx+$"),
    "a refusal with escapes": (header({"refused": ESCAPES}), r"^\\x1b\[31m redx+$"),
    "a failure of another type": (header({"failed": {"a": [1]}}), r"^{'a': \[1\]}$"),
    "always lacking": (header({"lacks": "weights"}), "it lacks the weights"),
    "always without a run": (header({"lacks": "run"}), "it lacks the run"),
    "lacking nonsense": (header({"lacks": [ESCAPES]}), "it lacks the "),
    "remembers a number": (about(remembers=int("1" * 32)), "what it remembers"),
    "remembers a word": (about(remembers="yes"), "what it remembers"),
    "remembers nothing": (about(remembers=""), "what it remembers"),
    "remembers a list": (about(remembers=["1" * 32]), "what it remembers"),
    "remembers NaN": (header(b'{"about": {"encodings": [], "remembers": NaN}}'), "what it remembers"),
    "many encodings": (about(encodings=["dense float32"] * 10**5), "how its update is encoded"),
    "encodings with escapes": (about(encodings=[ESCAPES]), "how its update is encoded"),
    "encodings that are numbers": (about(encodings=[5]), "how its update is encoded"),
    "encodings that are text": (about(encodings="dense"), "how its update is encoded"),
    "no encodings": (header({"about": {"remembers": None}}), "encodings"),
}


def test_a_lie_in_a_round(heads: FederationHere) -> None:
    """All of them, one after another, in rounds of one run: whoever lies is left out of this round only."""
    lies = list(LIES.values())

    def lie(request: Frame, reply: Frame) -> Frame | None:
        number = request.header["about"].get("round", 1) if request.header["do"] == "train" else 0
        return lies[number // 2][0](request, reply) if number % 2 and number // 2 < len(lies) else reply

    heads.node(2).lie = lie
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    listener = told_by(heads, f"phases.0.rounds={2 * len(lies)}", "clients.norm_limit=null")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    for name, line, after in zip(LIES, listener.lines[::2], listener.lines[1::2], strict=True):
        assert list(line["failed"]) == [2] and after["failed"] == {}, name
        reason = line["failed"][2]
        assert re.search(LIES[name][1], reason) and reason.isprintable() and len(reason) < 400, (name, reason)
    assert len(listener.warnings) == len(LIES) and all("client 2 was left out" in one for one in listener.warnings)


@pytest.mark.parametrize("place", [0.0, 0.0005, 0.02, 0.1, 0.5, 1.0])
def test_a_flipped_bit(heads: FederationHere, place: float) -> None:
    """Wherever it is: the message is refused, or says the same."""
    heads.node(2).lie = only("head", 1, lambda request, reply: flipped(reply, place))
    lines = told_by(heads).lines
    assert list(lines[0]["failed"]) in ([], [2]) and lines[1]["failed"] == {}
    assert place < 0.1 or lines[0]["failed"]


def test_the_update_of_another_client(heads: FederationHere) -> None:
    heads.node(2).lie = only("head", 1, lambda request, reply: heads.node(1).reply_like(request))
    reasons = [line["failed"] for line in told_by(heads).lines]
    assert reasons == [{2: "the message is of another client or another round"}, {}]


def test_the_update_of_an_earlier_round(heads: FederationHere) -> None:
    heads.node(2).lie = only("head", 2, lambda request, reply: heads.node(2).replied[-2])
    reasons = [line["failed"] for line in told_by(heads).lines]
    assert reasons == [{}, {2: "the message is of another client or another round"}]


def test_a_reply_to_another_request(heads: FederationHere) -> None:
    heads.node(2).lie = only("head", 1, lambda request, reply: Frame(heads.node(2).about))
    assert list(told_by(heads).lines[0]["failed"]) == [2]


# ----------------------------------------------------------------------------------------- other jobs


def test_losses_by_which_clients_are_chosen(heads: FederationHere) -> None:
    changes = ["clients.fraction=0.5", "clients.select={high_loss: {candidates: 4}}"]
    heads.node(2).lie = only("head", 1, lambda request, reply: heads.node(1).reply_like(request), do="loss")
    heads.node(3).lie = only("head", 1, lambda request, reply: flipped(reply, 0.99), do="loss")
    listener = told_by(heads, *changes)
    assert sorted(listener.lines[0]["failed"]) == [2, 3]
    assert listener.lines[0]["failed"][2] == "the message is of another client"


@pytest.mark.parametrize("lie", [lambda request, reply: Frame({"about": {}}, [b"x"]), lambda request, reply: None])
def test_scores_without_which_there_is_no_mask(federation: FederationHere, lie: Lie) -> None:
    """All clients are needed: the run ends with a line that names the client, and goes on when it is well again."""
    changes = ["clients.count=4", edit("scope: federated")]
    expected = federation.simulate(*changes)
    federation.begin(*changes)
    federation.node(2).lie = only("edit", 2, lie, do="scores")
    with pytest.raises(RunError, match=r"client 2: .*all clients are needed at this point"):
        federation.run(*changes)
    federation.node(2).lie = None
    assert federation.run(*changes, resume=True)["model_sha256"] == expected["model_sha256"]


EVALUATIONS: list[dict[str, Any]] = [
    {"correct": 10**6},
    {"correct": -1},
    {"correct": 0.5},
    {"correct": True},
    {"correct": None},
    {"samples": 10**30, "correct": 10**30},
    {"samples": 0},
    {"samples": "9"},
    {"loss": -1.0},
    {"loss": 10**400},
    {"loss": "NaN"},
    {"loss": [ESCAPES]},
]


def test_evaluations(heads: FederationHere) -> None:
    held = ["clients.holdout=0.2", "evaluate.clients=true", "phases.0.rounds=1"]
    expected = heads.simulate(*HEADS, *held)["clients"]
    for number, change in enumerate(EVALUATIONS):
        heads.node(2).lie = lambda request, reply, change=change: (  # type: ignore[misc]
            about(**change)(request, reply) if request.header["do"] == "evaluate" else reply
        )
        listener = Listener()
        result = heads.run(*HEADS, *held, out=str(number), callback=listener)
        (warning,) = listener.warnings
        assert warning.startswith("client 2 was not evaluated: ") and warning.isprintable(), change
        assert result["clients"] != expected and json.dumps(result["clients"], allow_nan=False)
    heads.node(2).lie = None
    assert heads.run(*HEADS, *held)["clients"] == expected


KEYS = {
    "short": b"k" * 31,
    "long": b"k" * 40,
    "empty": b"",
    "known to everybody": bytes(32),
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
def test_a_public_key_that_is_none(heads: FederationHere, key: bytes) -> None:
    """The others are not blamed for it."""
    heads.node(2).lie = lambda request, reply: Frame({"about": {}}, [key]) if request.header["do"] == "key" else reply
    lines = told_by(heads, "clients.secure=zero_sum").lines
    assert [line["failed"] for line in lines] == [{2: "its public key is not valid"}] * 2


def test_the_public_key_of_another_client(heads: FederationHere) -> None:
    heads.node(2).lie = lambda request, reply: (
        heads.node(1).reply_like(request) if request.header["do"] == "key" else reply
    )
    lines = told_by(heads, "clients.secure=zero_sum").lines
    assert [line["failed"] for line in lines] == [{2: "its public key was used before"}] * 2


def test_noise_in_a_secure_sum(heads: FederationHere) -> None:
    """A message that cannot be read: the round is done again without it."""
    heads.node(2).lie = only("head", 1, lambda request, reply: flipped(reply, 0.9))
    lines = told_by(heads, "clients.secure=zero_sum").lines
    assert [list(line["failed"]) for line in lines] == [[2], []]
    assert [line["failed"] for line in read_metrics(heads.place / "federated")][1] == {}
