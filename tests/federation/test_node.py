"""What a node does with requests that it should not obey; each is answered in one line."""

import socket
import stat
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from federation_nodes import Acting, FederationHere, LocalNode
from fedsieve.config.experiment_file import parse_experiment
from fedsieve.config.plugins import used
from fedsieve.errors import InputError
from fedsieve.federation.node import Node, NodeSetup
from fedsieve.federation.owner import Owner
from fedsieve.federation.socket_frames import LENGTH, MAGIC, START, Frame, receive, send
from listeners import interrupt
from small_runs import edit, outcome

OWN = ["clients.count=4", "clients.fraction=1.0", edit("scope: client", more=", optimizer_state: carry")]
HEADS = [
    "clients.count=4",
    "clients.fraction=1.0",
    "phases=[{name: head, train: head, rounds: 2, local: {steps: 2, lr: 0.05}}]",
]


def last(node: LocalNode, do: str) -> Frame:
    """The newest request to do something."""
    return next(one for one in reversed(node.asked) if one.header["do"] == do)


def answer(node: LocalNode, request: Frame) -> str:
    """Why it does not do that."""
    header = node._answered(request).header
    (reason,) = [header[key] for key in ("refused", "failed") if key in header] or [header["about"]["failed"]]
    assert isinstance(reason, str) and reason.isprintable() and len(reason) < 400
    return reason


@pytest.fixture
def midway(federation: FederationHere) -> LocalNode:
    """A node after the second round of three."""
    federation.begin(*OWN)
    with pytest.raises(KeyboardInterrupt):
        federation.run(*OWN, callback=interrupt(2))
    return federation.node(1)


def changed(request: Frame, **about: Any) -> Frame:
    return Frame({**request.header, "about": {**request.header["about"], **about}}, request.blobs)


REQUESTS: dict[str, tuple[Callable[[Frame], Frame], str]] = {
    "another client's": (lambda one: changed(one, client=0), "another client; this is client 1"),
    "a client in words": (lambda one: changed(one, client="1"), "another client"),
    "an unknown job": (lambda one: Frame({**one.header, "do": "run_code"}, one.blobs), "it does not do 'run_code'"),
    "a job with escapes": (lambda one: Frame({**one.header, "do": "\x1b[31m" * 99}, one.blobs), "it does not do"),
    "a job of the server": (lambda one: Frame({**one.header, "do": "outputs"}, one.blobs), "it does not do 'outputs'"),
    "no job": (lambda one: Frame({**one.header, "do": None}, one.blobs), "it does not do 'None'"),
    "an unknown phase": (lambda one: changed(one, phase=2), "no such phase"),
    "a phase from the end": (lambda one: changed(one, phase=-1), "no such phase"),
    "half a phase": (lambda one: changed(one, phase=0.5), "no such phase"),
    "a round too many": (lambda one: changed(one, round=3, version=4), "no such round; the phase has 2"),
    "round 0": (lambda one: changed(one, round=0), "no such round"),
    "a round in words": (lambda one: changed(one, round="1"), "no such round"),
    "too few rounds so far": (lambda one: changed(one, round=2, version=1), "rounds so far cannot be true"),
    "too many rounds so far": (lambda one: changed(one, round=2, version=9), "rounds so far cannot be true"),
    "no rounds so far": (lambda one: changed(one, version=None), "rounds so far cannot be true"),
    "a state that it does not know": (lambda one: changed(one, memory=7), "what it remembered in round 7 is gone"),
    "a state at a path": (lambda one: changed(one, memory="../../x"), ""),
    "known states that are none": (lambda one: changed(one, known=[1]), ""),
    "a state of another digest": (lambda one: changed(one, memory=1, known={"1": "0" * 32}), "is gone or was changed"),
    "a secret that was not agreed": (
        lambda one: changed(one, secret={"place": "here", "participants": 3, "keys": {}}),
        "its key for this round was used already, or never made",
    ),
    "no run": (lambda one: Frame({key: one.header[key] for key in one.header if key != "run"}, one.blobs), "no run"),
    "a run at a path": (lambda one: Frame({**one.header, "run": "../" * 10 + "ab"}, one.blobs), "no run"),
    "to join at a path": (lambda one: Frame({**one.header, "do": "join", "run": "/tmp/run"}), "no run"),
    "to end at a path": (lambda one: Frame({"do": "end", "run": ".."}), "no run"),
    "no messages": (lambda one: Frame({**one.header, "messages": []}, one.blobs), ""),
    "no blobs": (lambda one: Frame(one.header), ""),
    "an unknown topic": (lambda one: topic(one, "code"), "a message is about 'code'"),
    "a shared mask": (lambda one: topic(one, "mask"), ""),
    "keys": (lambda one: topic(one, "keys"), ""),
    "a start": (lambda one: topic(one, "start"), ""),
    "an extra": (lambda one: topic(one, "extra:../x"), ""),
    "a message that is damaged": (lambda one: damaged(one), "checksum"),
    "nothing": (lambda one: Frame({"run": one.header["run"]}), "about"),
}


def topic(request: Frame, name: str) -> Frame:
    return Frame({**request.header, "messages": [{"topic": name, "since": None}]}, request.blobs)


def damaged(request: Frame) -> Frame:
    data = bytearray(request.blobs[0])
    data[len(data) // 2] ^= 1
    return Frame(request.header, [data])


def tree(*folders: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for one in folders for path in one.rglob("*") if path.is_file()}


def test_requests_that_are_wrong(midway: LocalNode, federation: FederationHere) -> None:
    """None of them changes a file, and the run goes on to the simulation's model."""
    request = deepcopy(last(midway, "train"))
    before = tree(federation.place, midway.setup.folder)
    for name, (change, expected) in REQUESTS.items():
        assert expected in answer(midway, change(deepcopy(request))), name
        states = [path.name for path in midway.setup.folder.rglob("client-*")]
        assert {path: before[path] for path in before if path.exists() and "clients" not in path.parts} == {
            path: content
            for path, content in tree(federation.place, midway.setup.folder).items()
            if "clients" not in path.parts
        }, name
        assert len(states) < 10
    result = federation.run(*OWN, resume=True)
    expected_result = federation.simulate(*OWN)
    assert result["model_sha256"] == expected_result["model_sha256"]


def test_what_a_job_does_not_need_is_ignored(midway: LocalNode) -> None:
    request = last(midway, "train")
    more = changed(request, file="/etc/passwd", folder="..", code="raise SystemExit")
    again = Frame({**more.header, "plugins": ["x.py"], "experiment": "seed: 1"}, more.blobs)
    first, second = midway._answered(request), midway._answered(again)
    assert (first.header, bytes(first.blobs[0])) == (second.header, bytes(second.blobs[0]))


def test_another_run_is_not_known(midway: LocalNode) -> None:
    request = last(midway, "train")
    other = Frame({**request.header, "run": "0" * 32}, request.blobs)
    assert midway._answered(other).header == {"lacks": "run"}
    assert midway._answered(Frame({"do": "end", "run": "0" * 32})).header == {"lacks": "run"}
    stale = Frame({**request.header, "messages": [], "version": 99})
    assert midway._answered(stale).header == {"lacks": "weights"}


def test_end_deletes_the_folder_of_the_run_alone(midway: LocalNode) -> None:
    runs = midway.setup.folder / "runs"
    (runs / ("a" * 32)).mkdir()
    assert len(list(runs.iterdir())) == 2
    assert midway._answered(Frame({"do": "end", "run": midway.run_id})).header == {}
    assert [path.name for path in runs.iterdir()] == ["a" * 32]


# ------------------------------------------------------------------------------------------ joining


def test_joining_as_another_client(midway: LocalNode) -> None:
    request = last(midway, "join")
    for client in (0, 2, -3, 4, 10**30):
        said = answer(midway, Frame({**request.header, "client": client}))
        assert said == f"the server says that it is client {client}, which is another one"
    for key in ("client", "experiment", "federation", "plugins", "start"):
        assert answer(midway, Frame({name: one for name, one in request.header.items() if name != key}))
    for key, value in {"federation": "{", "experiment": "phases: [", "plugins": 5, "client": "x"}.items():
        assert answer(midway, Frame({**request.header, key: value})), key
    assert "begins with other weights" in answer(midway, Frame({**request.header, "start": "0" * 32}))
    assert "facts" in midway._answered(request).header


PLACES = [
    "model.backbone=/etc/passwd",
    "model.backbone=../tiny.safetensors",
    "model.backbone=~/tiny.safetensors",
    "model.backbone=tiny.pth",
    "model.init=/tmp/run",
    "model.init=run",
]


@pytest.mark.parametrize("place", PLACES)
def test_no_file_is_opened_that_the_server_names(federation: FederationHere, place: str) -> None:
    federation.begin(*HEADS)
    with pytest.raises(KeyboardInterrupt):
        federation.run(*HEADS, callback=interrupt(1))
    request = last(federation.node(1), "join")
    text = parse_experiment(request.header["experiment"], "it", [place]).to_yaml()
    key = place.partition("=")[0].removeprefix("model.")
    node = federation.again("client-1", **({"backbone": None} if key == "backbone" else {}))
    expected = f"it does not know where its file for model.{key} lies; start it with --{key} FILE"
    assert answer(node, Frame({**request.header, "experiment": text})) == expected


def test_paths_of_the_server_do_not_matter(federation: FederationHere, images: Path, tmp_path: Path) -> None:
    """Its data, its trackers and its engine: a node has its own."""
    expected = federation.simulate(*HEADS)
    federation.begin(*HEADS)
    moved = tmp_path / "elsewhere.npz"
    here = federation.run(*HEADS, f"data.path={moved}", "track=[tensorboard]", "workers=2")
    assert here["model_sha256"] == expected["model_sha256"]
    seen = [str(path) for path in federation.link.folder.rglob("*") if "cache" not in path.parts]
    assert not [path for path in seen if "tensorboard" in path or "events" in path]


def test_a_backbone_with_other_weights(federation: FederationHere, tmp_path: Path, backbone: Path) -> None:
    tensors = load_file(backbone)
    tensors["norm.bias"] = tensors["norm.bias"] + 1
    save_file(tensors, tmp_path / "other.safetensors")
    federation.begin(*HEADS)
    federation.again("client-2", backbone=str(tmp_path / "other.safetensors"))
    with pytest.raises(
        InputError, match=r"^node client-2: its model begins with other weights than the server's; give"
    ):
        federation.run(*HEADS)


# ------------------------------------------------------------------------------------------ plugins

ALTERNATING = """
import fedsieve
import torch

@fedsieve.rule
def alternating(evidence):
    return (torch.arange(evidence.weights.numel()) % 2).float().view(evidence.weights.shape)
"""


def test_plugins_are_the_owners(federation: FederationHere, tmp_path: Path) -> None:
    """None is taken from the server; a node has its own file, and it must be the same."""
    plugin = tmp_path / "alternating.py"
    plugin.write_text(ALTERNATING, encoding="utf-8")
    rule = ["clients.count=3", "clients.fraction=1.0", f"plugins=[{plugin}]", edit("rule: alternating, scope: client")]
    expected = federation.simulate(*rule)
    federation.begin("clients.count=3")
    missing = "needs the plugin alternating.py, and no code is taken from the server; get it from somebody you trust"
    with pytest.raises(InputError, match=missing):
        federation.run(*rule)
    other = tmp_path / "other" / plugin.name
    other.parent.mkdir()
    other.write_text(ALTERNATING + "# changed\n", encoding="utf-8")
    node = federation.again("client-1", plugins=(str(other),))
    with (
        used((str(other),)),
        pytest.raises(InputError, match=r"its plugin alternating.py is not the same as the server"),
    ):
        node._experiment(federation.experiment(*rule).to_yaml(), {plugin.name: "0" * 64})
    for client in range(3):
        federation.again(f"client-{client}", plugins=(str(plugin),))
    assert federation.run(*rule)["model_sha256"] == expected["model_sha256"]


# ----------------------------------------------------------------------------------------- its socket


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_socket_is_for_the_owner_and_the_group(federation: FederationHere) -> None:
    federation.begin(*HEADS)
    folder = federation.node(0).setup.folder
    assert mode(folder) == 0o710
    assert mode(folder / "runs") == 0o700
    assert mode(folder / "node.sock") == 0o660


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "this is no frame"),
        (
            START.pack(MAGIC, 2, 2) + LENGTH.pack(600) + LENGTH.pack(500) + b"{}",
            "has 1,100 bytes, and 1,000 are allowed",
        ),
        (START.pack(MAGIC, 2, 1) + LENGTH.pack(2**63) + b"{}", "1,000 are allowed"),
        (START.pack(MAGIC, 2, 0) + b"[]", "no JSON object"),
    ],
)
def test_bytes_that_are_no_request(federation: FederationHere, sent: bytes, reason: str) -> None:
    """They are refused, and the next connection is served."""
    federation.export(*HEADS)
    node = federation.start("client-0", owner=Owner(message=1000))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(node.setup.socket))
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert reason in receive(connection).header["refused"]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(node.setup.socket))
        for _ in range(2):
            send(connection, Frame({"do": "hello"}))
            assert receive(connection).header == node.about


def test_one_process_for_each_folder(federation: FederationHere) -> None:
    federation.begin(*HEADS)
    setup = federation.node(0).setup
    with pytest.raises(InputError, match=r"client-0 is in use by another node; give each its own"):
        Node(setup)
    federation.link.stop("client-0")
    Node(NodeSetup("client-0", setup.data, setup.folder)).close()


def test_two_servers_one_after_another(federation: FederationHere) -> None:
    """A node takes part in one run at a time, in the one that asked last."""
    expected = federation.simulate(*OWN)
    federation.begin(*OWN)

    def other() -> None:
        with pytest.raises(KeyboardInterrupt):
            federation.run(*OWN, out="other", callback=interrupt(1))

    first = federation.run(*OWN, callback=Acting({2: other}))
    assert outcome(federation.place / "federated", first) == outcome(federation.place / "simulated", expected)
    second = federation.run(*OWN, out="other", resume=True)
    assert outcome(federation.place / "other", second) == outcome(federation.place / "simulated", expected)
