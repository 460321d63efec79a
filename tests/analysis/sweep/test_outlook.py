"""How much of a sweep is left: by the estimates of its single experiments."""

from pathlib import Path

import pytest
import yaml

from fedsieve.analysis.estimate import Estimator, Speed, network_of
from fedsieve.analysis.sweep.outlook import foretell, likely_points, run_number
from fedsieve.analysis.sweep.run_sweep import prepare
from fedsieve.analysis.sweep.sweep_file import Sweep, load_sweep
from fedsieve.config.experiment_file import load_experiment


def estimator() -> Estimator:
    """One that times nothing."""
    known = Estimator()
    settings = load_experiment("digits-iid").resolved()
    known.speeds[network_of(settings)] = Speed(trained=0.01, seen=0.003, head_step=0.0001, weights=1000, blocks=12)
    return known


def sweep_of(tmp_path: Path, **changes: object) -> Sweep:
    content = {"experiment": "digits-iid", "search": {"phases.all.rounds": [1, 9, 50]}, "seeds": 3, **changes}
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_sweep(str(path))


def test_each_point_of_a_grid_counts_with_its_own_time(tmp_path: Path) -> None:
    """Rounds of 1, 9 and 50 take 20 on average, not the 9 in the middle."""
    few = sweep_of(tmp_path, search={"phases.all.rounds": [20]}, seeds=5)
    ((_, runs, seconds),) = foretell(sweep_of(tmp_path), tmp_path / "none", estimator())
    ((_, same_runs, same),) = foretell(few, tmp_path / "none", estimator())
    assert runs == same_runs == 3 + 2
    assert seconds == pytest.approx(same)


def test_a_range_counts_with_its_ends_and_its_middle(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, search={"phases.all.rounds": {"low": 2, "high": 10}}, trials=4)
    assert [point["phases.all.rounds"] for point in likely_points(sweep, [])] == [2, 6, 10]


@pytest.mark.parametrize(("rates", "runs"), [([0.1], 1), ([0.1, 0.2, 0.3], 3), ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 4)])
def test_a_climb_takes_four_trials_or_all_there_are(rates: list[float], runs: int, tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, search={"phases.all.local.lr": rates}, climb=True, seeds=1)
    assert [found for _, found, _ in foretell(sweep, tmp_path / "none", estimator())] == [runs]
    trials = prepare(sweep, tmp_path / "sweep")
    assert run_number(sweep, trials) == f"run 1 of {runs}"
