"""The same work for every contender: the model, the data, who takes part in each round and in which batches.

All of it comes from an experiment, by fedsieve's own split, choice of clients and order of batches, and lies in a
folder, so that contenders in processes of their own read the same.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from fedsieve.config.experiment_file import parse_experiment
from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.federate.batches import batches
from fedsieve.federate.selection.uniform import drawn
from fedsieve.model.features import feature_depth
from fedsieve.observe.callbacks import Callback
from fedsieve.randomness import numpy_generator

Epochs = list[list[Tensor]]  # of one client in one round: the batches of each epoch, as positions among its samples
EVALUATION_BATCH = 100


@dataclass(frozen=True)
class Workload:
    network: nn.Module  # as it is before the first round; what is frozen needs no gradient
    inputs: Tensor  # what the network takes: images as they enter the backbone, or their features
    labels: Tensor
    clients: dict[int, Tensor]  # which samples each client holds, of those who ever take part
    count: int  # of all clients
    samples: int  # of all clients and the validation set; those of clients who never take part are not in `inputs`
    rounds: list[dict[int, Epochs]]  # who trains, on what
    validation: Tensor  # samples to evaluate on after every round; none: no evaluation
    optimizer: dict[str, float]  # the settings of torch.optim.SGD

    def data_of(self, client: int) -> tuple[Tensor, Tensor]:
        return self.inputs[self.clients[client]], self.labels[self.clients[client]]

    def save(self, path: Path) -> None:
        torch.save(vars(self), path)

    @staticmethod
    def load(path: Path) -> "Workload":
        return Workload(**torch.load(path, weights_only=False, mmap=True))  # written by `save` a moment ago


def make_workload(settings: dict[str, Any], on_features: bool) -> Workload:
    """The work of an experiment's only phase; `on_features` lets everybody start from the backbone's output."""
    experiment = as_experiment(settings).resolved()
    context, (phase,) = RunContext(experiment, Callback()), experiment.phases
    held = [context.training[own] for own in context.partition.clients]  # as positions in the training set
    rounds = []
    for number in range(1, phase.rounds + 1):
        generator = numpy_generator(experiment.seed, "clients", phase.name, number)
        chosen = drawn(experiment.clients.count, experiment.clients.per_round, generator)
        address = (experiment.seed, phase.name, number)
        rounds.append({one: list(batches(len(held[one]), phase.local, *address, one)) for one in chosen})
    taking_part = sorted({client for chosen in rounds for client in chosen})
    ends = torch.tensor([0, *(len(held[client]) for client in taking_part)]).cumsum(0).tolist()
    samples = [*(held[one] for one in taking_part), context.validation_sample]
    kept = torch.cat([torch.from_numpy(one) for one in samples])
    inputs, network = _inputs(context, kept, on_features)
    trained = context.model.scope(phase.train).named
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in trained)
    local = phase.local
    return Workload(
        network=network,
        inputs=inputs,
        labels=context.data.train.labels[kept],
        clients={one: torch.arange(*ends[place : place + 2]) for place, one in enumerate(taking_part)},
        count=experiment.clients.count,
        samples=len(context.data.train),
        rounds=rounds,
        validation=torch.arange(ends[-1], len(kept)),
        optimizer={"lr": local.lr, "momentum": local.momentum, "weight_decay": local.weight_decay},
    )


@torch.no_grad()
def _inputs(context: RunContext, kept: Tensor, on_features: bool) -> tuple[Tensor, nn.Module]:
    """What the network takes for these training samples, and the network, its tensors named as in a run's model."""
    if on_features:
        depth = feature_depth(context.classifier)
        features = context.frozen_outputs("train", kept.numpy(), depth)(torch.arange(len(kept)))
        return features, nn.Sequential(OrderedDict(head=context.classifier.head))
    images = context.data.train.images[kept].split(EVALUATION_BATCH)
    return torch.cat([context.transform.evaluation(batch) for batch in images]), context.classifier


def as_experiment(settings: dict[str, Any], overrides: Iterable[str] = ()) -> Experiment:
    return parse_experiment(yaml.safe_dump(settings), overrides=list(overrides))


# ------------------------------------------------------------------- what contenders do alike


def trained_tensors(network: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes, by name; those of the network itself, not copies."""
    return {name: one.detach() for name, one in network.named_parameters() if one.requires_grad}


@torch.no_grad()
def set_tensors(network: nn.Module, values: dict[str, Tensor]) -> None:
    for name, tensor in trained_tensors(network).items():
        tensor.copy_(values[name])


def train(network: nn.Module, data: tuple[Tensor, Tensor], epochs: Epochs, settings: dict[str, float]) -> None:
    """Plain local SGD. A frozen backbone needs no torch.no_grad: torch records nothing where no gradient is asked."""
    inputs, labels = data
    optimizer = torch.optim.SGD([one for one in network.parameters() if one.requires_grad], **settings)
    for batch in (positions for epoch in epochs for positions in epoch):
        optimizer.zero_grad()
        F.cross_entropy(network(inputs[batch]), labels[batch]).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(network: nn.Module, work: Workload) -> tuple[float, float] | None:
    """Accuracy and loss on the validation samples; None without any."""
    if not len(work.validation):
        return None
    correct, loss = 0, 0.0
    for batch in work.validation.split(EVALUATION_BATCH):
        scores, labels = network(work.inputs[batch]), work.labels[batch]
        correct += int((scores.argmax(dim=1) == labels).sum())
        loss += float(F.cross_entropy(scores, labels, reduction="sum"))
    return correct / len(work.validation), loss / len(work.validation)
