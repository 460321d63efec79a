"""The types of federated learning: what server and clients send each other, and the parts that can be replaced."""

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fedsieve.config.local_settings import LocalSettings
from fedsieve.model.flat import Scope
from fedsieve.model.precision import Precision
from fedsieve.sieve.mask import Mask

if TYPE_CHECKING:
    from fedsieve.federate.mask_source import MaskSource
    from fedsieve.federate.transport import Transport

EXTRA = "extra:"  # before the names of published broadcast extras
State = dict[str, Tensor]  # what the server or a client remembers between rounds, by name; empty for most methods


# --------------------------------------------------------------------------------------------- what is sent


@dataclass(frozen=True)
class Broadcast:
    """What the server sends: the phase and round, the weights in scope, and the broadcast extras of a method."""

    phase: str
    round: int
    rounds: int
    weights: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientData:
    """One client's own samples: `inputs(positions, generator)` gives a batch of inputs for the network."""

    client: int
    inputs: Callable[[Tensor, torch.Generator], Tensor]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class LocalSetup:
    """How clients of a phase train: the network, which of its weights, and with which settings."""

    scope: Scope
    network: nn.Module  # inputs to class scores: the whole model, or what follows its frozen part
    local: LocalSettings
    carry_momentum: bool
    seed: int
    masks: "MaskSource | None" = None  # None: all weights in scope may change
    precision: Precision = "float32"
    note: Callable[[str], None] = lambda _: None  # shows a text to the user


@dataclass(frozen=True)
class Task:
    """A client's task in a round, with all that it needs except its state."""

    broadcast: Broadcast
    data: ClientData
    setup: LocalSetup


@dataclass(frozen=True)
class Update:
    """What a client sends back, and what the server needs to weight it.

    `vectors` are over the scope. With a mask, "delta" (and what else a method names in `masked`) holds only the active
    weights, then all that the mask does not cover (dense layers and buffers); the frozen weights did not change.
    """

    client: int
    samples: int
    vectors: dict[str, Tensor]
    metrics: dict[str, float] = field(default_factory=dict)
    mask: Mask | None = None
    mask_seed: int | None = None  # from which the mask can be drawn
    weight: float = 1.0  # in averages
    clients: int = 1  # of a secure sum: it is the average of so many clients

    def positions(self, size: int) -> Tensor | None:
        """Where in the scope's vector the values of "delta" belong; None: everywhere."""
        return None if self.mask is None else touched_positions(self.mask, size)


def touched_positions(mask: Mask, size: int) -> Tensor:
    """Where in the scope's vector the values of a masked update belong: active weights, and what no mask covers."""
    return torch.cat((mask.positions, torch.arange(mask.size, size))) if size > mask.size else mask.positions


# ------------------------------------------------------------------------------------- what can be replaced


class Payload(Protocol):
    """What a method's messages carry besides the weights: vectors by name, with their lengths, and metrics."""

    @property
    def extras(self) -> Mapping[str, int]: ...
    @property
    def replies(self) -> Mapping[str, int]: ...

    reports: ClassVar[frozenset[str]]
    masked: ClassVar[frozenset[str]]


class Aggregator(Protocol):
    """Combines updates into one direction: what a plain step adds to the weights, in float64, over the scope.

    Made anew for each round: `add` each update, then `finish`.
    """

    needs_all: bool  # whether it keeps the updates of a round until `finish`; else each is dropped when it is added
    takes_averages: bool  # whether the average of all updates (secure sums) gives the same; derived classes say it anew

    def add(self, update: Update) -> None: ...
    def finish(self) -> Tensor: ...


class ServerOptimizer(Protocol):
    """Turns a direction, which it may overwrite, into new weights.

    What it remembers (momentum) are vectors as long as the weights, part of the server's state. A step gets the weights
    that some client of the round trained, and what it remembers of these; it may overwrite that, too.
    """

    def start(self, weights: Tensor) -> State: ...
    def step(self, weights: Tensor, direction: Tensor, state: State) -> tuple[Tensor, State]: ...


class Store(Protocol):
    """The server's view of clients' states between their rounds, by client and round."""

    def newest(self, client: int) -> int | None: ...
    def known(self, client: int) -> dict[int, str]: ...
    def keep(self, client: int, round: int, digest: str) -> None: ...
    def drop(self, client: int, round: int) -> None: ...
    def commit(self) -> None: ...
    def rewind(self, round: int) -> None: ...


# ------------------------------------------------------------------------------------------------- engines


@dataclass(frozen=True)
class Job:
    """`do` names what to do, `about` holds its arguments as JSON values, and `data` are bytes that go with it."""

    do: str
    about: dict[str, Any] = field(default_factory=dict)
    data: Any = b""
    is_light: bool = False  # whether it probably takes less time than sending it


@dataclass(frozen=True)
class Answer:
    about: dict[str, Any] = field(default_factory=dict)
    data: Any = b""

    def numbers(self, kind: torch.dtype) -> Tensor:
        """The data as a tensor, not to be written to: others may read the same memory."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the memory is read-only
            return torch.frombuffer(self.data, dtype=kind)


class Courier(Protocol):
    """Takes messages of the server to clients that are elsewhere, before the next job that is theirs."""

    def post(self, client: int, topic: str, message: bytes | bytearray, since: int | None = None) -> None:
        """`topic` says what the message is about, and `since` to which version of the weights it adds."""


class Engine(Protocol):
    """Where clients run: this process, others on this machine, a cluster, or the nodes of a federation."""

    courier: Courier | None  # takes messages to clients; None: jobs find what they need in what is published

    @property
    def size(self) -> int: ...  # processes that do jobs
    @property
    def seconds(self) -> Mapping[str, float]: ...  # of other processes, by section

    def begin(self, transport: "Transport") -> None:
        """From now on messages to clients are those of this transport's phase."""

    def publish(self, vectors: Mapping[str, Tensor]) -> None:
        """Let every job read these vectors, under these names, until they are published again."""

    def map(self, jobs: Iterable[Job]) -> Generator[Answer]:
        """The answers, in the order of the jobs."""
