"""Settings without an effect; the proof is that real runs which differ in one of them end in the same model."""

from pathlib import Path

import pytest

from fedsieve.analysis.applicable import applicable, at_default
from fedsieve.analysis.collection import differing, find_runs, worth_showing
from fedsieve.config.experiment_file import load_experiment, parse_experiment
from fedsieve.experiment import run

SMALL = """
device: cpu
threads: 1
data: {name: digits, image_size: 16, limit: 200}
clients: {count: 2}
phases:
  - name: edit
    train: {blocks: [11]}
    rounds: 1
    local: {steps: 2, batch_size: 8, lr: 0.5}
    mask: {sparsity: 0.5, calibration_rounds: 2, fisher: {samples: 8}}
evaluate: {test: never, sample: 20}
"""
WITHOUT_EFFECT = [  # under these settings, this one
    (["rule=random"], "fisher.samples=4"),
    (["rule=random"], "calibration_rounds=1"),
    (["rule=largest_magnitude"], "fisher.kind=empirical"),
    (["rule=largest_magnitude"], "damping=0.9"),
    (["calibration_rounds=1"], "damping=0.9"),
    (["fisher.kind=empirical"], "fisher.draws=3"),
    ([], "momentum=carry"),
    (["rule=smallest_magnitude", "unit=tensor"], "keep_alive=500"),
]


def model_of(folder: Path, *overrides: str) -> str:
    return run(parse_experiment(SMALL, "small.yaml", list(overrides)), folder)["model_sha256"]


@pytest.mark.parametrize(("base", "changed"), WITHOUT_EFFECT)
def test_what_is_left_out_changes_no_model(base: list[str], changed: str, tmp_path: Path) -> None:
    one, other = ([f"phases.0.mask.{part}" for part in parts] for parts in (base, [*base, changed]))
    settings = [applicable(parse_experiment(SMALL, "small.yaml", overrides)) for overrides in (one, other)]
    assert settings[0] == settings[1]
    assert f"phases.0.mask.{changed.partition('=')[0]}" not in settings[0]
    assert model_of(tmp_path / "one", *one) == model_of(tmp_path / "other", *other)


@pytest.mark.parametrize("changed", ["clients.fraction=0.5", "clients.weighting=equal", "clients.norm_limit=2.0"])
def test_one_client_needs_no_choice_of_clients(changed: str, tmp_path: Path) -> None:
    settings = [applicable(parse_experiment(SMALL, "x", ["clients.count=1", *one])) for one in ([], [changed])]
    assert settings[0] == settings[1]
    assert model_of(tmp_path / "one", "clients.count=1") == model_of(tmp_path / "two", "clients.count=1", changed)


@pytest.mark.parametrize(
    ("base", "changed"),
    [
        ("evaluate.test=end", "evaluate.test=each"),
        ("evaluate.clients=false", "evaluate.clients=true"),
        ("analyze.level=none", "analyze.level=blocks"),
        ("clients.minimum=1", "clients.minimum=2"),
    ],
)
def test_what_is_only_measured_or_refused_changes_no_result(base: str, changed: str, tmp_path: Path) -> None:
    tested = "evaluate.test=end"
    settings = [applicable(parse_experiment(SMALL, "small.yaml", [tested, one])) for one in (base, changed)]
    assert settings[0] == settings[1] and base.partition("=")[0] not in settings[0]
    results = [run(parse_experiment(SMALL, "x", [tested, one]), tmp_path / one) for one in (base, changed)]
    for figure in ("model_sha256", "test_accuracy", "test_loss", "best_val_accuracy", "bytes_up", "bytes_down"):
        assert results[0][figure] == results[1][figure], figure


def test_runs_without_a_test_are_told_apart_from_those_with_one() -> None:
    never, end = (applicable(parse_experiment(SMALL, "x", [f"evaluate.test={when}"])) for when in ("never", "end"))
    assert never == {**end, "evaluate.test": "never"}


UNEQUAL = "clients.split={kind: dirichlet, alpha: 0.5, balanced: false}"
ROBUST = ["phases.0.aggregate=median", "phases.0.mask=null", UNEQUAL]


@pytest.mark.parametrize(("method", "has_effect"), [("fedavg", False), ("fednova", True)])
def test_medians_count_clients_alike_but_fednova_weighs_taus(method: str, has_effect: bool, tmp_path: Path) -> None:
    local = "phases.0.local={epochs: 1, batch_size: 8, lr: 0.1}"  # clients with more samples take more steps
    one = ["clients.count=3", "clients.fraction=1", f"phases.0.method={method}", local, *ROBUST]
    other = [*one, "clients.weighting=equal"]
    first, second = (applicable(parse_experiment(SMALL, "small.yaml", changes)) for changes in (one, other))
    assert (first != second) == ("clients.weighting" in first) == has_effect
    assert (model_of(tmp_path / "one", *one) != model_of(tmp_path / "other", *other)) == has_effect


def test_a_rule_that_is_not_loaded_may_look_at_data() -> None:
    unknown = ["plugins=[mine.py]", "phases.0.mask.rule=mine"]
    first, second = (
        applicable(parse_experiment(SMALL, "small.yaml", [*unknown, f"phases.0.mask.fisher.samples={samples}"]))
        for samples in (8, 16)
    )
    assert first["phases.0.mask.fisher.samples"] == 8 and second["phases.0.mask.fisher.samples"] == 16


def test_the_rest_counts(tmp_path: Path) -> None:
    """Of what is left out under other settings, what has an effect under these."""
    base = applicable(parse_experiment(SMALL, "small.yaml"))
    keys = ["calibration_rounds", "damping", "fisher.kind", "fisher.samples", "fisher.draws", "keep_alive"]
    assert {f"phases.0.mask.{key}" for key in keys} <= base.keys()
    first = model_of(tmp_path / "first")
    for changed in ("phases.0.mask.fisher.samples=4", "phases.0.mask.damping=0.9"):
        assert model_of(tmp_path / changed, changed) != first


def test_a_mask_from_a_file_leaves_nothing_to_choose() -> None:
    named = applicable(parse_experiment(SMALL, "small.yaml", ["phases.0.mask={file: x.safetensors}"]))
    assert {key.removeprefix("phases.0.mask.") for key in named if ".mask." in key} == {
        "file",
        "only",
        "dense",
        "rescale",
    }


def test_what_has_its_default() -> None:
    found = at_default(load_experiment("digits-edit-iid"))
    assert {"phases.1.mask.damping", "phases.1.mask.fisher.kind", "wire.values", "data.augment"} <= found
    assert not found & {"phases.1.mask.sparsity", "phases.1.mask.fisher.samples", "phases.0.name", "phases.1.local.lr"}


def test_of_a_mask_that_only_some_have_its_defaults_are_not_worth_showing(tmp_path: Path) -> None:
    for name, changed in {"dense": "mask=null", "sparse": "mask.damping=0.1", "random": "mask.rule=random"}.items():
        (tmp_path / name).mkdir()
        settings = load_experiment("digits-edit-iid", [f"phases.1.{changed}"]).resolved()
        (tmp_path / name / "experiment.yaml").write_text(settings.to_yaml())
    runs, _ = find_runs([tmp_path])
    shown = ["rule", "sparsity", "calibration_rounds", "fisher.samples"]
    assert worth_showing(runs) == [f"phases.1.mask.{key}" for key in shown]
    assert len(differing(runs)) > len(shown) + 5
    assert "phases.1.mask.fisher.samples" not in next(run for run in runs if run.path.name == "random").settings
