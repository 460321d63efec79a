"""SCAFFOLD: control variates take out of each client's gradients what differs from the others'."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from fedsieve.config.refusals import Refusal
from fedsieve.config.settings import option
from fedsieve.federate.batches import learning_rates
from fedsieve.federate.local import Trained, sgd, update_of
from fedsieve.federate.methods.fedavg import FedAvg
from fedsieve.federate.norm_limit import norm_of
from fedsieve.federate.preparation import Preparation
from fedsieve.federate.types import Broadcast, LocalSetup, State, Task, Update, touched_positions
from fedsieve.model.flat import Scope


class Scaffold(FedAvg):
    """Clients' gradients are corrected by the mean gradients of all, less their own (Karimireddy et al., ICML 2020).

    A client steps along g - c_k + c (the correction is added after clipping, and not rescaled by a mask), then

        c_k <- c_k - c - delta_k / sum of learning rates        (the paper's option II)
        c   <- c + sum over the round's clients of the change of c_k / number of all clients

    For each weight, rates are summed over the steps in which it was active; where it never was, c_k stays as it is and
    counts as unchanged. The change of c_k goes up beside that of the weights, and c goes down.
    """

    masked: ClassVar[frozenset[str]] = frozenset({"delta", "control"})
    refuses: ClassVar[tuple[Refusal, ...]] = (
        Refusal(
            "local.momentum above 0",
            "control variates are mean gradients, and momentum would count them several times; set local.momentum: 0",
            lambda phase, _: option(phase.local.optimizer) == "sgd" and phase.local.momentum > 0,
        ),
        Refusal(
            "local.optimizer: adamw",
            "control variates are learnt from the steps of plain SGD; use local.optimizer: sgd and local.momentum: 0",
            lambda phase, _: option(phase.local.optimizer) != "sgd",
        ),
    )

    @property
    def extras(self) -> Mapping[str, int]:
        return {"control": self.scope.weights}

    @property
    def replies(self) -> Mapping[str, int]:
        return {**super().replies, "control": self.scope.weights}

    # At the server.

    def start(self, weights: Tensor, preparation: Preparation) -> State:
        state = {
            "control": torch.zeros_like(weights[: self.scope.weights]),
            "clients": torch.tensor(float(len(preparation.sizes))),
        }
        return super().start(weights, preparation) | state

    def send(self, server: State) -> dict[str, Tensor]:
        return {"control": server["control"]}

    def check(self, update: Update, broadcast: Broadcast, samples: int, setup: LocalSetup) -> float:
        """The larger of two norms: that of the update, and what follows for it from the change of c_k."""
        norm = super().check(update, broadcast, samples, setup)
        control, change = broadcast.extras["control"], update.vectors["control"]
        where = update.positions(self.scope.weights)
        control = control if where is None else control[where.to(control.device)]
        rates = learning_rates(samples, setup.local, broadcast.round, broadcast.rounds)
        return max(norm, sum(rates) * norm_of(change + control))

    def fold(self, weights: Tensor, updates: Iterator[Update], server: State) -> tuple[Tensor, State]:
        control, clients = server["control"], float(server["clients"])

        def counted() -> Iterator[Update]:
            for update in updates:
                change, where = update.vectors["control"] * (update.clients / clients), update.positions(len(control))
                if where is None:
                    control.add_(change)
                else:
                    control.index_add_(0, where.to(control.device), change.to(control.dtype))
                yield update

        return super().fold(weights, counted(), server)

    # At a client.

    def train(self, task: Task, mine: State) -> tuple[Update, State]:
        broadcast, size = task.broadcast, self.scope.weights
        control = broadcast.extras["control"]
        own = mine["control"].to(control.device) if "control" in mine else torch.zeros_like(control)
        shift = self.scope.split(control - own)
        trained = sgd(task, broadcast.weights, mine, correction=lambda name, select: select(shift[name]))
        rates = self._rates(trained, control.device)
        change = -control - (trained.weights - broadcast.weights)[:size] / rates
        change = torch.where(rates > 0, change, 0)
        update = update_of(task, trained)
        where = update.positions(size)
        sent = change if where is None else change[where]
        vectors = {**update.vectors, "control": sent}
        return replace(update, vectors=vectors), {**trained.momentum, "control": (own + change).cpu()}

    def _rates(self, trained: Trained, device: torch.device) -> Tensor:
        """For each weight, the sum of learning rates over the steps in which it was active."""
        rates = torch.zeros(self.scope.weights, device=device)
        for mask, rate in trained.rates:
            where = slice(None) if mask is None else touched_positions(mask, len(rates)).to(device)
            rates[where] += rate
        return rates

    def remembers(self, scope: Scope) -> int:
        return 4 * scope.weights
