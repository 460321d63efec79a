"""Runs side by side."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsieve.analysis.collection import differing, find_runs, grouped, names_of, without_repeats
from fedsieve.config.dotted import flat
from fedsieve.config.experiment_file import load_experiment
from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from listeners import interrupt


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


def test_links_directly_in_a_path_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    made(tmp_path / "runs/random/trial-3/seed-1"), made(tmp_path / "best/own")
    for link, place in {
        "random": "../runs/random/trial-3",
        "latest": "own",
        "up": "..",
        "here": ".",
        "me": "me",
    }.items():
        (tmp_path / "best" / link).symlink_to(place)
    runs, problems = find_runs([tmp_path / "best"])
    assert [str(run.path.relative_to(tmp_path)) for run in runs] == ["best/own", "best/random/seed-1"]
    assert not problems and names_of([[run] for run in runs]) == ["own", "random"]
    assert [run.path.name for run in find_runs([tmp_path])[0]] == ["own", "seed-1"]


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


def test_plugins_are_told_apart_by_what_is_in_them(experiment: Callable[..., Experiment], tmp_path: Path) -> None:
    """The same text in another folder is the same plugin; other text in the same file is another one."""
    half, same = tmp_path / "mine.py", tmp_path / "elsewhere" / "mine.py"
    text = "import fedsieve\n\n@fedsieve.schedule\ndef mine(done):\n    return 0.5\n"
    settings = experiment("phases.0.rounds=1", "phases.1.rounds=1")
    same.parent.mkdir()
    half.write_text(text), same.write_text(text)
    run(settings, tmp_path / "runs/a", plugins=[half])
    run(settings.model_copy(update={"seed": 8}), tmp_path / "runs/b", plugins=[same])
    half.write_text(text.replace("0.5", "0.25"))
    run(settings, tmp_path / "runs/c", plugins=[half])
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "runs/d", plugins=[half], callback=interrupt(1))
    run(settings, tmp_path / "runs/e")
    runs, problems = find_runs([tmp_path / "runs"])
    assert not problems and differing(runs[:2]) == [] and differing(runs[2:4]) == []
    assert differing(runs) == ["plugins.0"]
    assert [len(group) for group in grouped(runs, ["plugins.0"]).values()] == [2, 2, 1]
    counting, notes = without_repeats(runs)
    assert [one.path.name for one in counting] == ["a", "b", "c", "e"]
    assert len(notes) == 1 and "runs/d repeats" in notes[0]
