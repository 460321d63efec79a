"""What the SuperLink and the server refuse, over real connections with TLS and keys."""

import hashlib
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fedsieve.errors import InputError
from fedsieve.experiment import run
from fedsieve.federation.keys import make_key, read_private_key
from fedsieve.federation.socket_frames import Frame
from fedsieve.federation.superlink_folder import TOKEN_HEADER, SuperLinkFolder
from flower_here import Acting, FlowerHere, wait_until
from small_runs import outcome

flwr = pytest.importorskip("flwr", reason="needs Flower: pip install 'fedsieve[flower]'")
pytestmark = pytest.mark.engines

ROGUE = "client-4"


def relay(flower: FlowerHere, *more: str, place: str | None = None) -> tuple[int, str]:
    """Exit code and error of a relay that should not be let in."""
    command = ["relay", "start", "--superlink", place or flower.loopback.place, "--node", "nowhere", *more]
    done = subprocess.run([sys.executable, "-m", "fedsieve", *command], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_without_a_registered_key_a_node_gets_nothing(flower: FlowerHere, tmp_path: Path) -> None:
    make_key(tmp_path / "stranger")
    authority = str(flower.loopback.superlink.files[0])
    code, said = relay(flower, "--ca", authority, "--key", str(tmp_path / "stranger"))
    assert code == 2 and said.count("\n") == 1
    assert "does not know this key (HTTP 403); have the public key registered there: fedsieve superlink add" in said


def test_a_server_with_another_certificate_is_not_believed(flower: FlowerHere, tmp_path: Path) -> None:
    other = SuperLinkFolder.make(tmp_path / "other", ["127.0.0.1"])
    key = str(flower.loopback.folder / "keys" / ROGUE)
    code, said = relay(flower, "--ca", str(other.files[0]), "--key", key)
    assert code == 2 and said.count("\n") == 1
    assert f"is not of the authority in {other.files[0]}; get the ca.crt of that server" in said


def test_a_server_under_another_name_is_not_believed(flower: FlowerHere) -> None:
    key = str(flower.loopback.folder / "keys" / ROGUE)
    place = flower.loopback.place.replace("127.0.0.1", "127.0.0.2")
    authority = str(flower.loopback.superlink.files[0])
    code, said = relay(flower, "--ca", authority, "--key", key, place=place)
    assert code == 2 and said.count("\n") == 1  # nobody listens there, or not under this name
    assert "does not answer" in said or "is for another name" in said


def test_a_relay_without_encryption_is_told_so(flower: FlowerHere) -> None:
    code, said = relay(flower, "--insecure")
    assert code == 2 and "wants TLS; give --ca and --key" in said


def test_only_what_is_for_nodes_is_at_the_nodes_port(flower: FlowerHere) -> None:
    authority = str(flower.loopback.superlink.files[0])
    with httpx.Client(verify=authority, base_url=f"https://{flower.loopback.place}") as client:
        for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/v1/health", "/openapi.json"):
            assert client.post(path, content=b"").status_code == 404
        assert client.post("/v1/fleet/pull-messages", content=b"").status_code == 403


def test_the_servers_port_asks_for_the_secret(flower: FlowerHere) -> None:
    loopback = flower.loopback
    with httpx.Client(base_url=f"http://127.0.0.1:{loopback.ports[1]}") as client:
        for token in ("", "0" * 64, loopback.superlink.token[:-1]):
            assert client.get("/docs", headers={TOKEN_HEADER: token}).status_code == 403
        assert client.get("/docs", headers={TOKEN_HEADER: loopback.superlink.token}).status_code == 200
    assert (loopback.superlink.path / "token").stat().st_mode & 0o077 == 0


def test_another_folder_s_secret(flower: FlowerHere, tmp_path: Path) -> None:
    other = SuperLinkFolder.make(tmp_path / "other", ["127.0.0.1"])
    engine = flower.loopback.engine.replace(str(flower.loopback.superlink.path), str(other.path))
    with pytest.raises(InputError, match="was started with another folder"):
        run(flower.experiment("clients.count=5", engine), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_key_that_is_not_registered_any_more(flower: FlowerHere) -> None:
    """Its relay is put out within seconds, and comes back when the key is registered again."""
    loopback = flower.loopback
    said = lambda text: text in loopback.said(f"relay {ROGUE}").read_text()  # noqa: E731
    loopback.superlink.remove(ROGUE)
    try:
        wait_until(lambda: said("trying again"))
    finally:
        loopback.superlink.add(loopback.folder / "keys" / f"{ROGUE}.pub")
    wait_until(lambda: said("the SuperLink is back"))


def test_a_node_that_tells_another_name(flower: FlowerHere, tmp_path: Path) -> None:
    loopback, name = flower.loopback, "client-3"
    loopback.kill(f"node {ROGUE}")
    place = str(loopback.folder / "nodes" / ROGUE)
    data = str(loopback.clients[ROGUE])
    try:
        loopback.start_process(f"node {ROGUE}", "node", "--data", data, "--name", name, "--folder", place)
        loopback.wait_for(f"node {ROGUE}", "ready at")
        with pytest.raises(InputError, match=f"{ROGUE}: {name}: its key is registered for {ROGUE}"):
            run(flower.settings(), tmp_path / "run")
    finally:
        loopback.kill(f"node {ROGUE}")
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------------------- a relay that lies


Lie = Callable[[Any, Frame, Any], Any]  # of the request, the true reply and arrays for its blobs: what is sent


@contextmanager
def rogue(flower: FlowerHere, lies: dict[int, Lie]) -> Iterator[None]:
    """Takes the place of a client's relay, and lies in some rounds of training. A lie is the content of a reply."""
    from flwr.app import Message

    from fedsieve.federation.flower_content import Arrays
    from fedsieve.federation.links import SOCKET
    from fedsieve.federation.relay import FleetConnection, Relay

    class Rogue(Relay):
        rounds = 0

        def _asked(self, request: Frame, until: float) -> Frame:
            self.rounds += request.header["do"] == "train"
            self.is_training = request.header["do"] == "train"
            return super()._asked(request, until)

    loopback = flower.loopback
    process = loopback.processes.pop(f"relay {ROGUE}")
    process.terminate()
    process.wait()
    superlink = FleetConnection.at(
        loopback.place, loopback.superlink.files[0], read_private_key(loopback.folder / "keys" / ROGUE)
    )
    one = Rogue(superlink, loopback.folder / "nodes" / ROGUE / SOCKET, 1 << 30, print)
    truth = superlink.reply

    def reply(request: Message, frame: Frame) -> None:
        if one.is_training and (lie := lies.get(one.rounds)) is not None:
            request.__dict__["superlink"] = superlink
            if (content := lie(request, frame, Arrays())) is not None:  # else it has sent something already
                superlink.reply_with(request, content)
        else:
            truth(request, frame)

    superlink.reply = reply  # type: ignore[method-assign]
    one.begin()
    thread = threading.Thread(target=one.run)
    thread.start()
    try:
        yield
    finally:
        one.stop()
        thread.join()


def test_replies_that_are_refused(flower: FlowerHere, tmp_path: Path) -> None:
    """Each costs its sender the round, with a reason that names it; the others go on."""
    from flwr.app import ConfigRecord, RecordDict

    from fedsieve.federation.flower_content import content_of

    large = bytes(range(256)) * (400 << 10)  # 105 MB, of one piece of 5 MB that stands there 20 times
    earlier = list[Frame]()

    def keep(request: Any, frame: Frame, arrays: Any) -> Any:
        earlier.append(frame)
        return content_of(frame, arrays)

    def misnumbered(request: Any, frame: Frame, arrays: Any) -> Any:
        request.metadata.__dict__["_group_id"] = "0" * 32
        return content_of(frame, arrays)

    many = [large[one : one + (70 << 10)] + bytes([one]) for one in range(40)]
    lies: dict[int, Lie] = {
        1: keep,
        2: lambda request, frame, arrays: content_of(earlier[0], arrays),
        3: misnumbered,
        4: lambda request, frame, arrays: RecordDict({"other": ConfigRecord({"a": 1})}),
        5: lambda request, frame, arrays: content_of(Frame(frame.header, [large]), arrays),
        6: lambda request, frame, arrays: content_of(Frame(frame.header, many), arrays),
        7: lambda request, frame, arrays: RecordDict({"frame": ConfigRecord({"header": 2, "small": 3})}),
    }
    listener = Acting({})
    with rogue(flower, lies):
        run(flower.settings("phases.0.rounds=8", "phases.1.rounds=1"), tmp_path / "run", callback=listener)
    reasons = [line["failed"].get(4, "") for line in listener.lines]
    expected = [
        "",
        "of another client or another round",
        "it replies to another request",
        "the message is no frame",
        "bytes that are allowed",
        "parts, which is more than",
        "the message is no frame",
        "",
        "",
    ]
    assert [text for text, reason in zip(expected, reasons, strict=True) if text not in reason] == [], reasons
    assert [set(line["failed"]) for line in listener.lines] == [{4} if text else set() for text in expected]


def test_a_relay_that_says_the_truth_is_as_good_as_any(flower: FlowerHere, tmp_path: Path) -> None:
    expected = flower.simulated(tmp_path / "one")
    with rogue(flower, {}):
        result = run(flower.settings(), tmp_path / "two")
    assert outcome(tmp_path / "one", expected) == outcome(tmp_path / "two", result)


def unfolding(levels: int, each: int) -> list[Any]:
    """A few kilobytes of tree that unfold to `each` ** `levels` objects: nodes may be named in place of others."""
    from flwr.proto.message_pb2 import ObjectTree

    names = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(levels + 1)]
    inner = [
        ObjectTree(object_id=name, children=each * [ObjectTree(object_id=below)])
        for below, name in itertools.pairwise(names)
    ]
    return [ObjectTree(object_id=names[0]), *inner]


@pytest.mark.parametrize(("levels", "each"), [(150, 1), (40, 2)])
def test_a_reply_of_too_many_objects_costs_only_its_sender(
    flower: FlowerHere, tmp_path: Path, levels: int, each: int
) -> None:
    from flwr.app import Message
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import ObjectTree

    from fedsieve.federation.flower_content import content_of, outgoing

    def announce(request: Any, frame: Frame, arrays: Any) -> Any:
        batch = outgoing([Message(content_of(frame, arrays), reply_to=request)])
        tree = ObjectTree(object_id=batch.trees[0].object_id, children=unfolding(levels, each))
        superlink = request.__dict__["superlink"]
        superlink.client.PushMessages(
            PushMessagesRequest(node=superlink.node, messages_list=batch.messages, message_object_trees=[tree])
        )

    listener = Acting({})
    with rogue(flower, {1: announce}):
        run(flower.settings("phases.1.rounds=1", timeout=15), tmp_path / "run", callback=listener)
    assert [set(line["failed"]) for line in listener.lines] == [{4}, set(), set(), set()]
    assert listener.lines[0]["failed"][4] in ("there was no reply in time", "it did not reply within 15 s")


def test_a_node_that_sends_its_reply_slowly_holds_up_nobody_else(flower: FlowerHere, tmp_path: Path) -> None:
    """What it has announced and not sent is given up when its time is over."""
    from flwr.app import Message
    from flwr.proto.fleet_pb2 import PushMessagesRequest

    from fedsieve.federation.flower_content import content_of, outgoing

    def announce(request: Any, frame: Frame, arrays: Any) -> Any:
        superlink = request.__dict__["superlink"]
        batch = outgoing([Message(content_of(frame, arrays), reply_to=request)])
        superlink.client.PushMessages(
            PushMessagesRequest(node=superlink.node, messages_list=batch.messages, message_object_trees=batch.trees)
        )

    listener = Acting({})
    with rogue(flower, {1: announce}):
        run(flower.settings("phases.1.rounds=1", timeout=6), tmp_path / "run", callback=listener)
    assert [set(line["failed"]) for line in listener.lines] == [{4}, set(), set(), set()]
    assert listener.lines[0]["seconds"] < 20
