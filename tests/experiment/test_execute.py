"""The loop as a whole, against a plain torch loop and against what it promises."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor, nn

from fedsieve.config.local_settings import LocalSettings
from fedsieve.config.schema import Experiment
from fedsieve.config.settings import option
from fedsieve.context import RunContext
from fedsieve.errors import InputError, MachineError, RunError
from fedsieve.experiment import evaluate_run, run
from fedsieve.federate.batches import batches
from fedsieve.federate.methods import METHODS
from fedsieve.federate.methods.fedavg import FedAvg
from fedsieve.federate.preparation import Preparation
from fedsieve.federate.types import State
from fedsieve.model.flat import FlatModel
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.model_file import load_classifier
from fedsieve.runs.read import read_experiment, read_metrics
from listeners import Listener

Maker = Callable[..., Experiment]


def weights(folder: Path) -> torch.Tensor:
    return FlatModel(load_classifier(folder)).vector


def scheduler_of(name: str, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Torch's own schedulers, stepped after each batch."""
    schedulers = torch.optim.lr_scheduler
    if name == "cosine":
        return schedulers.CosineAnnealingLR(optimizer, steps)
    return (
        schedulers.LinearLR(optimizer, 1.0, 1e-12, steps) if name == "linear" else schedulers.ConstantLR(optimizer, 1.0)
    )


def optimizer_like(local: LocalSettings, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Torch's own."""
    if option(local.optimizer) == "adamw":
        given = local.optimizer.adamw
        betas = given.beta1, given.beta2
        return torch.optim.AdamW(trained, local.lr, betas, given.eps, local.weight_decay, foreach=False)
    return torch.optim.SGD(trained, local.lr, local.momentum, 0, local.weight_decay, local.nesterov)


def plain_torch(settings: Experiment) -> torch.Tensor:
    """Centralized training as in a notebook: torch's optimizers and schedulers, no fedsieve loop."""
    settings = settings.resolved()
    context = RunContext(settings, Callback())
    model, data = context.classifier, context.data.train
    samples = context.training[context.partition.clients[0]]
    inputs = context.transform.evaluation(data.images[samples])
    labels = data.labels[samples]
    for phase in settings.phases:
        trained = list((model.head if phase.train == "head" else model).parameters())
        for parameter in model.parameters():
            parameter.requires_grad_(any(parameter is one for one in trained))
        local = phase.local
        optimizer = optimizer_like(local, trained)
        order = [
            batch
            for round in range(1, phase.rounds + 1)
            for epoch in batches(len(samples), local, settings.seed, phase.name, round, 0)
            for batch in epoch
        ]
        scheduler = scheduler_of(local.schedule, optimizer, len(order))
        for batch in order:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            if local.clip_norm:
                nn.utils.clip_grad_norm_(trained, local.clip_norm)
            optimizer.step()
            scheduler.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(
    ("key", "clip"),
    [("nesterov=false", "null"), ("nesterov=true", "0.5"), ("optimizer={adamw: {beta2: 0.99, eps: 0.001}}", "0.5")],
)
def test_one_client_is_a_plain_torch_loop(
    experiment: Maker, tmp_path: Path, schedule: str, key: str, clip: str
) -> None:
    changes = [f"phases.*.local.{change}" for change in (f"schedule={schedule}", key)]
    settings = experiment("clients.count=1", "clients.fraction=1.0", *changes, f"phases.1.local.clip_norm={clip}")
    run(settings, tmp_path / "run")
    ours, plain = weights(tmp_path / "run"), plain_torch(settings)
    start = FlatModel(RunContext(settings.resolved(), Callback()).classifier).vector
    assert (ours - plain).abs().max() < 1e-6
    assert (plain - start).abs().max() > 1e-3  # there was something to get wrong


def test_all_clients_alike_is_one_client(experiment: Maker, tmp_path: Path) -> None:
    """Full-batch gradient steps: averaging the updates of equal-sized clients is a step on all the data."""
    plain = ["phases.0.local={steps: 1, batch_size: 1000, lr: 0.1, momentum: 0.0, weight_decay: 0.0}"]
    plain += ["phases.0.rounds=5", "phases.1.rounds=1"]
    for name, count in (("one", 1), ("many", 6)):
        run(
            experiment(*plain, f"clients.count={count}", "clients.fraction=1.0", "phases.1.local.lr=0.0"),
            tmp_path / name,
        )
    assert (weights(tmp_path / "one") - weights(tmp_path / "many")).abs().max() < 1e-6


def test_weighting_counts_samples_or_clients(experiment: Maker, tmp_path: Path) -> None:
    """With unequal clients, one full-batch step each: `samples` is the pooled gradient, `equal` is not."""
    settings = [
        "clients.split={kind: dirichlet, alpha: 0.5, balanced: false}",
        "clients.fraction=1.0",
        "phases.0.local={steps: 1, batch_size: 1000, lr: 0.1, momentum: 0.0, weight_decay: 0.0}",
        "phases.0.rounds=1",
        "phases.1.rounds=1",
        "phases.1.local.lr=0.0",
    ]
    run(experiment(*settings, "clients.weighting=samples"), tmp_path / "samples")
    run(experiment(*settings, "clients.weighting=equal"), tmp_path / "equal")
    run(experiment(*settings, "clients.count=1", "clients.split=iid"), tmp_path / "pooled")
    pooled = weights(tmp_path / "pooled")
    assert (weights(tmp_path / "samples") - pooled).abs().max() < 1e-6
    assert (weights(tmp_path / "equal") - pooled).abs().max() > 1e-4


def test_the_run_folder_keeps_the_contract(experiment: Maker, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(experiment("evaluate.test=each"), out)
    lines = read_metrics(out)
    assert [(line["phase"], line["round"]) for line in lines] == [("head", r) for r in (1, 2, 3)] + [
        ("all", 1),
        ("all", 2),
    ]
    for line in lines:
        assert {"clients", "train_loss", "val_accuracy", "val_loss", "drift_mean", "seconds"} <= line.keys()
        assert len(line["clients"]) == len(set(line["clients"])) == 3
        assert 0 <= line["val_accuracy"] <= 1 and line["drift_mean"] > 0 and "test_accuracy" in line
    head, everything = 64 * 4 + 4, len(weights(out))
    assert all(3 * 4 * head < line["bytes_up"] < 3 * 4 * head + 2000 for line in lines[:3])  # and headers
    assert all(3 * 4 * everything < line["bytes_up"] < 3 * 4 * everything + 2000 for line in lines[3:])
    assert result == json.loads((out / "result.json").read_text())
    assert result["model_sha256"] == hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    assert result["bytes_up"] == sum(line["bytes_up"] for line in lines)
    assert [phase["name"] for phase in result["phases"]] == ["head", "all"]
    best = max(lines[:3], key=lambda line: (line["val_accuracy"], -line["val_loss"]))
    assert result["phases"][0]["best_round"] == best["round"]
    assert result["phases"][0]["best_val_loss"] == best["val_loss"]
    assert result["test_accuracy"] == lines[-1]["test_accuracy"] > 0.5  # of four classes
    measured = evaluate_run(out)
    assert measured["test_accuracy"]["measured"] == result["test_accuracy"]
    assert measured["val_loss"]["measured"] == pytest.approx(result["val_loss"], abs=1e-6)


def test_same_experiment_same_model(experiment: Maker, tmp_path: Path) -> None:
    hashes = [run(experiment(), tmp_path / name)["model_sha256"] for name in ("a", "b")]
    assert hashes[0] == hashes[1]
    assert run(experiment("seed=8"), tmp_path / "c")["model_sha256"] != hashes[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [(["clients.count=1"], True), (["clients.count=1", "threads=2"], False), ([], False)],
)
def test_a_result_that_depends_on_the_cores_is_said_to(
    changes: list[str], says: bool, experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    listener = Listener()
    settings = experiment("threads=auto", "workers=1", "phases.0.rounds=1", "phases.1.rounds=1", *changes)
    run(settings, tmp_path, callback=listener)
    assert any("threads: 2, the number of cores" in note for note in listener.notes) == says
    assert read_experiment(tmp_path).threads == (1 if not changes else 2)


def test_features_and_images_train_the_same_head(experiment: Maker, tmp_path: Path, monkeypatch) -> None:
    """The fast path (cached features) against the slow one (the frozen backbone every time)."""
    from fedsieve.data.transform import Transform

    settings = experiment("phases.1.local.lr=0.0", "phases.1.rounds=1")
    run(settings, tmp_path / "features")
    monkeypatch.setattr(Transform, "is_random", property(lambda self: True))
    run(settings, tmp_path / "images")
    difference = (weights(tmp_path / "features") - weights(tmp_path / "images")).abs().max()
    assert difference < 1e-6


def test_blocks_alone_change(experiment: Maker, tmp_path: Path) -> None:
    settings = experiment("phases.1.train={blocks: [1], head: true}")
    run(settings, tmp_path / "run")
    before = FlatModel(RunContext(settings.resolved(), Callback()).classifier).tensors()
    after = FlatModel(load_classifier(tmp_path / "run")).tensors()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith(("backbone.blocks.1.", "head."))}


def test_keep_best_hands_on_the_best_round(experiment: Maker, tmp_path: Path) -> None:
    """A learning rate that spoils the model: the last round is worse than the best, and `keep` decides."""
    spoil = ["phases.0.local.lr=30.0", "phases.0.local.schedule=constant", "phases.0.rounds=8"]
    spoil += ["phases.1.local.lr=0.0", "phases.1.rounds=1", "evaluate.test=each"]
    results = {keep: run(experiment(*spoil, f"evaluate.keep={keep}"), tmp_path / keep) for keep in ("last", "best")}
    lines = {keep: read_metrics(tmp_path / keep) for keep in results}
    best = results["best"]["phases"][0]["best_round"]
    assert best < 8
    assert lines["best"][-1]["val_accuracy"] == lines["best"][best - 1]["val_accuracy"]
    assert lines["last"][-1]["val_accuracy"] == lines["last"][7]["val_accuracy"] < lines["best"][-1]["val_accuracy"]


def test_evaluation_can_be_rare_sampled_or_left_out(experiment: Maker, tmp_path: Path) -> None:
    rare = run(experiment("evaluate.every=2", "evaluate.sample=20"), tmp_path / "rare")
    known = [line["val_accuracy"] is not None for line in read_metrics(tmp_path / "rare")]
    assert known == [False, True, True, False, True]  # each second round, and the last of a phase
    assert (read_metrics(tmp_path / "rare")[-1]["val_accuracy"] * 20) % 1 == 0
    assert (rare["val_accuracy"] * 60) % 1 == pytest.approx(0, abs=1e-9)  # the end uses all 60
    none = run(experiment("data.validation=0.0", "evaluate.test=never"), tmp_path / "none")
    assert none["test_accuracy"] is None and none["best_val_accuracy"] is None


def test_the_test_set_has_no_influence(experiment: Maker, images: Path, tmp_path: Path) -> None:
    """Another test set, the same model to the last bit."""
    with np.load(images) as file:
        arrays = dict(file)
    arrays["x_test"] = 255 - arrays["x_test"][::-1]
    other = tmp_path / "other.npz"
    np.savez(other, **arrays)
    hashes = []
    for name, data in (("a", images), ("b", other)):
        settings = experiment(f"data.path={data}", "evaluate.test=each", "evaluate.keep=best")
        hashes.append(run(settings, tmp_path / name)["model_sha256"])
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("keep", ["last", "best"])
def test_a_phase_that_makes_a_ridge_head_worse_is_warned_of(experiment: Maker, tmp_path: Path, keep: str) -> None:
    class Warned(Callback):
        def __init__(self) -> None:
            self.texts: list[str] = []

        def warning(self, text: str) -> None:
            self.texts.append(text)

    for rate, is_worse in ((1e-9, False), (200.0, True)):
        warned, out = Warned(), tmp_path / f"{rate}"
        phases = f"phases=[{{name: more, train: head, rounds: 2, local: {{epochs: 1, lr: {rate}}}}}]"
        run(experiment("model.head={ridge: {penalty: 3.0}}", phases, f"evaluate.keep={keep}"), out, callback=warned)
        before, *after = [line["val_accuracy"] for line in read_metrics(out)]
        kept = max(after) if keep == "best" else after[-1]
        assert (kept < before) == is_worse
        told = f"phase more has made the ridge head worse: validation accuracy {before:.1%} before it, {kept:.1%} after"
        assert [text[: len(told)] for text in warned.texts] == [told] * is_worse


def test_a_head_that_follows_a_trained_backbone_is_no_ridge_head_any_more(experiment: Maker, tmp_path: Path) -> None:
    warned: list[str] = []
    observer = Callback()
    observer.warning = warned.append  # type: ignore[method-assign]
    phases = (
        "phases=[{name: all, train: all, rounds: 1, local: {epochs: 1, lr: 0.001}}, "
        "{name: more, train: head, rounds: 1, local: {epochs: 1, lr: 200}}]"
    )
    run(experiment("model.head={ridge: {penalty: 3.0}}", phases), tmp_path / "run", callback=observer)
    lines = read_metrics(tmp_path / "run")
    assert lines[-1]["val_accuracy"] < lines[-2]["val_accuracy"]
    assert not [text for text in warned if "ridge head" in text]


def test_a_full_disk_is_not_blamed_on_an_exploded_loss(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's fault stays one, also after a loss that exploded: a sweep must not count it as a failed trial."""

    class Full(FedAvg):
        def start(self, weights: Tensor, preparation: Preparation) -> State:
            raise MachineError("the disk is full")

    monkeypatch.setitem(METHODS, "full", Full)
    settings = experiment("phases.0.local.lr=1e6", "phases.0.rounds=1", "phases.1.method=full")
    with pytest.raises(MachineError, match=r"^the disk is full$"):
        run(settings, tmp_path / "run")
    assert read_metrics(tmp_path / "run")[-1]["val_loss"] > 1000


def test_ridge_is_exact_whatever_the_split(experiment: Maker, tmp_path: Path) -> None:
    """The federated closed form against scikit-learn's ridge on the pooled features."""
    hashes = set()
    for name, split in (("iid", "iid"), ("classes", "{kind: classes, per_client: 1}")):
        settings = experiment("model.head={ridge: {penalty: 3.0}}", "phases=[]", f"clients.split={split}")
        result = run(settings, tmp_path / name)
        hashes.add(result["test_accuracy"])
        context = RunContext(settings.resolved(), Callback())
        with torch.no_grad():
            images = context.data.train.images[context.training]
            x = context.classifier.eval().backbone(context.transform.evaluation(images)).numpy()
        y = context.data.train.labels[context.training].numpy()
        reference = Ridge(alpha=3.0).fit(x.astype(np.float64), np.eye(4)[y])
        head = load_classifier(tmp_path / name).head
        np.testing.assert_allclose(head.weight.detach().numpy(), reference.coef_, atol=1e-5)
        np.testing.assert_allclose(head.bias.detach().numpy(), reference.intercept_, atol=1e-5)
        assert [line["clients"] for line in read_metrics(tmp_path / name)] == [list(range(6))]
    assert len(hashes) == 1


def test_init_starts_from_another_run(experiment: Maker, tmp_path: Path) -> None:
    run(experiment(), tmp_path / "first")
    still = [f"model.init={tmp_path / 'first'}", "phases.0.local.lr=0.0", "phases.1.local.lr=0.0"]
    run(experiment(*still), tmp_path / "second")
    assert torch.equal(weights(tmp_path / "first"), weights(tmp_path / "second"))
    with pytest.raises(InputError, match=r"head\.0\.weight"):
        run(experiment(*still, "model.head={mlp: {hidden: 8}}"), tmp_path / "third")


def test_a_loss_that_explodes_stops_the_run(experiment: Maker, tmp_path: Path) -> None:
    settings = experiment("phases.1.local.lr=1.0e+30", "phases.1.rounds=3", "phases.1.local.schedule=constant")
    with pytest.raises(RunError, match=r"phase all, round \d: 0 of 3 .* client \d: the loss"):
        run(settings, tmp_path / "run")
    kept = sorted((tmp_path / "run" / "checkpoints").glob("*"))
    assert kept, "the last good checkpoint stays"
    from fedsieve.runs.checkpoint import load

    assert torch.isfinite(load(kept[-1]).vector).all()
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_loss_that_explodes_only_in_evaluation_stops_the_run(experiment: Maker, tmp_path: Path) -> None:
    """One step far away: the training loss was computed before it and is fine."""
    settings = experiment("phases.1.local={steps: 1, lr: 1.0e+14}", "phases.1.rounds=1")
    with pytest.raises(RunError, match=r"loss became nan|not finite"):
        run(settings, tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()
