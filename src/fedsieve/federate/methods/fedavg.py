"""Federated averaging (McMahan et al., AISTATS 2017), the base of all other methods."""

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from torch import Tensor

from fedsieve.config.refusals import Refusal
from fedsieve.config.registry import NoSettings
from fedsieve.config.settings import Settings as AnySettings
from fedsieve.federate.checks import check_update
from fedsieve.federate.local import sgd, update_of
from fedsieve.federate.preparation import Preparation
from fedsieve.federate.server_step import either, moments_at_start, server_step
from fedsieve.federate.types import (
    Aggregator,
    Broadcast,
    ClientData,
    LocalSetup,
    ServerOptimizer,
    State,
    Task,
    Update,
)
from fedsieve.model.flat import Scope
from fedsieve.sieve.mask import Mask


class FedAvg:
    """Clients train from the server's weights; the server adds their mean change (McMahan et al., AISTATS 2017).

        w_k = SGD(w)                        at each client k of the round
        w  <- w + sum_k a_k (w_k - w) / sum_k a_k

    A method that differs in one of these steps overrides one of the functions below.
    """

    Settings: type[AnySettings] = NoSettings
    sends_once: ClassVar[frozenset[str]] = frozenset()  # broadcast extras that stay the same for a whole phase
    reports: ClassVar[frozenset[str]] = frozenset()  # metrics of clients besides loss, drift and density
    masked: ClassVar[frozenset[str]] = frozenset({"delta"})  # vectors of which only what a mask leaves active is sent
    changes_frozen: ClassVar[bool] = False  # whether clients send changes of weights that their masks freeze
    is_hidden_by_sums: ClassVar[bool] = True  # whether secure sums of updates hide all that clients send
    carries: ClassVar[bool] = True  # whether clients may carry momentum from one of their rounds to the next
    refuses: ClassVar[tuple[Refusal, ...]] = ()  # settings that it does not go with
    augments: ClassVar[bool] = True  # whether clients' images are augmented at random, if the data settings say so

    def __init__(
        self,
        settings: AnySettings,
        scope: Scope,
        aggregator: Callable[[Tensor], Aggregator],
        optimizer: ServerOptimizer,
    ) -> None:
        self.settings, self.scope = settings, scope
        self.aggregator, self.optimizer = aggregator, optimizer  # the aggregator is made anew for each round's weights

    # At the server.

    @property
    def extras(self) -> Mapping[str, int]:
        """The broadcast extras (see `send`) and their lengths."""
        return {}

    @property
    def replies(self) -> Mapping[str, int]:
        """The vectors of an update and their lengths: the change of the weights ("delta") and others, or only sums.

        Sums are float64; all others have the type that `wire.values` says.
        """
        return {"delta": self.scope.size}

    def start(self, weights: Tensor, preparation: Preparation) -> State:
        """The server's state before a phase's first round. Clients may `contribute` to it.

        A resumed run does not call this, so a method must not keep anything elsewhere.
        """
        return moments_at_start(self.optimizer, weights[: self.scope.weights])

    def send(self, server: State) -> dict[str, Tensor]:
        """The broadcast extras: what the server sends besides the weights."""
        return {}

    def check(self, update: Update, broadcast: Broadcast, samples: int, setup: LocalSetup) -> float:
        """The norm of an update; RunError if a client with this many samples cannot have sent it."""
        return check_update(update, broadcast, samples, setup, self.reports, self.changes_frozen)

    def fold(self, weights: Tensor, updates: Iterator[Update], server: State) -> tuple[Tensor, State]:
        """The new weights and the server's new state, from the updates of a round as they arrive."""
        direction, trained = self.combine(weights, updates)
        return self.step(weights, direction, trained, server)

    def combine(self, weights: Tensor, updates: Iterator[Update]) -> tuple[Tensor, Mask | None]:
        """The direction in which the updates point, and the weights that some client trained (None: all)."""
        aggregator, trained = self.aggregator(weights), None
        for number, update in enumerate(updates):
            aggregator.add(update)
            trained = either(trained, update.mask) if number else update.mask
        return aggregator.finish(), trained

    def step(self, weights: Tensor, direction: Tensor, trained: Mask | None, server: State) -> tuple[Tensor, State]:
        """The server optimizer's step for the weights that were trained; all others keep value and moments.

        Buffers (BatchNorm's statistics) are not optimized: they become the average of the clients' ones.
        """
        return server_step(self.optimizer, weights, direction, server, trained, self.scope.weights)

    # At a client.

    def train(self, task: Task, mine: State) -> tuple[Update, State]:
        """A client's update, and its state for its next round.

        A state is kept on the CPU. Names of optimizers' states (`momentum`, `exp_avg`, `exp_avg_sq`, `step`, `mask`)
        are taken, and those that begin with `residual` (`Transport`).
        """
        trained = sgd(task, task.broadcast.weights, mine)
        return update_of(task, trained), trained.momentum

    def contribute(self, data: ClientData, setup: LocalSetup, phase: str) -> tuple[Tensor, State]:
        """What a client sends before the first round, if `start` requests it, and what it remembers."""
        raise NotImplementedError

    def remembers(self, scope: Scope) -> int:
        """Bytes that a client keeps between its rounds, besides momentum."""
        return 0
