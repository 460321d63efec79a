"""Who may ask the SuperLink for what: the two guards before Flower's app, with an app that says yes to everything."""

import asyncio
from typing import Any

import httpx
import pytest

from fedsieve.federation import superlink
from fedsieve.federation.superlink import LARGEST_BODY, ForNodes, ForServer
from fedsieve.federation.superlink_folder import TOKEN_HEADER

KEY = {"flwr-public-key": "of-hospital-1"}


class Yes:
    """Answers all requests with the length of their body; some with 401, as Flower does if a signature is wrong."""

    status = 200

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.pieces: list[int] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            self.pieces.append(len(message["body"]))
            size, more = size + len(message["body"]), message.get("more_body", False)
        self.asked.append((scope["path"], size))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": str(size).encode()})


def asked(app: Any, path: str, headers: dict[str, str], content: Any = b"") -> int:
    async def ask() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://there") as client:
            return (await client.post(path, headers=headers, content=content)).status_code

    return asyncio.run(ask())


def test_nodes_reach_only_what_is_for_nodes() -> None:
    app, notes = Yes(), list[str]()
    guard = ForNodes(app, 1, {"of-hospital-1": "hospital-1"}, notes.append)
    assert asked(guard, "/v1/fleet/pull-messages", KEY, b"12345") == 200
    for path in ("/v1/control/start-run", "/v1/fleet/../control/start-run", "/", "/v1/fleet", "/docs", "//v1/fleet/x"):
        assert asked(guard, path, KEY) == 404
    for key in ({}, {"flwr-public-key": "of-nobody"}):
        assert asked(guard, "/v1/fleet/pull-messages", key) == 403
    assert app.asked == [("/v1/fleet/pull-messages", 5)]
    assert asked(ForNodes(app, 1, None, notes.append), "/v1/fleet/register-node", {}) == 200  # --insecure


async def endless(pieces: int) -> Any:
    for _ in range(pieces):
        yield b"0" * 1000


def test_bodies_are_limited_and_come_in_one_piece() -> None:
    app = Yes()
    guard = ForNodes(app, 100, {"of-hospital-1": "hospital-1"}, print)
    assert asked(guard, "/v1/fleet/push-object", KEY, b"0" * (LARGEST_BODY + 1)) == 413
    assert asked(guard, "/v1/fleet/push-object", KEY, endless(10)) == 413  # of a length that nobody knows
    assert asked(guard, "/v1/fleet/push-object", {**KEY, "content-length": "10000"}, endless(10)) == 200
    assert app.pieces == [10_000]


def test_a_node_that_sends_too_much_has_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    app, notes = Yes(), list[str]()
    names = {"of-hospital-1": "hospital-1", "of-hospital-2": "hospital-2"}
    guard = ForNodes(app, 1, names, notes.append)
    codes = [asked(guard, "/v1/fleet/push-object", KEY, b"0" * 400_000) for _ in range(5)]
    assert codes == [200, 200, 200, 429, 429]
    assert notes == ["hospital-1 sends more than 1 MB in a minute, and is refused until it is over"]
    assert asked(guard, "/v1/fleet/push-object", {"flwr-public-key": "of-hospital-2"}, b"0" * 400_000) == 200
    monkeypatch.setattr(superlink, "MINUTE", 0.0)
    assert asked(guard, "/v1/fleet/push-object", KEY, b"0" * 400_000) == 200


def test_nobody_can_use_up_what_another_node_may_send() -> None:
    """Requests with a wrong signature, which Flower refuses, do not count."""
    app = Yes()
    guard = ForNodes(app, 1, {"of-hospital-1": "hospital-1"}, print)
    app.status = 401
    assert {asked(guard, "/v1/fleet/push-object", KEY, b"0" * 400_000) for _ in range(5)} == {401}
    app.status = 200
    assert asked(guard, "/v1/fleet/push-object", KEY, b"0" * 400_000) == 200


def test_the_server_has_to_know_the_secret() -> None:
    app = Yes()
    guard = ForServer(app, "secret")
    for headers in ({}, {TOKEN_HEADER: ""}, {TOKEN_HEADER: "secre"}, {TOKEN_HEADER: "secrets"}):
        assert asked(guard, "/v1/control/start-run", headers) == 403
    assert not app.asked
    assert asked(guard, "/v1/control/start-run", {TOKEN_HEADER: "secret"}, b"123") == 200
    assert app.asked == [("/v1/control/start-run", 3)]
