"""Fisher mixing in whole runs, against equation 5 written out."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.experiment import run
from fedsieve.federate.batches import batches
from fedsieve.federate.schedule import SCHEDULES
from fedsieve.model.flat import FlatModel
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.model_file import load_classifier
from fedsieve.runs.read import read_metrics
from fedsieve.sieve.mask import Mask

Maker = Callable[..., Experiment]


def edit(mask: str, rounds: int = 2) -> str:
    mask = mask if "file" in mask else f"sparsity: 0.9, calibration_rounds: 1, fisher: {{samples: 40}}, {mask}"
    local = "local: {epochs: 1, batch_size: 16, lr: 0.02}"
    return f"phases=[{{name: edit, train: backbone, rounds: {rounds}, {local}, mask: {{{mask}}}}}]"


def weights(folder: Path) -> Tensor:
    return FlatModel(load_classifier(folder)).vector


def test_fisher_mixing_is_equation_5(experiment: Maker, tmp_path: Path) -> None:
    """Two rounds of all clients against a plain loop: one backward per sample, and the formula weight by weight."""
    settings = experiment(
        "clients.count=3",
        "clients.fraction=1.0",
        "phases=[{name: head, train: head, rounds: 2, local: {epochs: 2, batch_size: 16, lr: 0.5}}]",
        "phases.*.method={fisher_mixing: {dtype: float32, fisher: {kind: empirical, samples: 1000}}}",
    )
    run(settings, tmp_path / "run")
    context = RunContext(settings.resolved(), Callback())
    head, local = context.classifier.head, settings.resolved().phases[0].local
    start, data = flat(head), []
    for own in context.partition.clients:
        images = context.data.train.images[context.training[own]]
        with torch.no_grad():
            features = context.classifier.eval().backbone(context.transform.evaluation(images))
        data.append((features, context.data.train.labels[context.training[own]]))
    scores = []
    for features, labels in data:
        total = torch.zeros_like(start)
        for one in range(len(labels)):
            head.zero_grad()
            nn.functional.cross_entropy(head(features[one : one + 1]), labels[one : one + 1]).backward()
            total += torch.cat([parameter.grad.flatten() for parameter in head.parameters()]) ** 2
        scores.append(total / len(labels))
    server, old = start, [None] * 3
    for round in (1, 2):
        replies = []
        for client, (features, labels) in enumerate(data):
            begin = server
            if old[client] is not None:
                beta = scores[client] / sum(scores)
                begin = beta * old[client] + (1 - beta) * server
            fill(head, begin)
            optimizer = torch.optim.SGD(head.parameters(), lr=local.lr, momentum=0.9, weight_decay=1e-4)
            epochs = list(batches(len(labels), local, settings.seed, "head", round, client))
            steps = [batch for epoch in epochs for batch in epoch]
            for step, batch in enumerate(steps):
                optimizer.param_groups[0]["lr"] = local.lr * SCHEDULES["cosine"]((round - 1 + step / len(steps)) / 2)
                optimizer.zero_grad()
                nn.functional.cross_entropy(head(features[batch]), labels[batch]).backward()
                optimizer.step()
            old[client] = flat(head)
            replies.append((len(labels), old[client]))
        server = sum(count * one for count, one in replies) / sum(count for count, _ in replies)
    found = torch.cat([one.flatten() for one in load_classifier(tmp_path / "run").head.parameters()])
    assert (found - server).abs().max() < 2e-5
    run(
        experiment(
            f"phases={json.dumps([phase.model_dump(mode='json') for phase in settings.phases])}",
            "phases.*.method=fedavg",
            "clients.count=3",
            "clients.fraction=1.0",
        ),
        tmp_path / "plain",
    )
    plain = torch.cat([one.flatten() for one in load_classifier(tmp_path / "plain").head.parameters()])
    assert (plain - server).abs().max() > 1e-3  # mixing made a difference


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def fill(module: nn.Module, values: Tensor) -> None:
    with torch.no_grad():
        for parameter, part in zip(
            module.parameters(), values.split([one.numel() for one in module.parameters()]), strict=True
        ):
            parameter.copy_(part.view_as(parameter))


def test_mixing_goes_with_masks(experiment: Maker, tmp_path: Path) -> None:
    """A weight that nobody trained stays, to the bit; a client sends what its mask leaves active and what it mixed."""
    mixing = "phases.*.method={fisher_mixing: {fisher: {samples: 20}}}"
    start = FlatModel(RunContext(experiment().resolved(), Callback()).classifier).vector
    run(experiment(edit("rule: smallest_magnitude", rounds=3), mixing, "clients.fraction=1.0"), tmp_path / "run")
    mask = Mask.load(tmp_path / "run/masks/edit/client-000000.safetensors")  # the same weights, hence one for all
    changed = (weights(tmp_path / "run") != start)[: mask.size]
    assert not (changed & ~mask.unpack()).any() and changed.any()
    run(experiment(edit("rule: random", rounds=3), mixing, "clients.fraction=1.0"), tmp_path / "random")
    densities = [line["density"] for line in read_metrics(tmp_path / "random")]
    assert densities[0] == pytest.approx(0.1, abs=1e-3) and densities[1] > 0.2
