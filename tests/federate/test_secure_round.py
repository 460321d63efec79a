"""Secure sums in whole runs: what they add up to, and when they are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedsieve.config.schema import Experiment
from fedsieve.config.settings import Settings
from fedsieve.errors import InputError, RunError
from fedsieve.experiment import run
from fedsieve.federate.aggregators import AGGREGATORS
from fedsieve.model.flat import FlatModel
from fedsieve.runs.model_file import load_classifier
from fedsieve.runs.read import read_metrics
from listeners import Listener

Maker = Callable[..., Experiment]


def edit(mask: str, rounds: int = 2) -> str:
    mask = mask if "file" in mask else f"sparsity: 0.9, calibration_rounds: 1, fisher: {{samples: 40}}, {mask}"
    local = "local: {epochs: 1, batch_size: 16, lr: 0.02}"
    return f"phases=[{{name: edit, train: backbone, rounds: {rounds}, {local}, mask: {{{mask}}}}}]"


def weights(folder: Path) -> Tensor:
    return FlatModel(load_classifier(folder)).vector


class OpenAverage:
    """Adds rounded updates where everybody sees them."""

    needs_all = False

    def __init__(self, settings: Settings, weights: Tensor) -> None:
        self.sum, self.total = torch.zeros(len(weights), dtype=torch.int64), 0.0

    def add(self, update) -> None:
        where = slice(None) if update.mask is None else update.mask.positions
        self.sum[where] += (update.vectors["delta"].double() * update.weight * 2.0**30).round().long()
        self.total += update.weight

    def finish(self) -> Tensor:
        return self.sum.double() / 2.0**30 / self.total


@pytest.mark.parametrize("weighting", ["samples", "equal"])
@pytest.mark.parametrize("mask", [None, "scope: server"])
def test_zero_sum_is_the_quantized_plain_sum(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: str | None, weighting: str
) -> None:
    """Exactly: what the server gets from noise is what adding rounded updates in the open gives."""
    changes = [f"clients.weighting={weighting}", *([edit(mask)] if mask else [])]
    listener, settings = Listener(), experiment(*changes, "clients.secure={zero_sum: {bits: 30}}")
    secret = run(settings, tmp_path / "secret", callback=listener)
    assert run(settings, tmp_path / "again")["model_sha256"] == secret["model_sha256"]

    monkeypatch.setitem(AGGREGATORS, "mean", OpenAverage)
    run(experiment(*changes), tmp_path / "open")
    assert torch.equal(weights(tmp_path / "secret"), weights(tmp_path / "open"))
    for hidden, plain in zip(read_metrics(tmp_path / "secret"), read_metrics(tmp_path / "open"), strict=True):
        assert hidden["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-6)
        assert hidden["drift_mean"] == pytest.approx(plain["drift_mean"], rel=1e-6)
        assert "cosine" not in hidden and "drift" not in hidden and "cosine" in plain
        assert hidden["bytes_up"] > 1.7 * plain["bytes_up"]  # 64 bits for 32, and keys
    assert any("nobody sees single updates" in note for note in listener.notes)


def test_who_leaves_a_secret_round_is_left_out_and_it_is_done_again(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum over those who stay is the open sum without those who leave."""
    failures, listener = ["clients.fail_rate=0.2", "clients.count=8"], Listener()
    run(experiment(*failures, "clients.secure={zero_sum: {bits: 30}}"), tmp_path / "secret", callback=listener)
    monkeypatch.setitem(AGGREGATORS, "mean", OpenAverage)
    run(experiment(*failures), tmp_path / "open")
    assert torch.equal(weights(tmp_path / "secret"), weights(tmp_path / "open"))
    hidden, plain = (read_metrics(tmp_path / name) for name in ("secret", "open"))
    assert [line["failed"].keys() for line in hidden] == [line["failed"].keys() for line in plain]
    assert any(line["failed"] for line in hidden) and any("was left out" in warning for warning in listener.warnings)
    undisturbed = min(line["bytes_up"] for line in hidden if not line["failed"])
    assert all(line["bytes_up"] > 1.5 * undisturbed for line in hidden if line["failed"])  # all was sent again


def test_a_secret_round_with_too_few_left_ends_the_run(experiment: Maker, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"clients are left, and clients\.secure: zero_sum needs 3 .* single updates"):
        run(experiment("clients.secure=zero_sum", "clients.fail_rate=0.5"), tmp_path / "run")


def test_a_sum_that_could_overflow_is_refused(experiment: Maker, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"set clients\.secure=\{zero_sum: \{bits: N\}\} with a smaller N"):
        run(experiment("clients.secure={zero_sum: {bits: 48}}", "phases.0.local.lr=3e4"), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([edit("rule: random")], "use mask.scope: server or federated"),
        ([edit("rule: random, scope: server, refresh: epoch")], "use refresh: once or round"),
        ([edit("scope: server, refresh: round, momentum: leak")], "use reset or carry"),
        (["model.head=ridge"], "use linear or mlp"),
        (["wire.values=int8"], "use wire.values: float32"),
        (["phases.*.method=fisher_mixing"], "use another method or secure: none"),
        (["clients.fraction=0.1"], "needs at least 3 clients per round, and there are 1"),
        (["clients.fraction=0.34"], "needs at least 3 clients per round, and there are 2"),
    ],
)
def test_what_does_not_go_with_zero_sum(experiment: Maker, changes: list[str], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        experiment("clients.secure=zero_sum", *changes)
