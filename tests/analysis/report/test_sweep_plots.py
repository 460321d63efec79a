"""Pictures of sweeps, and the figures in them."""

import itertools
from pathlib import Path

import pytest

from fedsieve.analysis.report.sweep_plots import importances, plot_importances, plot_parallel, tried

RATES = [0.01 * 1.6**step for step in range(16)]  # with fewer points the forest behind fANOVA knows too little
POINTS = [{"lr": lr, "rule": rule, "fixed": 1} for lr, rule in itertools.product(RATES, ["a", "b"])]


def test_what_alone_decides_explains_everything() -> None:
    by_rule = importances([(point, 0.9 if point["rule"] == "a" else 0.2) for point in POINTS])
    assert by_rule == pytest.approx({"rule": 1.0, "lr": 0.0}, abs=0.02)
    by_rate = importances([(point, 0.7 - 0.01 * (RATES.index(point["lr"]) - 9) ** 2) for point in POINTS])
    assert by_rate == pytest.approx({"rule": 0.0, "lr": 1.0}, abs=0.02)


def test_where_there_is_nothing_to_explain_there_is_no_picture(tmp_path: Path) -> None:
    assert importances([]) == {}
    assert importances([(point, 0.5) for point in POINTS]) == {}
    assert importances([({"fixed": 1}, 0.1 * n) for n in range(6)]) == {}
    assert not plot_importances([(POINTS[0], 0.5)], tmp_path / "importance.png")
    assert not plot_parallel([({"fixed": 1}, 0.5)], tmp_path / "parallel.png")
    assert list(tmp_path.iterdir()) == []


def test_only_complete_trials_count_with_the_values_of_their_arm() -> None:
    arm = {"values": {"rule": "a"}, "trials": []}
    for state, accuracy in (("complete", 0.5), ("fail", None), ("pruned", 0.1), ("complete", 0.25)):
        arm["trials"].append({"values": {"lr": 1.0}, "state": state, "val_accuracy": accuracy})
    assert tried({"arms": [arm]}) == [({"rule": "a", "lr": 1.0}, 0.5), ({"rule": "a", "lr": 1.0}, 0.25)]


def test_values_of_any_kind_can_be_drawn(tmp_path: Path) -> None:
    splits = ["iid", {"kind": "classes", "per_client": 5}, None, [1, 2]]
    trials = [({"split": split, "on": n % 2 == 0, "n": n}, 0.1 * n) for n, split in enumerate(splits * 2)]
    assert plot_parallel(trials, tmp_path / "parallel.png") and plot_importances(trials, tmp_path / "importance.png")
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
