"""Mask rules that look at gradients: they are shown autograd's, of the right samples."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.experiment import run
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.read import read_metrics
from fedsieve.sieve.calibrate import calibrate
from fedsieve.sieve.mask import Mask
from fedsieve.sieve.rules import RULES, Evidence

Maker = Callable[..., Experiment]

Shown = list[tuple[Evidence, Tensor]]


@pytest.fixture
def by_gradient(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """A rule that keeps what it is shown, and the gradients of that moment."""
    shown: Shown = []

    def rule(evidence: Evidence) -> Tensor:
        gradients = evidence.gradients()
        shown.append((evidence, gradients.clone()))
        return -gradients.abs()

    rule.looks_at = "gradients"  # type: ignore[attr-defined]
    monkeypatch.setitem(RULES, "by_gradient", rule)
    return shown


@pytest.mark.parametrize("scope", ["client", "federated", "server"])
def test_gradients_are_autograds(scope: str, experiment: Maker, by_gradient: Shown, tmp_path: Path) -> None:
    """Of the mean loss on all samples of the client, of all clients, or of all that the server sees."""
    mask = f"{{rule: by_gradient, sparsity: 0.9, scope: {scope}, calibration_rounds: 1, fisher: {{samples: 1000}}}}"
    settings = experiment(
        f"phases=[{{name: a, train: all, rounds: 1, local: {{steps: 1, lr: 0.1}}, mask: {mask}}}]"
    ).resolved()
    run(settings, tmp_path / "run")
    context = RunContext(settings, Callback())
    (line,), parts = read_metrics(tmp_path / "run"), context.partition.clients
    for place, (evidence, gradients) in enumerate(by_gradient):
        assert evidence.client == (sorted(line["clients"])[place] if scope == "client" else None)
        own = context.training if evidence.client is None else context.training[parts[evidence.client]]
        model = context.classifier.eval()
        images = context.transform.evaluation(context.data.train.images[own])
        loss = nn.functional.cross_entropy(model(images), context.data.train.labels[own])
        chosen = [dict(model.named_parameters())[name] for name in evidence.shapes]
        assert [tuple(one.shape) for one in chosen] == list(evidence.shapes.values())
        expected = torch.cat([one.flatten() for one in torch.autograd.grad(loss, chosen)])
        torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
        lowest = expected.abs().argsort(descending=True)[: len(expected) // 20]
        name = "shared" if evidence.client is None else f"client-{evidence.client:06d}"
        assert Mask.load(tmp_path / "run" / "masks" / "a" / f"{name}.safetensors").unpack()[lowest].all()
    assert len(by_gradient) == (3 if scope == "client" else 1)


def test_each_calibration_round_looks_at_fresh_samples(experiment: Maker, by_gradient: Shown, tmp_path: Path) -> None:
    mask = "{rule: by_gradient, sparsity: 0.9, calibration_rounds: 3, damping: 1.0, fisher: {samples: 4}}"
    run(experiment("clients.count=1", f"phases.1.mask={mask}", "phases.*.rounds=1"), tmp_path)
    first, second, third = (gradients for _, gradients in by_gradient)
    assert not torch.equal(first, second) and not torch.equal(second, third)


def test_gradients_work_on_any_module(by_gradient: Shown) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    batches = [(torch.randn(16, 8), torch.randint(0, 3, (16,))) for _ in range(4)]
    mask = calibrate(model, batches, 0.9, rule="by_gradient", rounds=1)
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    gradients = torch.autograd.grad(nn.functional.cross_entropy(model(inputs), labels), list(model.parameters()))
    vector = torch.cat([one.flatten() for one in gradients]).abs()
    largest = vector.argsort(descending=True)[: mask.active - 4]  # one of each tensor is kept alive
    assert mask.unpack()[largest].all() and by_gradient[0][0].client is None
