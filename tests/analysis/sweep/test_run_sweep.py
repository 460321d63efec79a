"""Sweeps: exactly the grid, ended and resumed, shared by processes, and what they write."""

import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from fedsieve.analysis.collection import find_runs
from fedsieve.analysis.sweep.run_sweep import run_sweep
from fedsieve.analysis.sweep.sweep_file import load_sweep
from fedsieve.config.experiment_file import load_experiment
from fedsieve.errors import InputError
from fedsieve.experiment.export_split import export_split
from fedsieve.observe.callbacks import Callback

RATES, DECAYS = [0.01, 0.5], [0.0, 0.1]


class Silent(Callback):
    """Counts the rounds that were run, and ends the process's work after some of them."""

    def __init__(self, titles: list[str], stop_after: int | None = None) -> None:
        self.titles, self.stop_after, self.rounds = titles, stop_after, 0

    def __call__(self, title: str) -> "Silent":
        self.titles.append(title)
        return self

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: object) -> None: ...

    def round(self, line: dict) -> None:
        self.rounds += 1
        if self.stop_after is not None and self.rounds >= self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture
def sweep_file(tmp_path: Path, images: Path, backbone: Path) -> Path:
    """Two arms of four points each, over experiments of two rounds on frozen features: milliseconds a run."""
    experiment = {
        "data": {"name": "npz", "path": str(images), "image_size": 16},
        "model": {"backbone": str(backbone)},
        "clients": {"count": 4, "fraction": 0.5},
        "phases": [{"name": "head", "train": "head", "rounds": 2, "local": {"steps": 2, "lr": 0.1}}],
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(experiment))
    sweep = {
        "experiment": "small.yaml",
        "arms": {"clients.weighting": ["samples", "equal"]},
        "search": {"phases.0.local.lr": RATES, "phases.0.local.weight_decay": DECAYS},
        "seeds": 3,
    }
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep))
    return path


def hashes(out: Path) -> dict[str, str]:
    return {str(path.parent.relative_to(out)): json.loads(path.read_text())["model_sha256"] for path in results(out)}


def results(out: Path) -> list[Path]:
    return sorted((out / "runs").rglob("result.json"))


def points(out: Path) -> Counter:
    """How often each combination was run with the first seed, from the runs' own files."""
    runs, _ = find_runs([out / "runs"])
    first = [run.experiment for run in runs if run.seed == 42]
    return Counter((one.clients.weighting, one.phases[0].local.lr, one.phases[0].local.weight_decay) for one in first)


GRID = Counter(itertools.product(["samples", "equal"], RATES, DECAYS))


def test_a_grid_is_exactly_the_grid(sweep_file: Path, tmp_path: Path) -> None:
    found = run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent([]))
    assert points(tmp_path / "out") == GRID
    assert [len(arm["trials"]) for arm in found["arms"]] == [4, 4]
    for arm in found["arms"]:
        best = max(trial["val_accuracy"] for trial in arm["trials"])
        chosen = next(trial for trial in arm["trials"] if trial["val_accuracy"] == best)
        assert arm["chosen"] == chosen["values"]
        assert sorted(arm["seeds"]) == ["42", "43", "44"]
    assert len(results(tmp_path / "out")) == 8 + 2 * 2


def test_what_was_best_can_be_run_again(sweep_file: Path, tmp_path: Path) -> None:
    found = run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent([]))
    means = [sum(run["val_accuracy"] for run in arm["seeds"].values()) for arm in found["arms"]]
    winner = found["arms"][means.index(max(means))]
    best = load_experiment(str(tmp_path / "out/best.yaml"))
    assert best.clients.weighting == winner["values"]["clients.weighting"]
    assert best.phases[0].local.lr == winner["chosen"]["phases.0.local.lr"]
    assert load_experiment(str(tmp_path / "out/experiments" / f"{winner['name']}.yaml")) == best
    repeats, problems = find_runs([tmp_path / "out/best" / winner["name"]])
    assert [run.seed for run in repeats] == [42, 43, 44] and not problems
    for name in ("importance.png", "parallel.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_a_second_time_there_is_nothing_to_do(sweep_file: Path, tmp_path: Path) -> None:
    first = run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent([]))
    titles: list[str] = []
    assert run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent(titles)) == first
    assert titles == []


def test_more_values_and_more_seeds_add_to_a_sweep(sweep_file: Path, tmp_path: Path) -> None:
    run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent([]))
    wider = yaml.safe_load(sweep_file.read_text())
    wider["search"]["phases.0.local.lr"].append(1.0)
    sweep_file.write_text(yaml.safe_dump(wider | {"seeds": 4}))
    titles: list[str] = []
    found = run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent(titles))
    assert points(tmp_path / "out") == Counter(itertools.product(["samples", "equal"], [*RATES, 1.0], DECAYS))
    assert len([title for title in titles if "trial" in title]) == 4
    assert all(len(arm["seeds"]) == 4 for arm in found["arms"])


def test_an_arm_before_the_others_leaves_their_runs_alone(sweep_file: Path, tmp_path: Path) -> None:
    sweep = yaml.safe_load(sweep_file.read_text()) | {"arms": {"clients.fraction": [0.5]}, "seeds": 1}
    sweep_file.write_text(yaml.safe_dump(sweep))
    first = run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent([]))
    sweep_file.write_text(yaml.safe_dump(sweep | {"arms": {"clients.fraction": [0.25, 0.5]}}))
    titles: list[str] = []
    both = run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent(titles))
    assert both["arms"][1:] == first["arms"]
    assert len(titles) == 4 and all(" of 8: 0.25, " in title for title in titles)


def test_ended_in_a_round_and_resumed_it_is_as_if_nothing_had_happened(sweep_file: Path, tmp_path: Path) -> None:
    run_sweep(load_sweep(str(sweep_file)), tmp_path / "whole", Silent([]))
    for stop in (1, 4, 11, 100):
        try:
            run_sweep(load_sweep(str(sweep_file)), tmp_path / "ended", Silent([], stop))
        except KeyboardInterrupt:
            continue
    assert points(tmp_path / "ended") == GRID
    assert hashes(tmp_path / "ended") == hashes(tmp_path / "whole")


def command(sweep_file: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "fedsieve", "sweep", str(sweep_file), "--out", str(out)]


def test_killed_two_processes_at_once_and_resumed_no_trial_is_lost_or_doubled(sweep_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "shared"
    run_sweep(load_sweep(str(sweep_file)), tmp_path / "whole", Silent([]))
    pair = [subprocess.Popen(command(sweep_file, out), stdout=subprocess.DEVNULL) for _ in range(2)]
    while not (out / "runs").exists() or len(results(out)) < 3:
        time.sleep(0.05)
        assert any(process.poll() is None for process in pair), "both ended before they could be killed"
    for process in pair:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert len(results(out)) < 12, "nothing was left to resume"
    pair = [subprocess.Popen(command(sweep_file, out), stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=300) for process in pair] == [0, 0]
    assert points(out) == GRID
    assert hashes(out) == hashes(tmp_path / "whole")
    rows = sqlite3.connect(out / "trials.sqlite").execute("select state from trials").fetchall()
    assert rows == [("COMPLETE",)] * 8


def test_a_climb_ends_where_no_neighbour_is_better(sweep_file: Path, tmp_path: Path) -> None:
    rates = [1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0]
    sweep = yaml.safe_load(sweep_file.read_text())
    sweep |= {"search": {"phases.0.local.lr": rates}, "climb": True, "seeds": 1}
    sweep_file.write_text(yaml.safe_dump(sweep))
    for stop in (5, 1000):
        with suppress(KeyboardInterrupt):
            found = run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent([], stop))
    for arm in found["arms"]:
        heights = {trial["values"]["phases.0.local.lr"]: trial["val_accuracy"] for trial in arm["trials"]}
        place = rates.index(arm["chosen"]["phases.0.local.lr"])
        assert heights[rates[place]] == max(heights.values())
        assert set(rates[max(0, place - 1) : place + 2]) <= heights.keys()
        assert next(iter(heights)) == 0.01 and len(heights) == len(arm["trials"]) < 6


@pytest.fixture
def search_file(sweep_file: Path) -> Path:
    sweep = yaml.safe_load(sweep_file.read_text())
    sweep["search"] = {
        "phases.0.local.lr": {"low": 0.0001, "high": 1.0, "log": True},
        "phases.0.local.steps": {"low": 1, "high": 4},
        "phases.0.local.nesterov": [True, False],
    }
    sweep_file.write_text(yaml.safe_dump(sweep | {"trials": 10, "seeds": 1}))
    return sweep_file


def test_a_search_tries_as_many_points_as_asked_within_their_ranges(search_file: Path, tmp_path: Path) -> None:
    found = run_sweep(load_sweep(str(search_file)), tmp_path / "out", Silent([]))
    for arm in found["arms"]:
        assert len(arm["trials"]) == 10
        values = [trial["values"] for trial in arm["trials"]]
        assert all(0.0001 <= value["phases.0.local.lr"] <= 1.0 for value in values)
        assert {value["phases.0.local.steps"] for value in values} <= {1, 2, 3, 4}
        assert len({value["phases.0.local.lr"] for value in values}) == 10
    one, other = ([trial["values"] for trial in arm["trials"]] for arm in found["arms"])
    assert one[0] != other[0], "arms draw points of their own"


def test_a_search_that_was_ended_goes_on_as_if_it_had_not_been(search_file: Path, tmp_path: Path) -> None:
    search_file.write_text(yaml.safe_dump(yaml.safe_load(search_file.read_text()) | {"arms": {}}))
    whole = run_sweep(load_sweep(str(search_file)), tmp_path / "whole", Silent([]))
    for stop in (3, 14, 1000):
        try:
            ended = run_sweep(load_sweep(str(search_file)), tmp_path / "ended", Silent([], stop))
        except KeyboardInterrupt:
            continue
    for arm, other in zip(whole["arms"], ended["arms"], strict=True):
        assert arm["trials"] == other["trials"]


def states_of(found: dict) -> Counter:
    return Counter(trial["state"] for arm in found["arms"] for trial in arm["trials"])


def test_poor_trials_are_ended_early_only_where_it_is_asked(search_file: Path, tmp_path: Path) -> None:
    sweep = yaml.safe_load(search_file.read_text())
    del sweep["arms"]
    sweep |= {"set": {"phases.0.rounds": 6}}
    search_file.write_text(yaml.safe_dump(sweep))
    states = states_of(run_sweep(load_sweep(str(search_file)), tmp_path / "a", Silent([])))
    assert states["pruned"] > 0 and states["complete"] > 0 and states.total() == 10
    search_file.write_text(yaml.safe_dump(sweep | {"prune": False}))
    states = states_of(run_sweep(load_sweep(str(search_file)), tmp_path / "b", Silent([])))
    assert states == {"complete": 10}


def test_a_run_that_fails_is_a_failed_trial_and_the_sweep_goes_on(sweep_file: Path, tmp_path: Path) -> None:
    sweep = yaml.safe_load(sweep_file.read_text())
    sweep["search"] = {"phases.0.local.lr": [0.1, 1e38]}
    sweep_file.write_text(yaml.safe_dump(sweep | {"seeds": 1}))
    found = run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent([]))
    for arm in found["arms"]:
        assert [trial["state"] for trial in arm["trials"]] == ["complete", "fail"]
        assert "loss" in arm["trials"][1]["reason"]
        assert arm["chosen"] == {"phases.0.local.lr": 0.1}


def test_a_folder_with_something_else_stays_as_it_is(sweep_file: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="something else than a sweep"):
        run_sweep(load_sweep(str(sweep_file)), tmp_path / "other", Silent([]))
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.txt"]
    with pytest.raises(InputError, match="is a file"):
        run_sweep(load_sweep(str(sweep_file)), sweep_file, Silent([]))


def test_a_sweep_of_another_experiment_is_refused(sweep_file: Path, tmp_path: Path) -> None:
    short = ["phases.0.rounds=1"]
    first = run_sweep(load_sweep(str(sweep_file), short), tmp_path / "out", Silent([]))
    for changed in (["phases.0.rounds=2"], ["clients.count=5", *short]):
        with pytest.raises(InputError, match="another experiment"):
            run_sweep(load_sweep(str(sweep_file), changed), tmp_path / "out", Silent([]))
    sweep = yaml.safe_load(sweep_file.read_text())
    fewer = sweep | {"search": {**sweep["search"], "phases.0.local.lr": RATES[:1]}}
    others = sweep | {"arms": {"clients.weighting": ["samples"]}}
    for changed, told in ((fewer, "not in this sweep"), (others, "other arms")):
        sweep_file.write_text(yaml.safe_dump(changed))
        with pytest.raises(InputError, match=told):
            run_sweep(load_sweep(str(sweep_file), short), tmp_path / "out", Silent([]))
    sweep_file.write_text(yaml.safe_dump(sweep))
    assert run_sweep(load_sweep(str(sweep_file), short), tmp_path / "out", Silent([])) == first


def test_wrong_data_are_told_before_anything_is_written(sweep_file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        run_sweep(load_sweep(str(sweep_file), ["data.path=nowhere.npz"]), tmp_path / "out", Silent([]))
    assert not (tmp_path / "out").exists()


def test_data_of_one_seed_at_nodes(sweep_file: Path, tmp_path: Path) -> None:
    """The manifest of a federation says so before the search begins, not when its best is repeated."""
    export_split(load_sweep(str(sweep_file)).experiments()[0], tmp_path / "shards")
    engine = f"{{sockets: {{folder: nodes, manifest: {tmp_path}/shards/federation.json}}}}"
    with pytest.raises(InputError, match="3 seeds are asked for, and the federation's data were split for seed 42"):
        run_sweep(load_sweep(str(sweep_file), [f"engine={engine}"]), tmp_path / "out", Silent([]))
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_does(sweep_file: Path, tmp_path: Path, fedsieve: Callable) -> None:
    out = tmp_path / "out"
    code, printed, _ = fedsieve("sweep", str(sweep_file), "--out", str(out), "--dry-run")
    assert code == 0 and "12" in printed and not out.exists()
    code, printed, _ = fedsieve("sweep", str(sweep_file), "--out", str(out), "--seeds", "2")
    assert code == 0 and "equal" in printed and "2 of 2" in printed
    assert printed.count("may be better") == 4  # of two values each is at an end
    code, _, told = fedsieve("sweep", str(sweep_file), "clients.cuont=3", "--out", str(tmp_path / "wrong"))
    assert code == 2 and "did you mean 'count'" in told and not (tmp_path / "wrong").exists()


def test_titles_count_the_runs(sweep_file: Path, tmp_path: Path) -> None:
    titles: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent(titles, 5))  # in its third run of two rounds
    assert [title.partition(":")[0] for title in titles] == [f"run {number} of 12" for number in (1, 2, 3)]
    titles.clear()
    run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent(titles))
    assert [title.partition(":")[0] for title in titles] == [f"run {number} of 12" for number in range(3, 13)]


def test_what_no_data_fit_is_told_before_anything_is_run(sweep_file: Path, tmp_path: Path) -> None:
    sweep = yaml.safe_load(sweep_file.read_text())
    sweep_file.write_text(yaml.safe_dump(sweep | {"search": {"clients.count": [4, 5000]}}))
    with pytest.raises(InputError, match="5,000"):
        run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent([]))
    assert not (tmp_path / "out").exists()
    sweep_file.write_text(yaml.safe_dump(sweep | {"search": {"clients.count": [4, 5]}, "seeds": 1}))
    first = run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent([]))
    sweep_file.write_text(yaml.safe_dump(sweep | {"search": {"clients.count": [4, 5, 5000]}, "seeds": 1}))
    with pytest.raises(InputError, match="5,000"):
        run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent([]))
    sweep_file.write_text(yaml.safe_dump(sweep | {"search": {"clients.count": [4, 5]}, "seeds": 1}))
    assert run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent([])) == first


def test_a_base_that_only_the_arms_make_valid(sweep_file: Path, tmp_path: Path) -> None:
    sweep = yaml.safe_load(sweep_file.read_text())
    del sweep["search"]
    sweep["set"] = {"clients.secure": "zero_sum", "clients.fraction": 1.0}
    sweep["set"]["phases.0.mask"] = {"sparsity": 0.5, "rule": "random"}
    sweep["arms"] = {"phases.0.mask.scope": ["server"]}  # each client's own mask, the default, cannot be summed so
    sweep_file.write_text(yaml.safe_dump(sweep | {"seeds": 1}))
    for _ in range(2):
        (arm,) = run_sweep(load_sweep(str(sweep_file)), tmp_path / "out", Silent([]))["arms"]
        assert list(arm["seeds"]) == ["42"]


def test_a_search_over_other_values_is_refused(search_file: Path, tmp_path: Path) -> None:
    sweep = yaml.safe_load(search_file.read_text()) | {"trials": 2}
    search_file.write_text(yaml.safe_dump(sweep))
    first = run_sweep(load_sweep(str(search_file)), tmp_path / "out", Silent([]))
    fewer = {key: value for key, value in sweep["search"].items() if not key.endswith("nesterov")}
    wider = sweep["search"] | {"phases.0.local.nesterov": [True]}
    more = sweep["search"] | {"phases.0.local.weight_decay": [0.0, 0.1]}
    for changed in (fewer, wider, more):
        search_file.write_text(yaml.safe_dump(sweep | {"search": changed, "trials": 4}))
        with pytest.raises(InputError, match="give another --out"):
            run_sweep(load_sweep(str(search_file)), tmp_path / "out", Silent([]))
    search_file.write_text(yaml.safe_dump(sweep))
    assert run_sweep(load_sweep(str(search_file)), tmp_path / "out", Silent([])) == first


def test_two_processes_make_as_many_trials_as_asked_and_share_the_seeds(search_file: Path, tmp_path: Path) -> None:
    sweep = yaml.safe_load(search_file.read_text()) | {"trials": 3, "seeds": 3}
    search_file.write_text(yaml.safe_dump(sweep))
    out = tmp_path / "out"
    pair = [subprocess.Popen(command(search_file, out), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=300)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert all("2 of 3" not in text and "3 of 3" in text for text in printed), "neither left before all was done"
    found = json.loads((out / "results.json").read_text())
    assert [len(arm["trials"]) for arm in found["arms"]] == [3, 3]
    assert len(results(out)) == len({str(path) for path in results(out)}) == 2 * (3 + 2)


def test_a_killed_search_that_is_resumed_tells_no_round_twice(search_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    search_file.write_text(yaml.safe_dump(yaml.safe_load(search_file.read_text()) | {"trials": 2}))
    with suppress(KeyboardInterrupt):
        run_sweep(load_sweep(str(search_file)), out, Silent([], 2))
    done = subprocess.run(command(search_file, out), capture_output=True, text=True)
    assert done.returncode == 0 and "UserWarning" not in done.stderr


def test_a_sweep_in_which_nothing_worked_says_so(sweep_file: Path, tmp_path: Path, fedsieve: Callable) -> None:
    sweep = yaml.safe_load(sweep_file.read_text())
    sweep["search"] = {"phases.0.local.lr": [1e38]}
    sweep_file.write_text(yaml.safe_dump(sweep))
    code, printed, told = fedsieve("sweep", str(sweep_file), "--out", str(tmp_path / "out"))
    assert code == 1 and "2 trials failed; the first, in samples:" in printed and "0.0%" not in printed
    assert "error: no trial of samples, equal came to an end" in told
    code, printed, _ = fedsieve("sweep", str(sweep_file), "--out", str(tmp_path / "out"), "--dry-run")
    assert code == 0 and [line.split("│")[2].strip() for line in printed.splitlines() if "│ clients" in line] == [
        "0",
        "0",
    ]
