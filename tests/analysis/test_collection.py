"""Runs side by side."""

import json
from pathlib import Path

from fedsieve.analysis.collection import differing, find_runs, grouped
from fedsieve.config.dotted import flat
from fedsieve.config.experiment_file import load_experiment
from fedsieve.config.schema import Experiment


def made(folder: Path, *overrides: str) -> Path:
    """A folder as a run leaves it right after its start."""
    folder.mkdir(parents=True)
    experiment: Experiment = load_experiment("digits-iid", list(overrides))
    (folder / "experiment.yaml").write_text(experiment.resolved().to_yaml())
    return folder


def test_runs_are_found_at_and_below_a_path_once(tmp_path: Path) -> None:
    made(tmp_path / "sweep/a"), made(tmp_path / "sweep/b/seed-1"), made(tmp_path / "alone")
    runs, problems = find_runs([tmp_path / "sweep", tmp_path / "alone", tmp_path / "sweep/a"])
    assert [run.path.name for run in runs] == ["a", "seed-1", "alone"]
    assert not problems and all(run.result is None for run in runs)


def test_what_is_no_run_is_named_and_the_rest_is_found(tmp_path: Path) -> None:
    made(tmp_path / "good"), (tmp_path / "empty").mkdir()
    broken = made(tmp_path / "broken")
    (broken / "experiment.yaml").write_text("phases: 7")
    runs, problems = find_runs([tmp_path / "empty", broken, tmp_path / "absent", tmp_path / "good"])
    assert [run.path.name for run in runs] == ["good"]
    for name, problem in zip(["empty", "broken", "absent"], problems, strict=True):
        assert name in problem


def test_what_differs_is_neither_the_seed_nor_who_worked_at_it(tmp_path: Path) -> None:
    made(tmp_path / "a", "seed=1", "workers=1"), made(tmp_path / "b", "seed=2", "workers=2")
    made(tmp_path / "c", "phases.0.local.lr=0.5", "clients.split={kind: classes, per_client: 2}")
    runs, _ = find_runs([tmp_path])
    assert differing(runs[:2]) == []
    split = ["clients.split.per_client", "clients.split.assign"]
    assert differing(runs) == ["clients.split.kind", "phases.0.local.lr", *split]
    groups = grouped(runs, ["phases.0.local.lr"])
    assert [len(group) for group in groups.values()] == [2, 1]


def test_dotted_keys_name_every_leaf() -> None:
    nested = {"a": 1, "b": [{"c": 2}, {"c": []}], "d": {}}
    assert flat(nested) == {"a": 1, "b.0.c": 2, "b.1.c": [], "d": {}}


def test_states_of_runs(tmp_path: Path) -> None:
    line = {"phase": "head", "round": 1, "val_accuracy": None, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0}
    (made(tmp_path / "a") / "metrics.jsonl").write_text((json.dumps(line) + "\n") * 12)
    made(tmp_path / "b", "model.head={ridge: {penalty: 1}}", "phases=[]")
    runs, _ = find_runs([tmp_path])
    assert [run.state for run in runs] == ["unfinished: round 12 of 40", "unfinished: round 0 of 1"]
