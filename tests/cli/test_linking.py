"""`fedsieve superlink` and `fedsieve relay`: what they print, and one line for whatever is wrong."""

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsieve.federation.flower_run import NOBODY

Command = Callable[..., tuple[int, str, str]]


def refused(found: tuple[int, str, str]) -> str:
    code, _, error = found
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


def test_from_a_key_to_its_registration(fedsieve: Command) -> None:
    code, said, _ = fedsieve("superlink", "make", "there", "--host", "fl.example.org", "--host", "10.0.0.7")
    assert code == 0 and "give there/ca.crt to the owners of the nodes" in said
    code, said, _ = fedsieve("relay", "key", "hospital-3")
    assert code == 0 and "send hospital-3.pub to the owner of the server" in said
    key = said.partition("the key ")[2].partition("\n")[0]
    assert fedsieve("superlink", "add", "there", "hospital-3.pub") == (
        0,
        f"hospital-3 may join, with the key {key}\n",
        "",
    )
    assert fedsieve("superlink", "remove", "there", "hospital-3") == (0, "hospital-3 may not join any more\n", "")


def test_folders_and_keys_that_do_not_fit(fedsieve: Command) -> None:
    fedsieve("superlink", "make", "there", "--host", "localhost")
    fedsieve("relay", "key", "one")
    assert "there is there already" in refused(fedsieve("superlink", "make", "there", "--host", "localhost"))
    assert "one.pub is there already" in refused(fedsieve("relay", "key", "one"))
    assert "is no folder of a SuperLink" in refused(fedsieve("superlink", "add", "elsewhere", "one.pub"))
    assert "is no public key" in refused(fedsieve("superlink", "add", "there", "one"))
    assert "cannot be read" in refused(fedsieve("superlink", "add", "there", "two.pub"))
    assert "no node is called one" in refused(fedsieve("superlink", "remove", "there", "one"))
    assert sorted(path.name for path in Path().iterdir()) == ["one", "one.pub", "there"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--superlink", "localhost"], "is not HOST:PORT; use one such as fl.example.org:9092"),
        ([], "give --ca, the server's ca.crt, and --key"),
        (["--ca", "there/ca.crt"], "give --ca, the server's ca.crt, and --key"),
        (["--insecure", "--key", "one"], "--insecure uses neither --ca nor --key"),
        (["--ca", "none", "--key", "one"], "--ca none is no file; get ca.crt from the owner of the server"),
        (["--ca", "one", "--key", "one"], "--ca one is no certificate"),
        (["--ca", "there/ca.crt", "--key", "none"], "--key none cannot be read"),
        (["--ca", "there/ca.crt", "--key", "one.pub"], "--key one.pub is no private key"),
        (
            ["--ca", "there/ca.crt", "--key", "one"],
            "does not answer ([Errno 111] Connection refused); see that it runs",
        ),
        (["--insecure"], "does not answer ([Errno 111] Connection refused); see that it runs"),
    ],
)
def test_relays_that_cannot_start(fedsieve: Command, arguments: list[str], reason: str) -> None:
    fedsieve("superlink", "make", "there", "--host", "localhost")
    fedsieve("relay", "key", "one")
    with socket.socket() as nobody:  # a port at which nobody listens
        nobody.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{nobody.getsockname()[1]}"
        found = fedsieve("relay", "start", "--node", "node", "--superlink", place, *arguments)
    assert reason in refused(found)


def test_a_port_that_is_taken(fedsieve: Command) -> None:
    fedsieve("superlink", "make", "there", "--host", "localhost")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused(fedsieve("superlink", "start", "there", "--port", port))
    assert f"cannot listen at 127.0.0.1:{port} (Address already in use); end what listens there" in said


def test_a_run_without_a_superlink(fedsieve: Command, file: Path) -> None:
    said = refused(fedsieve("run", str(file), "engine=flower", "--out", "out"))
    assert "superlink is no folder of a SuperLink; make one: fedsieve superlink make superlink" in said
    fedsieve("superlink", "make", "superlink", "--host", "localhost")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{nobody.getsockname()[1]}"
        said = refused(fedsieve("run", str(file), f"engine={{flower: {{superlink: '{place}'}}}}", "--out", "out"))
    assert said == f"error: {NOBODY.format(place, '[Errno 111] Connection refused', 'superlink')}\n"
    assert not Path("out").exists()


def test_without_flower_one_is_told_what_to_install(
    fedsieve: Command, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fedsieve("superlink", "make", "superlink", "--host", "localhost")
    fedsieve("relay", "key", "one")
    for name in [name for name in sys.modules if name.partition(".")[0] == "flwr" or "federation.flower" in name]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("fedsieve.federation.relay", "fedsieve.federation.superlink"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "flwr", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    relay = ["relay", "start", "--node", "node", "--superlink", "there:1", "--ca", "superlink/ca.crt", "--key", "one"]
    for arguments in (["run", str(file), "engine=flower"], relay, ["superlink", "start", "superlink"]):
        assert "needs Flower 1.41, which is not installed" in refused(fedsieve(*arguments))
