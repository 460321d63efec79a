"""FedNova: clients that take more or longer steps do not count for more."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from fedsieve.config.local_settings import LocalSettings
from fedsieve.config.refusals import Refusal, leaking
from fedsieve.config.settings import option
from fedsieve.errors import RunError
from fedsieve.federate.batches import learning_rates
from fedsieve.federate.local import sgd, update_of
from fedsieve.federate.methods.fedavg import FedAvg
from fedsieve.federate.types import Broadcast, LocalSetup, State, Task, Update

PLAIN_SGD = "tau is known for the steps of SGD; use local.optimizer: sgd"


class FedNova(FedAvg):
    """Updates are divided by the length of a client's training before they are averaged (Wang et al., NeurIPS 2020).

        w <- w + (sum_k p_k tau_k) sum_k p_k delta_k / tau_k

    p_k are the weights in averages, which sum to 1, and tau_k is that length. A client sends delta_k / tau_k and tau_k,
    both relative to the tau of a client with one batch per epoch. So with `local.steps`, where all take equally many,
    the result is that of FedAvg, to the bit.
    """

    reports: ClassVar[frozenset[str]] = frozenset({"tau"})
    carries: ClassVar[bool] = False
    refuses: ClassVar[tuple[Refusal, ...]] = (
        Refusal("local.optimizer: adamw", PLAIN_SGD, lambda phase, _: option(phase.local.optimizer) != "sgd"),
        Refusal(
            "mask.refresh: epoch",
            "weights would be trained for different numbers of steps; use refresh: once or round",
            lambda phase, _: phase.mask is not None and phase.mask.refresh == "epoch",
        ),
        Refusal(
            "an aggregate other than mean under clients' own masks",
            "tau would differ from weight to weight; use aggregate: mean, or mask.scope: server or federated",
            lambda phase, _: option(phase.aggregate) != "mean" and phase.mask is not None and not phase.mask.is_shared,
        ),
        leaking("old momentum would count as gradients of this round; use reset"),
    )

    def train(self, task: Task, mine: State) -> tuple[Update, State]:
        trained = sgd(task, task.broadcast.weights, mine)
        update, tau = update_of(task, trained), relative_tau(len(task.data), task.setup.local, task.broadcast)
        delta = update.vectors["delta"]
        delta[: len(delta) - self.buffers] /= tau or 1.0  # if all learning rates are 0, nothing has moved
        return replace(update, metrics={**update.metrics, "tau": tau}), {}

    def check(self, update: Update, broadcast: Broadcast, samples: int, setup: LocalSetup) -> float:
        norm = super().check(update, broadcast, samples, setup)
        if update.metrics["tau"] != (tau := relative_tau(samples, setup.local, broadcast)):
            raise RunError(f"it reports a tau of {update.metrics['tau']:g}, and its steps give {tau:g}")
        return norm

    def fold(self, weights: Tensor, updates: Iterator[Update], server: State) -> tuple[Tensor, State]:
        total = taus = 0.0

        def counted() -> Iterator[Update]:
            nonlocal total, taus
            for update in updates:
                total += update.weight
                taus += update.weight * update.metrics["tau"]
                yield update

        direction, trained = self.combine(weights, counted())
        direction[: self.scope.weights] *= taus / total
        return self.step(weights, direction, trained, server)

    @property
    def buffers(self) -> int:
        """BatchNorm's statistics at the end of the scope, which no gradients move."""
        return self.scope.size - self.scope.weights


def relative_tau(samples: int, local: LocalSettings, broadcast: Broadcast) -> float:
    """A client's tau, divided by that of a client with one batch per epoch (by 1, if all its learning rates are 0)."""
    return tau(samples, local, broadcast) / (tau(1, local, broadcast) or 1.0)


def tau(samples: int, local: LocalSettings, broadcast: Broadcast) -> float:
    """The 1-norm of the factors with which SGD adds up its gradients: how far it goes if every gradient is 1.

    (All factors are positive, so their sum is the way. Without momentum it is the sum of the learning rates.)
    """
    way = velocity = 0.0
    for rate in learning_rates(samples, local, broadcast.round, broadcast.rounds):
        velocity = local.momentum * velocity + 1
        way += rate * (1 + local.momentum * velocity if local.nesterov else velocity)
    return way
