"""A run at the SuperLink, which fedsieve's server takes over as a ServerApp would. Nothing is executed there."""

import io
import threading
import zipfile
from contextlib import suppress

import httpx
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    GetNodesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.runtime import RuntimeHttpClient

from fedsieve.errors import InputError, RunError
from fedsieve.federation.superlink_folder import TOKEN_HEADER, SuperLinkFolder

HEARTBEAT = 10.0  # seconds
NOBODY = "the SuperLink at {} does not answer ({}); start it with `fedsieve superlink start {}`"
APP = """
[project]
name = "fedsieve"
version = "1.0.0"
[tool.flwr.app]
publisher = "fedsieve"
[tool.flwr.app.components]
serverapp = "nothing:app"
clientapp = "nothing:app"
"""  # what Flower wants of each run; there is no such module, and nobody executes it


class Secret:
    """Adds the secret of the SuperLink's folder to each request."""

    def __init__(self, token: str) -> None:
        self.token = token

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers[TOKEN_HEADER] = self.token
        return call_next(context)


class FlowerRun:
    """`client` speaks Flower's Runtime API, for the run `id`."""

    def __init__(self, folder: SuperLinkFolder, place: str) -> None:
        """InputError unless the SuperLink answers at this place."""
        self.folder, self.place, self.node = folder, place, Node(node_id=SUPERLINK_NODE_ID)
        self._secret, self._ended = Secret(folder.token), threading.Event()
        try:
            self.client, self.id = self._begun()
        except httpx.HTTPError as error:
            raise InputError(self.trouble(error)) from None
        threading.Thread(target=self._beat, daemon=True).start()

    def _begun(self) -> tuple[RuntimeHttpClient, int]:
        with ControlHttpClient.from_server_address(self.place, True, None, [self._secret]) as control:
            control.StartRun(StartRunRequest(fab=Fab(content=app())))
        with RuntimeHttpClient.from_server_address(self.place, True, None, [self._secret]) as anonymous:
            task = anonymous.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
        interceptors = [self._secret, RuntimeTokenHttpInterceptor(task.token)]
        client = RuntimeHttpClient.from_server_address(self.place, True, None, interceptors)
        client.PullTaskInput(PullTaskInputRequest())
        return client, task.task.run_id

    def begin_again(self) -> None:
        """At a SuperLink that was started again, and does not know the run."""
        client, self.id = self._begun()
        old, self.client = self.client, client
        old.close()

    def _beat(self) -> None:
        """Tell the SuperLink that this run goes on."""
        while not self._ended.wait(HEARTBEAT):
            with suppress(httpx.HTTPError, RuntimeError):  # of a client that was closed
                self.client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def online(self) -> dict[str, int]:
        """Flower's numbers of the nodes that are there, by the names of their keys, or by themselves without keys."""
        found = self.client.GetNodes(GetNodesRequest()).nodes
        return {one.name or f"{one.node_id:x}": one.node_id for one in found}

    def close(self) -> None:
        self._ended.set()
        with suppress(httpx.HTTPError):
            self.client.PushTaskOutput(PushTaskOutputRequest(sub_status="completed"))
        self.client.close()

    # When something is wrong.

    def is_unknown(self, error: httpx.HTTPError) -> bool:
        """Whether the SuperLink is another one than that at which the run began; RunError if it has another secret."""
        code = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None
        if code == httpx.codes.FORBIDDEN:
            raise RunError(self.trouble(error))
        return code in (httpx.codes.UNAUTHORIZED, httpx.codes.NOT_FOUND)

    def trouble(self, error: httpx.HTTPError) -> str:
        """What is wrong, and what would be right."""
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.FORBIDDEN:
            what = f"the SuperLink at {self.place} was started with another folder than {self.folder.path}"
            return f"{what}; give engine.flower.folder the same one"
        return NOBODY.format(self.place, said_of(error), self.folder.path)


def app() -> bytes:
    """The app that Flower's runs have: it says nothing but a name."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("pyproject.toml", APP)
    return data.getvalue()


def said_of(error: httpx.HTTPError) -> str:
    """What an HTTP error says, in one line."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
