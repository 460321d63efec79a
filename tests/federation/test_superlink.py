"""Who may ask the SuperLink for what: the two guards before Flower's app, with an app that says yes to everything."""

import asyncio
from typing import Any

import httpx
import pytest

from fedsieve.federation import superlink
from fedsieve.federation.superlink import LARGEST_BODY, LARGEST_TREE, ForNodes, ForServer, bound_trees, is_reply
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


def test_a_node_may_push_its_own_replies_only() -> None:
    fleet = pytest.importorskip("flwr.proto.fleet_pb2")
    message = pytest.importorskip("flwr.proto.message_pb2")
    node = pytest.importorskip("flwr.proto.node_pb2")

    def pushed(source: int, reply_to: str) -> bytes:
        about = message.Metadata(src_node_id=source, reply_to_message_id=reply_to)
        return fleet.PushMessagesRequest(
            node=node.Node(node_id=7), messages_list=[message.Message(metadata=about)]
        ).SerializeToString()

    assert is_reply(pushed(7, "a"))
    assert not is_reply(pushed(1, "a")) and not is_reply(pushed(7, "")) and not is_reply(b"\xff\xff")
    app, names = Yes(), {"of-hospital-1": "hospital-1"}
    guard = ForNodes(app, 100, names, print)
    assert asked(guard, "/v1/fleet/push-messages", KEY, pushed(1, "")) == 403 and not app.asked
    assert asked(guard, "/v1/fleet/push-messages", KEY, pushed(7, "a")) == 200


@pytest.mark.parametrize(("levels", "each", "is_fine"), [(4, 2, True), (6, 1, True), (12, 1, False), (60, 2, False)])
def test_trees_that_unfold_to_too_much_are_treated_as_missing(levels: int, each: int, is_fine: bool) -> None:
    stores = pytest.importorskip("flwr.supercore.object_store.in_memory_object_store")
    store = stores.InMemoryObjectStore()
    names = [f"{number:064x}" for number in range(levels + 1)]
    for number, name in enumerate(names):
        below = each * [names[number - 1]] if number else []
        store.store[name] = stores.ObjectEntry(b"", False, below, 0, set())
    bound_trees(store)
    if is_fine:
        assert store.get_object_tree(names[-1]).object_id == names[-1]
    else:
        with pytest.raises(stores.NoObjectInStoreError, match="too deep or too large"):
            store.get_object_tree(names[-1])
    assert LARGEST_TREE >= 16e9 / 5e6  # for the largest message that there may be


def test_nothing_but_http_is_answered() -> None:
    sent = list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    app = Yes()
    for guard in (ForNodes(app, 1, None, print), ForServer(app, "secret")):
        asyncio.run(guard({"type": "websocket", "path": "/v1/fleet/x", "headers": []}, receive, send))
    assert not app.asked and [one["status"] for one in sent if "status" in one] == [404, 403]
