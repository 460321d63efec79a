"""Nodes that lie before the first round: they are refused at the start, in one line that names them."""

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from federation_nodes import ESCAPES, HEADS, FederationHere, raw, told_by, whole
from fedsieve.errors import InputError
from fedsieve.federation.links import SOCKET
from fedsieve.federation.socket_frames import Frame

HELLOS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another's name": lambda one: one.update(name="client-1"),
    "an unknown name": lambda one: one.update(name="client-9"),
    "a path": lambda one: one.update(name="../client-0"),
    "no name": lambda one: one.pop("name"),
    "an empty name": lambda one: one.update(name=""),
    "a number as name": lambda one: one.update(name=0),
    "a long name": lambda one: one.update(name="n" * 10**6),
    "a name with escapes": lambda one: one.update(name="\x1b[31m"),
    "half a character": lambda one: one.update(name="\ud800"),
    "no samples": lambda one: one.update(samples=0),
    "many samples": lambda one: one.update(samples=10**30),
    "negative samples": lambda one: one.update(samples=-45),
    "samples in words": lambda one: one.update(samples="45"),
    "other samples": lambda one: one.update(samples=44, class_counts=None),
    "counts that do not add up": lambda one: one.update(class_counts=[1, 2, 3, 4]),
    "no classes": lambda one: one.update(classes=[]),
    "classes in words": lambda one: one.update(classes="0123"),
    "unknown classes": lambda one: one.update(classes=["0", "1", "2", "\x1b"], class_counts=None),
    "another class": lambda one: one.update(classes=["0", "1", "2", "cat"]),
    "another version": lambda one: one.update(fedsieve="0\x1b[31m" + "0" * 10**6),
    "another torch": lambda one: one.update(torch="1.0"),
    "a version that is none": lambda one: one.update(files=None),
    "nothing": lambda one: one.clear(),
}


def test_what_a_node_says_of_itself(heads: FederationHere) -> None:
    node = heads.node(2)
    true = dict(node.about)
    for name, change in HELLOS.items():
        node.about.clear()
        node.about.update(true)
        change(node.about)
        with pytest.raises(InputError) as error:
            heads.run(*HEADS)
        said = str(error.value)
        assert "client-2" in said and said.isprintable() and len(said) < 400, (name, said)
        assert not (heads.place / "federated").exists()


def test_a_name_is_said_once(heads: FederationHere) -> None:
    heads.node(2).about["fedsieve"] = "0.0"
    with pytest.raises(InputError, match=r"^client-2: it has fedsieve 0\.0"):
        heads.run(*HEADS)


@pytest.mark.parametrize("number", [b"Infinity", b"NaN", b"1e999", b"45.0", b"true", b"null"])
def test_samples_that_are_no_number(heads: FederationHere, number: bytes) -> None:
    hello = json.dumps(heads.node(2).about | {"samples": 45, "class_counts": None}).encode()
    heads.link.stop("client-2")
    (heads.link.folder / "client-2").mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(heads.link.folder / "client-2" / SOCKET))
        listener.listen()
        reply = raw(hello.replace(b'"samples": 45', b'"samples": ' + number))
        threading.Thread(target=answer_all, args=(listener, whole(reply)), daemon=True).start()
        with pytest.raises(InputError, match=r"^client-2: it does not say who it is$"):
            heads.run(*HEADS)
        listener.shutdown(socket.SHUT_RDWR)


def answer_all(listener: socket.socket, reply: bytes) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(1)
                connection.sendall(reply)


@pytest.mark.parametrize(
    ("reply", "pattern"),
    [
        ({"refused": ESCAPES}, r"^node client-2: \\x1b\[31m redx+$"),
        ({"failed": None}, "^node client-2: None$"),
        (None, "^node client-2: it cannot be reached"),
    ],
)
def test_a_node_that_cannot_take_part(heads: FederationHere, reply: Any, pattern: str) -> None:
    heads.node(2).lie = lambda request, truth: reply and Frame(reply)
    with pytest.raises(InputError, match=pattern):
        heads.run(*HEADS)
    assert not (heads.place / "federated").exists()


@pytest.mark.parametrize(
    "facts", [None, [], {}, {"canary": None}, {"canary": [1], "cpu": ESCAPES, "torch": {}}, "facts", 5]
)
def test_other_last_bits_are_a_warning(heads: FederationHere, facts: Any) -> None:
    heads.node(2).lie = lambda request, reply: Frame({"facts": facts}) if request.header["do"] == "join" else reply
    (warning,) = told_by(heads, "phases.0.rounds=1").warnings
    assert warning.startswith("node client-2 computes other last bits than the server") and warning.isprintable()
    assert "the hash of a simulation" in warning and len(warning) < 500
