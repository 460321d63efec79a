"""Sweep files: what they mean, and what is wrong with wrong ones."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.analysis.sweep.sweep_file import Range, Sweep, combinations, expanded, load_sweep, sweep_names
from fedsieve.config.experiment_file import load_experiment
from fedsieve.errors import InputError


def written(tmp_path: Path, **sweep: object) -> str:
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({"experiment": "digits-iid", **sweep}, sort_keys=False))
    return str(path)


@given(st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(), min_size=1, max_size=4, unique=True)))
def test_combinations_are_those_of_nested_loops(varied: dict[str, list[int]]) -> None:
    naive: list[dict[str, int]] = [{}]
    for key, values in varied.items():
        naive = [{**point, key: value} for point, value in itertools.product(naive, values)]
    assert combinations(varied) == naive


def test_keys_that_stand_together_take_their_values_together(tmp_path: Path) -> None:
    budget = {"phases.0.local.epochs, phases.0.rounds": [[1, 40], [4, 10]]}
    sweep = load_sweep(written(tmp_path, arms=budget))
    runs = [sweep.experiment_at(point).phases[0] for point in sweep.arm_points()]
    assert [(phase.local.epochs, phase.rounds) for phase in runs] == [(1, 40), (4, 10)]
    assert expanded({"a, b": [1, 2], "c": [3]}) == {"a": 1, "b": 2, "c": [3]}


def test_values_may_be_groups_and_nothing(tmp_path: Path) -> None:
    masks, splits = [None, {"sparsity": 0.5, "rule": "random"}], ["iid", {"kind": "classes", "per_client": 2}]
    sweep = load_sweep(written(tmp_path, arms={"phases.0.mask": masks, "clients.split": splits}))
    experiments = [sweep.experiment_at(point) for point in sweep.arm_points()]
    assert [(one.phases[0].mask is None, one.clients.split.kind) for one in experiments] == list(
        itertools.product([True, False], ["iid", "classes"])
    )


def test_overrides_are_of_the_experiment(tmp_path: Path) -> None:
    sweep = load_sweep(written(tmp_path, arms={"clients.count": [5, 10]}), ["phases.0.rounds=3"])
    assert {sweep.experiment_at(point).phases[0].rounds for point in sweep.arm_points()} == {3}


def test_phases_may_be_named(tmp_path: Path) -> None:
    sweep = load_sweep(
        written(tmp_path, set={"phases.all.rounds": 7}, arms={"phases.head.rounds": [1, 2]}),
        ["phases.all.local.lr=0.5"],
    )
    runs = [sweep.experiment_at(point).phases for point in sweep.arm_points()]
    assert [(head.rounds, both.rounds, both.local.lr) for head, both in runs] == [(1, 7, 0.5), (2, 7, 0.5)]


def climbed(sweep: Sweep, height: Callable[[dict], float]) -> list[tuple[dict, float]]:
    """All that a climb tries, and what it finds there."""
    known: list[tuple[dict, float]] = []
    while points := sweep.points_to_try(known):
        known += [(point, height(point)) for point in points]
    return known


@given(st.integers(0, 8), st.integers(0, 4))
def test_a_climb_finds_the_top_of_a_hill(top: int, other: int) -> None:
    search = {"clients.count": list(range(9)), "phases.0.rounds": list(range(5))}
    sweep = Sweep(experiment="digits-iid", search=search, climb=True)
    found = climbed(sweep, lambda at: 1 - abs(at["clients.count"] - top) / 9 - abs(at["phases.0.rounds"] - other) / 9)
    best = max(found, key=lambda one: one[1])[0]
    assert best == {"clients.count": top, "phases.0.rounds": other}
    assert len(found) < len(sweep.grid_points())
    assert len({str(point) for point, _ in found}) == len(found)


def test_a_climb_waits_for_what_is_under_way() -> None:
    sweep = Sweep(experiment="digits-iid", search={"clients.count": [1, 2, 4, 8, 16]}, climb=True)
    assert sweep.points_to_try([]) == [{"clients.count": 4}]
    assert sweep.points_to_try([({"clients.count": 4}, None)]) == []
    assert sweep.points_to_try([({"clients.count": 4}, 0.5)]) == [{"clients.count": 2}, {"clients.count": 8}]
    known = [({"clients.count": 4}, 0.5), ({"clients.count": 2}, 0.4), ({"clients.count": 8}, 0.6)]
    assert sweep.points_to_try(known) == [{"clients.count": 16}]


def test_what_was_chosen_at_the_end_of_a_list_is_told() -> None:
    lists = {"lr": [0.3, 0.1, 1.0], "decay": [0, 1], "kind": [False, True], "only": [7], "steps": Range(low=1, high=9)}
    sweep = Sweep(experiment="digits-iid", search=lists, trials=5)
    point = {"lr": 0.3, "decay": 1, "kind": True, "only": 7, "steps": 1}
    assert sweep.beyond(point) == ["decay 1 was best and is the highest of its list; a higher one may be better"]
    assert [told[:6] for told in sweep.beyond({**point, "lr": 0.1, "decay": 0})] == ["lr 0.1", "decay "]


@pytest.mark.parametrize("name", sweep_names())
def test_sweeps_that_come_along_are_valid(name: str) -> None:
    sweep = load_sweep(name)
    assert len(sweep.arm_points()) >= 2


def test_a_fixed_budget_keeps_the_number_of_steps() -> None:
    sweep = load_sweep("002-fixed-budget")
    phases = [sweep.experiment_at(point).phases[0] for point in sweep.arm_points()]
    assert {(phase.local.steps, phase.rounds) for phase in phases} == {(4, 50), (8, 25), (16, 12)}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"arms": {"phases.0.local.lrr": [1.0]}}, ["lrr", "did you mean 'lr'"]),
        ({"search": {"clients.cuont": [1, 2]}}, ["cuont", "did you mean 'count'"]),
        ({"search": {"phases.7.rounds": [1, 2]}}, ["no entry 7"]),
        ({"search": {"phases.hed.rounds": [1, 2]}}, ["no entry hed in the list; use 0 to 1, or a name: head, all"]),
        ({"set": {"phases.0.rounds": 3}, "arms": {"phases.head.rounds": [1, 2]}}, ["are the same setting"]),
        ({"search": {"phases.0.local.lr": {"low": 0.1, "high": 1.0}}}, ["trials"]),
        ({"search": {"phases.0.local.lr": {"low": 1.0, "high": 0.1}}, "trials": 3}, ["low 1.0 is not below high 0.1"]),
        ({"search": {"phases.0.local.lr": {"low": 0.0, "high": 0.1, "log": True}}, "trials": 3}, ["above 0"]),
        ({"search": {"phases.0.local.lr": {"low": -1.0, "high": 0.1}}, "trials": 3}, ["phases.0.local.lr", "-1.0"]),
        ({"search": {"phases.0.local.lr": 0.1}}, ["list of values"]),
        ({"arms": {"clients.count": []}}, ["no values"]),
        ({"arms": {f"k{i}": list(range(10)) for i in range(5)}}, ["100,000 combinations; use at most 10,000"]),
        ({"arms": {"a": [1]}, "search": {f"k{i}": list(range(10)) for i in range(9)}}, ["1,000,000,000 combinations"]),
        ({"arms": {"clients.count": list(range(10_001))}}, ["10,001 values"]),
        ({"experiment": "x" * 5000, "arms": {"clients.count": [1]}}, ["too long"]),
        ({"arms": {"clients.count": [5, 5]}}, ["twice"]),
        ({"arms": {"a, b": [1]}}, ["list of 2"]),
        ({"arms": {"clients.count": [5]}, "search": {"clients.count": [6]}}, ["given twice"]),
        ({"arms": {"seed": [1, 2]}}, ["seeds: 5"]),
        ({"arms": {"clients.count": [5]}, "trials": 4}, ["trials"]),
        ({}, ["nothing to vary"]),
        ({"search": {"clients.count": [5, 6]}, "climb": True, "trials": 4}, ["climb"]),
        ({"arms": {"clients.count": [5]}, "sedes": 4}, ["sedes", "did you mean 'seeds'"]),
        ({"search": {"clients.count": [5]}, "set": {"data.validation": 0.0}}, ["validation"]),
        ({"experiment": "digits-iic", "arms": {"clients.count": [5]}}, ["digits-iic", "did you mean"]),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, wrong: dict, told: list[str]) -> None:
    with pytest.raises(InputError) as error:
        load_sweep(written(tmp_path, **wrong))
    for words in told:
        assert words in str(error.value)


def test_a_sweep_that_is_not_there() -> None:
    with pytest.raises(InputError, match="002-fixed-budget"):
        load_sweep("nothing-of-this-name")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"set": {"phases.0.rounds, phases.0.local.lr": 3}, "arms": {"clients.count": [5]}}, ["one by one"]),
        ({"set": {"phases.0.local.lr": 0.1}, "arms": {"phases.0.local": [{"steps": 1}]}}, ["would undo"]),
    ],
)
def test_keys_that_do_not_go_together(tmp_path: Path, wrong: dict, told: list[str]) -> None:
    test_what_is_wrong_is_told(tmp_path, wrong, told)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("clients.split=iid", "clients.split=iid: 'clients.split' is given twice"),
        ("clients.count,clients.fraction=4", "one by one"),
    ],
)
def test_overrides_that_stand_in_the_way_of_what_is_varied(override: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        load_sweep("002-fixed-budget", [override])


def test_an_override_may_be_the_first_seed() -> None:
    sweep = load_sweep("002-fixed-budget", ["seed=7"])
    assert {sweep.experiment_at(point).seed for point in sweep.arm_points()} == {7}


def test_nothing_is_expected_of_what_a_report_did_not_run() -> None:
    sweep = load_sweep("002-fixed-budget")
    assert load_experiment(sweep.experiment).expect is not None
    assert all(experiment.expect is None for experiment in sweep.experiments())


def test_many_values_of_a_bayesian_search_are_not_all_combined(tmp_path: Path) -> None:
    keys = ["lr", "momentum", "weight_decay", "clip_norm"]
    search = {f"phases.0.local.{key}": [0.1 + 0.01 * step for step in range(30)] for key in keys}
    assert len(load_sweep(written(tmp_path, search=search, trials=5)).experiments()) == 4 * 30
