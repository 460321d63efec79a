"""How well the model does for each client, on what it held out or by its class shares."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.experiment import run
from fedsieve.observe.callbacks import Callback
from fedsieve.randomness import numpy_generator
from fedsieve.runs.model_file import load_classifier
from fedsieve.runs.read import read_metrics
from listeners import Listener

Maker = Callable[..., Experiment]


def test_each_client_is_evaluated_on_what_it_held_out(experiment: Maker, tmp_path: Path) -> None:
    settings = experiment(
        "clients.holdout=0.3", "evaluate.clients=true", "clients.split={kind: classes, per_client: 2}"
    )
    result = run(settings, tmp_path / "run")["clients"]
    context = RunContext(settings.resolved(), Callback())
    model, accuracies = load_classifier(tmp_path / "run").eval(), []
    whole = RunContext(
        experiment("clients.split={kind: classes, per_client: 2}").resolved(), Callback()
    ).partition.clients
    for kept, held, own in zip(context.partition.clients, context.held_out, whole, strict=True):
        assert sorted([*kept, *held]) == sorted(own) and len(held) == round(0.3 * len(own))
        images, labels = (
            context.data.train.images[context.training[held]],
            context.data.train.labels[context.training[held]],
        )
        with torch.no_grad():
            right = model(context.transform.evaluation(images)).argmax(dim=1) == labels
        accuracies.append(float(right.float().mean()))
    assert result["accuracies"] == pytest.approx(accuracies)
    assert result["mean"] == pytest.approx(np.mean(accuracies))
    assert result["worst_tenth"] == pytest.approx(min(accuracies))  # of six clients
    assert result["deviation"] == pytest.approx(np.std(accuracies))


def test_without_a_validation_set_clients_evaluate(experiment: Maker, tmp_path: Path) -> None:
    """Validation is on all that clients hold out, together: whoever has more counts more. The best round goes by it."""
    changes = ["data.validation=0", "clients.holdout=0.3", "evaluate.keep=best", "phases.1.stop={patience: 1}"]
    settings = experiment("clients.split={kind: dirichlet, alpha: 0.5, balanced: false}", *changes)
    result = run(settings, tmp_path / "run")
    context = RunContext(settings.resolved(), Callback())
    assert context.held_out is not None and len({len(held) for held in context.held_out}) > 1
    held = context.training[context.held_out.positions]
    with torch.no_grad():
        scores = load_classifier(tmp_path / "run").eval()(context.transform.evaluation(context.data.train.images[held]))
    labels = context.data.train.labels[held]
    assert result["val_accuracy"] == pytest.approx(float((scores.argmax(dim=1) == labels).float().mean()))
    assert result["val_loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(scores, labels)), rel=1e-5)
    lines = read_metrics(tmp_path / "run")
    last = [line["val_accuracy"] for line in lines if line["phase"] == "all"]
    assert result["val_accuracy"] == max(last) and all(line["val_loss"] > 0 for line in lines)


@pytest.mark.parametrize("holdout", [0.0, 0.3])
def test_the_server_calibrates_with_nothing_that_clients_hold_out(experiment: Maker, holdout: float) -> None:
    context = RunContext(experiment(f"clients.holdout={holdout}").resolved(), Callback())
    held = context.training[context.held_out.positions] if context.held_out is not None else np.empty(0, dtype=int)

    def positions(samples: int) -> list[int]:
        """Of the images that the server draws: each is known by its pixels."""
        data = context.server_data(samples, depth=0)
        seen = data.inputs(torch.arange(len(data)), torch.Generator())
        whole = context.transform.evaluation(context.data.train.images)
        return [int((whole == one).flatten(1).all(dim=1).nonzero()[0]) for one in seen]

    assert positions(len(context.training)) == sorted({*context.training.tolist()} - {*held.tolist()})
    if not holdout:  # as it always was
        drawn = numpy_generator(context.experiment.seed, "server samples").permutation(context.training)[:40]
        assert positions(40) == sorted(drawn.tolist())
    else:
        assert len(held) > 0.2 * len(context.training)


def test_without_a_holdout_by_class_shares(experiment: Maker, tmp_path: Path) -> None:
    settings = experiment("evaluate.clients=true", "clients.split={kind: dirichlet, concentration: 0.5}")
    result = run(settings, tmp_path / "run")["clients"]
    context = RunContext(settings.resolved(), Callback())
    with torch.no_grad():
        scores = load_classifier(tmp_path / "run").eval()(context.transform.evaluation(context.data.test.images))
    right, labels = scores.argmax(dim=1) == context.data.test.labels, context.data.train.labels[context.training]
    for client, own in enumerate(context.partition.clients):
        expected = 0.0
        for position in own:
            expected += float(right[context.data.test.labels == labels[position]].float().mean()) / len(own)
        assert result["accuracies"][client] == pytest.approx(expected, abs=1e-6)


def test_tiny_clients_may_have_nothing_to_hold_out(experiment: Maker, tmp_path: Path) -> None:
    listener = Listener()
    settings = experiment("clients.count=60", "clients.fraction=0.1", "clients.holdout=0.1", "evaluate.clients=true")
    result = run(settings, tmp_path / "run", callback=listener)["clients"]
    assert result["accuracies"] == [None] * 60 and result["mean"] is None
    assert any("leaves 60 clients without" in note for note in listener.notes)
