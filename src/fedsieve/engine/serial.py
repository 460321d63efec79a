"""All clients in this process, one after another."""

from collections.abc import Generator, Iterable, Mapping

from torch import Tensor

from fedsieve.engine.client_runtime import ClientRuntime
from fedsieve.federate.transport import Transport
from fedsieve.federate.types import Answer, Courier, Job


class Serial:
    """The simple reference engine: others must give the same bits."""

    size = 1
    courier: Courier | None = None

    def __init__(self, runtime: ClientRuntime) -> None:
        self.runtime = runtime
        self.seconds: dict[str, float] = {}  # of other processes, by section: there are none

    def begin(self, transport: Transport) -> None:
        """Jobs find what they need in what is published, so no messages are sent."""

    def publish(self, vectors: Mapping[str, Tensor]) -> None:
        self.runtime.take(vectors)

    def map(self, jobs: Iterable[Job]) -> Generator[Answer]:
        return (self.runtime.do(job) for job in jobs)
