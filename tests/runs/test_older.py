"""Runs that an older version left in `older/`, made when `clients.combine` was one key for all phases."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedsieve.analysis.report.watch import Watch
from fedsieve.config.experiment_file import load_experiment
from fedsieve.config.settings import option
from fedsieve.model.vit import ViT, ViTShape, initialize
from fedsieve.runs.read import read_experiment, read_metrics, read_result

HERE = Path(__file__).parent / "older"
FINISHED = ("active", "mixing")  # of the second the model is not kept


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A copy of the folders, which may be written to."""
    return shutil.copytree(HERE, tmp_path / "older")


@pytest.fixture
def start(tmp_path: Path) -> str:
    """The backbone that the runs started from, as an override."""
    network = ViT(ViTShape(image_size=8, patch_size=4, width=64, depth=1, heads=1, hidden=16))
    initialize(network, torch.Generator().manual_seed(0))
    save_file(network.state_dict(), tmp_path / "start.safetensors")
    return f"model.backbone={tmp_path / 'start.safetensors'}"


def test_old_keys_are_translated() -> None:
    active, mixing = (read_experiment(HERE / name) for name in FINISHED)
    assert [(phase.method, phase.aggregate) for phase in active.phases] == [("fedavg", "active")] * 2
    assert [(option(phase.method), phase.aggregate) for phase in mixing.phases] == [("fisher_mixing", "mean")] * 2
    assert mixing.phases[1].method.fisher_mixing.fisher.samples == 8
    assert load_experiment(str(HERE / "active" / "experiment.yaml")) == active


def test_report_compare_and_watch_read_them(fedsieve: Callable, older: Path) -> None:
    paths = [str(older / name) for name in FINISHED]
    assert fedsieve("report", *paths, "--out", "page.html")[0] == 0 and Path("page.html").stat().st_size > 10_000
    code, printed, _ = fedsieve("compare", *paths, "--json")
    assert code == 0
    accuracies = {group["figures"]["test_accuracy"]["mean"] for group in json.loads(printed)["groups"]}
    assert accuracies == {read_result(older / name)["test_accuracy"] for name in FINISHED}
    watched = json.dumps(Watch(older).data())
    assert all(f'"{name}"' in watched or f"/{name}" in watched for name in (*FINISHED, "unfinished"))


def test_evaluate_and_export_read_their_model(fedsieve: Callable, older: Path) -> None:
    code, printed, _ = fedsieve("evaluate", str(older / "active"), "--json")
    scores = json.loads(printed)
    assert code == 0 and scores["test_accuracy"]["measured"] == pytest.approx(scores["test_accuracy"]["recorded"])
    assert fedsieve("export", str(older / "active"), "--to", "exported")[0] == 0
    assert Path("exported/config.json").exists()


def test_a_run_starts_from_their_model(fedsieve: Callable, older: Path, start: str) -> None:
    file, init = str(older / "active" / "experiment.yaml"), f"model.init={older / 'active'}"
    assert fedsieve("run", file, init, start, "phases.*.rounds=1", "--out", "next")[0] == 0
    assert len(read_metrics(Path("next"))) == 2


# One of two clients comes late and gets its own mask from the phase's start, whose weights were not counted once. They
# differ from the current ones where a broadcast of one round does.
WITH_START = {("active", "edit", 2): 1.5}


@pytest.mark.parametrize("name", FINISHED)
def test_their_experiment_can_be_run_again(name: str, fedsieve: Callable, older: Path, start: str) -> None:
    """The same figures, except the last bits, which depend on the machine."""
    file = str(older / name / "experiment.yaml")
    assert fedsieve("run", file, start, "--out", "again")[0] == 0
    for new, old in zip(read_metrics(Path("again")), read_metrics(older / name), strict=True):
        for key in ("train_loss", "val_loss", "drift_mean"):
            assert new[key] == pytest.approx(old[key], rel=1e-3)
        down = old["bytes_down"] * WITH_START.get((name, new["phase"], new["round"]), 1.0)
        assert new["clients"] == old["clients"] and new["bytes_down"] == pytest.approx(down, rel=0.01)
    assert fedsieve("mask", file, start, "phases.0.rounds=1", "--out", "mask")[0] == 0
    assert Path("mask/mask.safetensors").exists()


def test_an_unfinished_one_needs_the_version_that_began_it(fedsieve: Callable, older: Path) -> None:
    run = older / "unfinished"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, _, said = fedsieve("run", str(run / "experiment.yaml"), "--out", str(run), "--resume")
    assert code == 1 and said.startswith("error: ")
    assert "was made by another version of fedsieve; finish the run with that version, or start it anew" in said
    assert {path: path.read_bytes() for path in before} == before
