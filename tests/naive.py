"""Federated learning as one would write it in a notebook: plain torch, all tensors dense, masks by hand.

The slow twin of the methods: no flat vectors, no messages, no state on disk. It takes from a run who took part in each
round, and from the library the masks, the batches and the schedule, which have tests of their own.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsieve.config.local_settings import LocalSettings
from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.federate.batches import batches
from fedsieve.federate.schedule import SCHEDULES
from fedsieve.federate.types import Broadcast, ClientData
from fedsieve.observe.callbacks import Callback
from fedsieve.phase import mask_source, plan
from fedsieve.runs.read import read_metrics

Weights = dict[str, Tensor]


def tau(rates: list[float], local: LocalSettings) -> float:
    """The sum of the absolute factors of all gradients in the way that torch's SGD goes, by differentiating it."""
    gradients = torch.ones(len(rates), dtype=torch.float64, requires_grad=True)
    way, velocity = torch.zeros((), dtype=torch.float64), None
    for rate, gradient in zip(rates, gradients, strict=True):
        velocity = gradient if velocity is None else local.momentum * velocity + gradient
        way = way - rate * (gradient + local.momentum * velocity if local.nesterov else velocity)
    (factors,) = torch.autograd.grad(way, gradients)
    return float(factors.abs().sum())


class Notebook:
    """Trains the only phase of an experiment. `method` is fedavg, fedprox, scaffold or fednova."""

    def __init__(self, settings: Experiment, folder: Path, method: str, mu: float = 0.0) -> None:
        self.settings, self.method, self.mu = settings.resolved(), method, mu
        self.lines = read_metrics(folder)
        self.context = RunContext(self.settings, Callback())
        (phase,) = plan(self.settings, self.context)
        self.phase, self.local = phase.settings, phase.settings.local
        self.scope, self.model = phase.scope, self.context.classifier.eval()
        self.named = dict(self.scope.named)
        self.masks = mask_source(self.context, phase, self.scope.read(), None)
        if self.masks is not None and self.masks.settings.is_shared and self.masks.settings.refresh == "once":
            self.masks.share(self.masks.calibrated([], self.scope.read()))
        self.server = {name: one.detach().clone() for name, one in self.named.items()}
        self.control = {name: torch.zeros_like(one) for name, one in self.server.items()}
        self.controls: dict[int, Weights] = {}

    def run(self) -> Weights:
        for line in self.lines:
            told = [
                self.train(client, line["round"]) for client in line["clients"] if str(client) not in line["failed"]
            ]
            total = sum(one["samples"] for one in told)
            shares = [one["samples"] / total for one in told]
            taus = [one["tau"] if self.method == "fednova" else 1.0 for one in told]
            longest = sum(share * tau for share, tau in zip(shares, taus, strict=True))
            for name, weights in self.server.items():
                parts = zip(told, shares, taus, strict=True)
                weights += longest * sum(share * one["delta"][name] / tau for one, share, tau in parts)
                if self.method == "scaffold":
                    changes = [one["change"][name] for one in told]
                    self.control[name] += len(told) / self.settings.clients.count * torch.stack(changes).mean(0)
        return self.server

    def train(self, client: int, round: int) -> dict[str, Any]:
        local, seed = self.local, self.settings.seed
        samples = self.context.training[self.context.partition.clients[client]]
        inputs = self.context.transform.evaluation(self.context.data.train.images[samples])
        labels = self.context.data.train.labels[samples]
        own = self.controls.get(client, {name: torch.zeros_like(one) for name, one in self.server.items()})
        self._write(self.server)
        sums = {name: torch.zeros_like(one) for name, one in self.server.items()}
        momenta: Weights = {}
        rates: list[float] = []
        epochs = list(batches(len(samples), local, seed, self.phase.name, round, client))
        steps = sum(map(len, epochs))
        active = self._active(client, samples, labels, round, 0)
        for epoch, parts in enumerate(epochs):
            if epoch and self.masks is not None and self.masks.settings.refresh == "epoch":
                active, momenta = self._active(client, samples, labels, round, epoch), {}
            for batch in parts:
                done = (round - 1 + len(rates) / steps) / self.phase.rounds
                rates.append(local.lr * SCHEDULES[local.schedule](done))
                self._step(inputs[batch], labels[batch], active, momenta, rates[-1], own)
                for name, where in active.items():
                    sums[name] += rates[-1] * where
        delta = {name: one.detach() - self.server[name] for name, one in self.named.items()}
        told = {"delta": delta, "samples": len(samples), "tau": tau(rates, local)}
        if self.method == "scaffold":
            new = {}
            for name, one in own.items():
                learnt = one - self.control[name] - delta[name] / sums[name].clamp(min=1e-30)
                new[name] = torch.where(sums[name] > 0, learnt, one)
            told["change"] = {name: new[name] - own[name] for name in own}
            self.controls[client] = new
        return told

    def _step(
        self, inputs: Tensor, labels: Tensor, active: Weights, momenta: Weights, rate: float, own: Weights
    ) -> None:
        local = self.local
        self.model.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), labels).backward()
        gradients = {}
        for name, one in self.named.items():
            pull = self.mu * (one.detach() - self.server[name])
            gradients[name] = (one.grad + pull) * active[name]
        if local.clip_norm is not None:
            norm = torch.linalg.vector_norm(torch.cat([one.flatten() for one in gradients.values()]))
            gradients = {
                name: one * min(1.0, local.clip_norm / (float(norm) + 1e-6)) for name, one in gradients.items()
            }
        with torch.no_grad():
            for name, one in self.named.items():
                gradient = gradients[name]
                if self.method == "scaffold":
                    gradient = gradient + self.control[name] - own[name]
                gradient = (gradient + local.weight_decay * one) * active[name]
                if local.momentum:
                    momenta[name] = local.momentum * momenta[name] + gradient if name in momenta else gradient.clone()
                    gradient = gradient + local.momentum * momenta[name] if local.nesterov else momenta[name]
                one -= rate * gradient

    def _active(self, client: int, samples: Any, labels: Tensor, round: int, epoch: int) -> Weights:
        """One where a weight may change."""
        if self.masks is None:
            return {name: torch.ones_like(one) for name, one in self.server.items()}
        data = ClientData(client, lambda positions, generator: positions, labels)
        broadcast = Broadcast(self.phase.name, round, self.phase.rounds, self.scope.read())
        before = self.scope.read()
        mask = self.masks.mask(data, broadcast, epoch)
        self.scope.write(before)
        return {
            name: mask[name].float() if name in mask.shapes else torch.ones_like(one)
            for name, one in self.server.items()
        }

    def _write(self, weights: Weights) -> None:
        self.scope.prepare_training()
        self.model.eval()
        with torch.no_grad():
            for name, one in self.named.items():
                one.copy_(weights[name])
