"""Bad addresses, and a machine without Ray: one line, soon, and nothing is written."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fedsieve.engine.ray_connection import must_answer
from fedsieve.errors import InputError


def test_the_extra_is_not_installed(
    fedsieve: Callable, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails
    for command in (["run", str(file), "engine={ray: {}}", "--out", str(tmp_path / "run")], ["cluster", "check"]):
        code, out, error = fedsieve(*command)
        assert (code, out) == (2, "") and "pip install 'fedsieve[ray]'" in error
        assert error.startswith("error: engine: ray needs Ray, which is not installed") and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.fixture
def listening() -> Iterator[Callable[[bytes | None], str]]:
    """A server that answers with some bytes, or with nothing, to whoever says something."""
    servers = list[socket.socket]()

    def listen(answer: bytes | None) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def serve() -> None:
            with suppress(OSError):
                line, _ = server.accept()
                line.recv(100)
                if answer is not None:
                    line.sendall(answer)
                    line.close()
                else:
                    line.recv(100)

        threading.Thread(target=serve, daemon=True).start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield listen
    for server in servers:
        server.close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what answers there is not Ray"),
        (b"", "what answers there is not Ray"),
        (None, "nothing answers there"),
    ],
)
def test_whoever_answers_is_not_ray(answer: bytes | None, said: str, listening: Callable) -> None:
    address, started = listening(answer), time.monotonic()
    with pytest.raises(InputError, match=f"engine.ray.address: {address}: {said}; give the HOST:PORT"):
        must_answer(address)
    assert time.monotonic() < started + 15


def test_nobody_answers() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(InputError, match="Connection refused; give the HOST:PORT"):
            must_answer(f"127.0.0.1:{one.getsockname()[1]}")


@pytest.mark.parametrize(
    "address", ["node1..cluster:6379", "a" * 70 + ":6379", "127.0.0.1:99999", "no.such.host.invalid:1"]
)
def test_addresses_that_cannot_be(address: str) -> None:
    with pytest.raises(InputError, match="give the HOST:PORT that `ray start --head` printed"):
        must_answer(address)


@pytest.mark.parametrize("address", ["nonsense", "host", "host:port", "ray://host:10001", "http://host:1", ":1"])
def test_an_address_that_is_none(fedsieve: Callable, address: str) -> None:
    code, _, error = fedsieve("cluster", "check", "--address", address)
    assert code == 2 and "engine.ray.address: use null (a private cluster), auto" in error
