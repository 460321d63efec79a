"""What the page about runs shows: groups over seeds, means with intervals, names, and what is said of odd runs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedsieve.analysis.collection import find_runs
from fedsieve.analysis.report import overview as overview_module
from fedsieve.analysis.report.overview import BINS, POINTS, curve, overview, thinned
from fedsieve.config.experiment_file import load_experiment, parse_experiment

ROUNDS = 40  # of digits-edit-iid
PHASE = dict.fromkeys(("best_round", "best_val_accuracy", "best_val_loss", "test_accuracy", "test_loss"))
PHASE |= {"name": "head", "rounds": 1, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0}  # of a result.json


def line(place: int, **others: Any) -> dict[str, Any]:
    phase, round = ("head", place) if place <= 30 else ("edit", place - 30)
    told = {"phase": phase, "round": round, "seconds": 0.5, "bytes_up": 100, "bytes_down": 300, "train_loss": 1 / place}
    return {**told, "val_accuracy": place / 50, "val_loss": 2 / place, "drift_mean": 0.1, "clients": [0], **others}


def made(
    folder: Path, *overrides: str, rounds: int = ROUNDS, accuracy: float | None = 0.9, data: str = "x", **others: Any
) -> Path:
    """A folder as a run leaves it after so many rounds; finished if it has an accuracy."""
    folder.mkdir(parents=True)
    (folder / "experiment.yaml").write_text(load_experiment("digits-edit-iid", list(overrides)).resolved().to_yaml())
    lines = [line(place, **others) for place in range(1, rounds + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    if accuracy is not None:
        result = {"test_accuracy": accuracy, "test_loss": 0.3, "best_val_accuracy": 0.8, "bytes_up": 5, "bytes_down": 6}
        result |= {
            "seconds": 7.0,
            "seed": 42,
            "model_sha256": "",
            "phases": [PHASE],
            "val_accuracy": 0.8,
            "val_loss": 0.4,
        }
        result |= {"data_fingerprint": data}
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def shown(*paths: Path) -> dict[str, Any]:
    runs, problems = find_runs(paths)
    data = overview(runs, problems)
    json.dumps(data, allow_nan=False)
    return data


def test_seeds_are_one_group_with_their_mean_and_students_interval(tmp_path: Path) -> None:
    accuracies = [0.81, 0.85, 0.92]
    for seed, accuracy in enumerate(accuracies):
        made(tmp_path / f"sparse/seed-{seed}", f"seed={seed}", accuracy=accuracy, val_accuracy=accuracy / 2)
    made(tmp_path / "dense", "phases.1.local.lr=0.5")
    groups = {group["name"]: group for group in shown(tmp_path)["groups"]}
    assert groups.keys() == {"sparse", "dense"} and groups["sparse"]["seeds"] == [0, 1, 2]
    low, high = stats.t.interval(0.95, 2, np.mean(accuracies), stats.sem(accuracies))
    mean, margin, count = groups["sparse"]["figures"]["test_accuracy"]
    assert (mean, margin, count) == (pytest.approx(np.mean(accuracies)), pytest.approx((high - low) / 2, rel=1e-4), 3)
    assert groups["dense"]["figures"]["test_accuracy"] == [0.9, None, 1]
    by_round = groups["sparse"]["curves"]["val_accuracy"]
    assert by_round["x"] == list(range(1, ROUNDS + 1)) and set(by_round["n"]) == {3}
    assert by_round["margin"][0] == pytest.approx((high - low) / 4, rel=1e-4)
    assert "margin" not in groups["dense"]["curves"]["val_accuracy"]


def test_what_differs_is_told_apart_from_what_is_common(tmp_path: Path) -> None:
    made(tmp_path / "a"), made(tmp_path / "b", "phases.1.local.lr=0.5")
    data = shown(tmp_path)
    assert data["differing"] == ["phases.1.local.lr"]
    assert [group["settings"] for group in data["groups"]] == [
        {"phases.1.local.lr": "2.0"},
        {"phases.1.local.lr": "0.5"},
    ]
    assert data["common"]["data.name"] == "digits" and "seed" not in data["common"]


def test_an_unfinished_run_says_how_far_it_is_and_has_its_curves(tmp_path: Path) -> None:
    made(tmp_path / "run", rounds=12, accuracy=None)
    (group,) = shown(tmp_path)["groups"]
    assert group["state"] == f"unfinished: round 12 of {ROUNDS}" and not group["finished"]
    assert group["figures"]["test_accuracy"] is None and len(group["curves"]["val_loss"]["x"]) == 12


def test_a_run_that_has_not_begun_is_shown_as_such(tmp_path: Path) -> None:
    made(tmp_path / "run", rounds=0, accuracy=None)
    (group,) = shown(tmp_path)["groups"]
    assert group["state"] == f"unfinished: round 0 of {ROUNDS}" and group["phases"] == []


def test_a_group_that_is_finished_in_part_says_so(tmp_path: Path) -> None:
    made(tmp_path / "seed-1", "seed=1"), made(tmp_path / "seed-2", "seed=2", rounds=3, accuracy=None)
    (group,) = shown(tmp_path)["groups"]
    assert group["state"] == "1 of 2 finished" and group["figures"]["test_accuracy"][2] == 1
    assert group["curves"]["val_accuracy"]["n"] == [2] * 3 + [1] * (ROUNDS - 3)
    assert group["name"] == tmp_path.name


def test_phases_begin_where_the_rounds_of_those_before_end(tmp_path: Path) -> None:
    made(tmp_path / "run")
    (group,) = shown(tmp_path)["groups"]
    assert group["phases"] == [["head", 1], ["edit", 31]]
    assert group["time"] == [["head", 15.0], ["edit", 5.0]]


def test_bytes_are_added_up_round_by_round(tmp_path: Path) -> None:
    made(tmp_path / "run")
    (group,) = shown(tmp_path)["groups"]
    assert group["sent"]["x"] == [400 * place for place in range(1, ROUNDS + 1)]
    assert group["sent"]["round"] == list(range(1, ROUNDS + 1))


def test_a_seed_twice_is_counted_once_and_named(tmp_path: Path) -> None:
    made(tmp_path / "a", accuracy=None, rounds=5), made(tmp_path / "b")
    data = shown(tmp_path)
    assert data["groups"][0]["seeds"] == [42] and data["groups"][0]["finished"]
    assert len(data["warnings"]) == 1 and str(tmp_path / "a") in data["warnings"][0]


def test_runs_of_different_data_sets_are_warned_of(tmp_path: Path) -> None:
    made(tmp_path / "a"), made(tmp_path / "b", "data.name=npz", "data.path=x.npz")
    (warning,) = shown(tmp_path)["warnings"]
    assert "different data sets" in warning and "digits" in warning and "/x.npz" in warning


def test_seeds_whose_data_changed_are_warned_of_even_beside_an_unfinished_one(tmp_path: Path) -> None:
    made(tmp_path / "seed-0", "seed=0", accuracy=None)
    made(tmp_path / "seed-1", "seed=1"), made(tmp_path / "seed-2", "seed=2", data="y")
    data = shown(tmp_path)
    (warning,) = data["warnings"]
    assert data["groups"][0]["seeds"] == [0, 1, 2]
    assert warning == f"digits held other images or labels in {tmp_path}/seed-2 than in {tmp_path}/seed-1"


def test_names_that_seeds_would_share_stay_apart(tmp_path: Path) -> None:
    made(tmp_path / "x/seed-1", "seed=1"), made(tmp_path / "x/seed-2", "seed=2", "phases.1.local.lr=0.5")
    assert [group["name"] for group in shown(tmp_path)["groups"]] == ["seed-1", "seed-2"]


def test_the_commands_repeat_each_seed_from_one_file(tmp_path: Path) -> None:
    made(tmp_path / "my run/seed-1", "seed=1", "threads=1"), made(tmp_path / "my run/seed-2", "seed=2", "threads=2")
    made(tmp_path / "b", "phases.1.local.lr=0.5")
    groups = {group["name"]: group for group in shown(tmp_path)["groups"]}
    assert [run["command"] for run in groups["my run"]["runs"]] == [
        "fedsieve run my-run.yaml --out runs/my-run/seed-1",
        "fedsieve run my-run.yaml seed=2 threads=2 --out runs/my-run/seed-2",
    ]
    assert [run["command"] for run in groups["b"]["runs"]] == ["fedsieve run b.yaml --out runs/b"]
    assert parse_experiment(groups["b"]["yaml"], "b.yaml").phases[1].local.lr == 0.5


def test_who_holds_what_is_kept_once_for_groups_that_share_it(tmp_path: Path) -> None:
    split = {"classes": ["a", "b", "c"], "count": 300, "clients": [{"1": 7}, {"0": 2, "2": 3}] + [{"0": 1}] * 198}
    for name, rate in (("x", 0.5), ("y", 0.25), ("old", 0.125)):
        folder = made(tmp_path / name, f"phases.1.local.lr={rate}")
        if name != "old":
            (folder / "split.json").write_text(json.dumps(split))
    data = shown(tmp_path)
    assert [group["split"] for group in data["groups"]] == [None, 0, 0]
    assert data["splits"][0]["rows"][:3] == [",7", "2,,3", "1"]
    assert data["splits"][0]["count"] == 300 and len(data["splits"][0]["rows"]) == 100


def test_a_damaged_split_is_left_out_with_a_warning(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    for text in ("", "[]", '{"classes": 3}', '{"classes": ["a"], "count": 1, "clients": [3]}'):
        (folder / "split.json").write_text(text)
        data = shown(tmp_path)
        assert data["splits"] == [] and len(data["groups"]) == 1
        (warning,) = data["warnings"]
        assert f"{folder}/split.json is damaged" in warning


def test_clients_accuracies_are_counted_in_bins(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    result = json.loads((folder / "result.json").read_text())
    spread = {"mean": 0.5, "worst_tenth": 0.0, "deviation": 0.4, "accuracies": [0.0, 0.02, 0.5, 1.0, None]}
    (folder / "result.json").write_text(json.dumps({**result, "clients": spread}))
    clients = shown(tmp_path)["groups"][0]["clients"]
    assert clients["histogram"] == [2, *[0] * 9, 1, *[0] * 8, 1] and len(clients["histogram"]) == BINS
    assert clients["count"] == 4 and clients["mean"] == [0.5, None, 1]


def test_the_newest_density_of_each_phase_is_shown(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", rounds=0)
    layers = [{"blocks": {"0": {"q": share, "all": share}}, "rest": {"head": None}} for share in (0.1, 0.2)]
    lines = [line(31, layers=layers[0]), line(32), line(33, layers=layers[1]), line(34)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (density,) = shown(tmp_path)["groups"][0]["density"]
    assert density == {"phase": "edit", "round": 3, **layers[1]}


def test_long_curves_are_thinned_to_their_ends_and_even_steps() -> None:
    places = thinned(range(1, 10_001))
    assert len(places) == POINTS and (places[0], places[-1]) == (1, 10_000)
    assert set(np.diff(places)) <= {41, 42}
    assert thinned([3, 5]) == [3, 5]


def test_a_curve_without_values_is_none() -> None:
    assert curve([[{"a": None}], []], lambda line: line["a"]) is None


def test_ten_long_runs_fit_into_half_a_megabyte(tmp_path: Path) -> None:
    from fedsieve.analysis.report.page import page

    split = {"classes": [f"class {k}" for k in range(100)], "count": 100}
    for seed in range(10):
        folder = made(tmp_path / f"{seed}", f"phases.1.local.lr={1 + seed}", rounds=1000)
        held = np.random.default_rng(seed).integers(0, 9, size=(100, 100))
        clients = [{str(k): int(count) for k, count in enumerate(row)} for row in held]
        (folder / "split.json").write_text(json.dumps({**split, "clients": clients}))
    assert len(page("t", "report", shown(tmp_path)).encode()) < 500_000


def test_a_split_whose_clients_are_not_known_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of a federation may not know which classes its clients have."""
    split = {"classes": ["a"], "count": 3, "clients": []}
    monkeypatch.setattr(overview_module, "read_split", lambda *_: split)
    run, splits, problems = SimpleNamespace(path=None, digests=None), list[dict](), list[str]()
    assert overview_module.split_of(run, splits, problems) is None and not splits and not problems
    split["clients"] = [{"0": 2}]
    assert overview_module.split_of(run, splits, problems) == 0
