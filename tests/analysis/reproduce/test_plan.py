"""`fedsieve reproduce`: which rows, what of them is run, and what may be said of the figures."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from fedsieve.analysis.report.reproduction import reproduction_table
from fedsieve.analysis.reproduce.plan import (
    Outcome,
    Plan,
    as_data,
    backbone_name,
    choose,
    make_plan,
    ranks,
    run_plan,
    write_tables,
)
from fedsieve.analysis.reproduce.scale import SCALES
from fedsieve.config.experiment_file import load_experiment
from fedsieve.errors import InputError

TINY = ["--scale", "smoke", "data.limit=150", "data.image_size=16", "threads=1"]  # with the small backbone of the tests


def plan_of(report: str, scale: str, *overrides: str, place: str | None = None, seeds: int = 3) -> Plan:
    return make_plan(report, choose(report, place), SCALES[scale], overrides, seeds)


def pretended(plan: Plan, accuracy: Callable[[str, int], float]) -> list[Outcome]:
    """As if each run had ended with some accuracy."""
    return run_plan(
        plan,
        lambda row, experiment, _: {
            "test_accuracy": accuracy(row.runs_as, experiment.seed),
            "val_accuracy": accuracy(row.runs_as, experiment.seed),
            "model_sha256": f"{row.runs_as} {experiment.seed}",
        },
    )


def shown(plan: Plan, outcomes: list[Outcome]) -> str:
    text = StringIO()
    Console(file=text, width=140).print(reproduction_table(plan, outcomes))
    return " ".join(text.getvalue().split())


# ------------------------------------------------------------------------------------------- choosing rows


def test_rows_are_chosen_by_their_place() -> None:
    assert len(choose("001", "table 2")) == 23 and len(choose("001", "table 1")) == 8
    assert len(choose("001", "figure 2")) == 9  # three of them rows of table 1
    assert len(choose("001", "figure 8")) == 6
    assert len(choose("002", "table 4.2")) == 16 and len(choose("002", "section 4.8")) == 12  # literal readings, too
    assert len(choose("003")) == 14


def test_rows_are_chosen_by_name() -> None:
    assert choose("003", None, ["003-table1-sparse-nc5"]) == ["003-table1-sparse-nc5"]
    assert choose("003", None, ["figure5-*", "table1-c*"]) == [
        "003-figure5-fedavg",
        "003-figure5-secure",
        "003-table1-centralized",
    ]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["007"], "there is no report '007'; the reports are 000, 001, 002, 003, 004"),
        (["003", "--table", "9"], "report 003 has no table 9 that can be run; it has figure 5, section 7.3, table 1"),
        (["003", "--rows", "table1-nc7"], "no row is called 'table1-nc7'; the rows are 003-figure5-fedavg, "),
        (["003", "--table", "1", "--figure", "5"], "--table 1 and --figure 5 do not go together; give one of them"),
        (["003", "--scale", "tiny"], "--scale is 'tiny'; use smoke, small, full"),
        (["003", "--seeds", "0"], "--seeds is 0; use at least 1"),
        (["003", "--scale", "smoke", "--backbone", "./nowhere.pth"], "nowhere.pth does not exist"),
        (["003", "--scale", "smoke", "--backbone", "./nowhere.pth", "--dry-run"], "nowhere.pth does not exist"),
        (["003", "--scale", "smoke", "clients.cuont=3"], "unknown key 'cuont' in clients; did you mean 'count'?"),
        (["003", "--scale", "smoke", "data.path=nowhere"], "nowhere does not exist"),
        (
            ["003", "--scale", "smoke", "clients.count=5", "clients.fraction=1.0"],
            "too few for 5 clients to hold 10 classes",
        ),
    ],
)
def test_bad_input_is_one_line_and_nothing_written(fedsieve: Callable, arguments: list[str], part: str) -> None:
    code, _, said = fedsieve("reproduce", *arguments)
    assert code == 2 and said.startswith("error: ") and part in said and len(said.splitlines()) == 1
    assert list(Path.cwd().iterdir()) == []


def test_a_change_that_fits_only_the_rows_asked_for() -> None:
    names = choose("001", None, ["table2-iid-j4"])
    assert make_plan("001", names, SCALES["smoke"], ["phases.1.rounds=2"]).rows[0].experiment.phases[1].rounds == 2
    with pytest.raises(InputError, match="there is no entry 1 in the list"):
        make_plan("001", choose("001"), SCALES["smoke"], ["phases.1.rounds=2"])


# ---------------------------------------------------------------------------------- the same experiment runs once


def test_rows_that_are_the_same_experiment_run_once() -> None:
    plan = plan_of("003", "smoke", seeds=2)
    runs = list(plan.runs())
    outcomes = {experiment.outcome().model_dump_json() for _, experiment, _ in runs}
    assert len(outcomes) == len(runs) == len({folder for _, _, folder in runs}) == 2 * 9
    assert {experiment.seed for _, experiment, _ in runs} == {42, 43}
    for row in plan.rows:
        mine = row.experiment.outcome()
        same = [other.preset for other in plan.rows if other.experiment.outcome() == mine]
        assert {other.runs_as for other in plan.rows if other.preset in same} == {row.runs_as}
        assert row.runs_as in same


def test_a_folder_does_not_depend_on_which_rows_are_asked_for() -> None:
    whole = {row.preset: row.runs_as for row in plan_of("003", "smoke").rows}
    assert whole["003-table1-fedavg-iid"] == "003-figure5-fedavg"
    for row in plan_of("003", "smoke", place="table 1").rows:
        assert row.runs_as == whole[row.preset]


def test_the_folder_by_default() -> None:
    assert plan_of("003", "smoke").folder == Path("runs/reproduce/smoke-pico")
    assert plan_of("003", "full").folder == Path("runs/reproduce/full-dino-vits16")
    assert backbone_name("some/where/weights.safetensors") == "weights"
    assert backbone_name("some/folder/") == "folder" and backbone_name("pico") == "pico"


# ------------------------------------------------------------------------------------- what may be compared


@pytest.mark.parametrize(
    ("scale", "overrides", "comparable"),
    [
        ("full", [], True),
        ("full", ["data.path=somewhere", "seed=3", "workers=2"], True),
        ("full", ["phases.0.rounds=100"], False),
        ("full", ["model.backbone=pico"], False),
        ("full", ["data.name=digits"], False),
        ("small", [], False),
        ("smoke", [], False),
        ("smoke", ["data.name=cifar100", "model.backbone=facebook/dino-vits16"], False),
    ],
)
def test_differences_are_shown_only_for_what_was_reported(
    tmp_path: Path, scale: str, overrides: list[str], comparable: bool
) -> None:
    plan = make_plan("003", choose("003", "table 1"), SCALES[scale], overrides, 2, tmp_path)
    outcomes = pretended(plan, lambda preset, seed: 0.5 + 0.01 * seed % 2 / 100)
    assert plan.is_comparable == comparable
    text = shown(plan, outcomes)
    write_tables(plan, outcomes)
    lines = list(csv.DictReader((tmp_path / "table.csv").open()))
    data = json.loads((tmp_path / "table.json").read_text())
    assert ("difference" in text) == ("difference" in lines[0]) == ("difference" in data["rows"][0]) == comparable
    assert ("not comparable" in text) == (not comparable)
    assert data["comparable"] == comparable and len(lines) == len(data["rows"]) == 12
    assert {line["comparable"] for line in lines} == {str(comparable).lower()}
    assert {(line["scale"], line["data"]) for line in lines} == {(plan.scale.name, plan.rows[0].experiment.data.name)}


def test_the_title_names_what_stands_in() -> None:
    title = plan_of("003", "smoke").title
    for part in (
        "smoke scale",
        "digits instead of CIFAR-100",
        "pico instead of DINO ViT-S/16",
        "1/10 of the rounds",
        "in proportion",
    ):
        assert part in title
    assert "at most 800 training images" in title and "Learning rates are as reported" in title
    title = plan_of("003", "small", "model.backbone=x/focus.safetensors", "clients.count=50").title
    assert "focus instead of DINO ViT-S/16" in title and "CIFAR-100, " in title and "clients.count=50" in title
    assert plan_of("003", "full").title == "report 003, full scale"


def test_differences_and_intervals() -> None:
    plan = plan_of("003", "full", place="table 1")
    outcomes = pretended(plan, lambda preset, seed: 0.70 + 0.01 * (seed - 42))
    (one,) = (one for one in outcomes if one.row.preset == "003-table1-fedavg-nc50")
    low, high = stats.t.interval(0.95, 2, loc=0.71, scale=stats.sem([0.70, 0.71, 0.72]))
    assert one.measured is not None and (one.measured.low, one.measured.high) == pytest.approx((low, high))
    assert one.difference == pytest.approx(0.71 - 0.7254)
    assert "003-table1-fedavg-nc50 │ 72.54% │ 71.0 ± 2.5% │ -1.5" in shown(plan, outcomes)


def test_validation_figures_are_compared_with_validation() -> None:
    plan = plan_of("003", "full", place="figure 5")
    assert [(row.metric, row.reported) for row in plan.rows] == [("val_accuracy", 0.8326), ("val_accuracy", 0.8398)]
    plan = plan_of("002", "full", place="table 4.3")  # has both figures of the centralized rows
    assert {row.metric for row in plan.rows} == {"test_accuracy"}


@given(st.lists(st.integers(0, 5), min_size=12, max_size=12))
def test_ranks_are_scipys(measured: list[int]) -> None:
    plan = PLAN_OF_TABLE_1
    values = dict(zip((row.preset for row in plan.rows), measured, strict=True))
    outcomes = [Outcome(row, {42: values[row.preset] / 10}, {}, {}) for row in plan.rows]
    found = ranks(outcomes)
    reported = stats.rankdata([-(row.reported or 0) for row in plan.rows], method="min")
    ahead = stats.rankdata([-value for value in measured], method="min")
    assert [found[row.preset] for row in plan.rows] == list(zip(reported, ahead, strict=True))


PLAN_OF_TABLE_1 = plan_of("003", "full", place="table 1", seeds=1)


def test_only_rows_of_a_group_are_ranked_and_only_those_with_figures() -> None:
    plan = plan_of("001", "small", seeds=1)
    outcomes = pretended(plan, lambda preset, seed: 0.5)
    found = ranks(outcomes)
    groups = {one.row.preset: one.row.group for one in outcomes}
    assert groups["001-table2-iid-j4"] == "table 2, figure 5" and "001-figure6-iid-least" not in found
    for preset, (reported, measured) in found.items():
        size = sum(groups[other] == groups[preset] for other in found)
        assert 1 <= reported <= size and measured == 1
    order = [one.row.group for one in outcomes]
    assert len(set(order)) == 1 + sum(one != other for one, other in pairwise(order))


# ---------------------------------------------------------------------------------------------- running


def test_a_table_from_real_runs(fedsieve: Callable, backbone: Path) -> None:
    asked = ["reproduce", "003", "--rows", "*fedavg*", "--seeds", "2", "--backbone", str(backbone), *TINY]
    code, printed, _ = fedsieve(*asked, "--out", "again")
    assert code == 0 and "tiny instead of DINO ViT-S/16" in " ".join(printed.split()) and "difference" not in printed
    data = json.loads(Path("again/table.json").read_text())
    assert [row["row"] for row in data["rows"]] == choose("003", None, ["*fedavg*"])
    for row in data["rows"]:
        results = [json.loads((Path("again") / row["runs_as"] / f"seed-{n}/result.json").read_text()) for n in (42, 43)]
        assert row["measured"] == pytest.approx(np.mean([one[row["metric"]] for one in results]))
        assert row["model_sha256"] == {str(one["seed"]): one["model_sha256"] for one in results}
        assert row["source"] == load_experiment(row["row"]).expect.source  # type: ignore[union-attr]
    assert len(list(Path("again").glob("*/seed-*/result.json"))) == 2 * len({row["runs_as"] for row in data["rows"]})
    before = {path: path.stat().st_mtime_ns for path in Path("again").rglob("*") if path.parent != Path("again")}
    code, printed, _ = fedsieve(*asked, "--out", "again")
    assert code == 0 and printed.count("(finished before)") == 2 * len({row["runs_as"] for row in data["rows"]})
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert json.loads(Path("again/table.json").read_text()) == data
    code, _, said = fedsieve(*asked, "phases.0.local.lr=0.5", "--out", "again")
    assert code == 2 and "holds a different run (phases.0.local.lr is 0.01 in its experiment.yaml, 0.5 here)" in said


def test_a_dry_run_writes_nothing(fedsieve: Callable, backbone: Path) -> None:
    asked = ["reproduce", "003", "--table", "1", "--seeds", "2", "--backbone", str(backbone), *TINY]
    cache = Path(os.environ["FEDSIEVE_CACHE"])
    before = set(cache.rglob("*"))
    code, printed, _ = fedsieve(*asked, "--dry-run")
    assert code == 0 and "003-table1-sparse-nc50" in printed and "estimated from a few timed images" in printed
    assert "the same as" in printed and "20 clients, 2 a" in printed
    assert list(Path.cwd().iterdir()) == [] and set(cache.rglob("*")) == before


def test_finished_runs_take_no_time(fedsieve: Callable, backbone: Path) -> None:
    asked = ["reproduce", "003", "--rows", "figure5-fedavg", "--seeds", "1", "--backbone", str(backbone), *TINY]
    assert " 0.0 s in all" not in fedsieve(*asked, "--dry-run")[1]
    assert fedsieve(*asked)[0] == 0
    assert "about 0.0 s in all" in fedsieve(*asked, "--dry-run")[1]


def test_a_row_that_fails_is_named_and_the_others_go_on(fedsieve: Callable, backbone: Path) -> None:
    asked = ["reproduce", "003", "--rows", "table1-*centralized", "--seeds", "1", "--backbone", str(backbone), *TINY]
    code, printed, said = fedsieve(*asked, "phases.0.local.lr=1e30", "--out", "here")
    assert code == 1 and "2 runs failed; the first is of 003-table1-centralized: " in said
    assert printed.count(": failed: ") == 2
    rows = json.loads(Path("here/table.json").read_text())["rows"]
    assert [row["measured"] for row in rows] == [None, None] and all(row["failed"]["42"] for row in rows)


@pytest.fixture
def command(backbone: Path) -> Callable[[Path], list[str]]:
    rows = ["--rows", "figure5-*"]
    slow = ["phases.0.rounds=12", "--seeds", "2", "--backbone", str(backbone), *TINY]
    start = [sys.executable, "-m", "fedsieve", "reproduce", "003"]
    return lambda out: [*start, *rows, *slow, "--out", str(out)]


def test_killed_and_started_again(command: Callable[[Path], list[str]], tmp_path: Path) -> None:
    """kill -9 in the midst of a later run: the same command goes on, with the same models, and repeats no run."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole), check=True, stdout=subprocess.DEVNULL)
    process = subprocess.Popen(command(killed), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def in_the_midst() -> list[Path]:
        begun = {path.parent for path in killed.glob("*/seed-*/metrics.jsonl") if path.read_bytes().count(b"\n") >= 2}
        return sorted(begun - {path.parent for path in killed.glob("*/seed-*/result.json")})

    while not list(killed.glob("*/seed-*/result.json")) or not in_the_midst():
        assert process.poll() is None, "the command ended before it could be killed"
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "table.json").exists()
    finished = {path: path.read_bytes() for path in killed.glob("*/seed-*/result.json")}
    again = subprocess.run(command(killed), check=True, capture_output=True, text=True).stdout
    assert again.count("(finished before)") == len(finished)
    assert {path: path.read_bytes() for path in finished} == finished
    one, other = (json.loads((folder / "table.json").read_text()) for folder in (whole, killed))
    assert one == other and sum(len(row["model_sha256"]) for row in one["rows"]) == 2 * len(one["rows"])


def test_data_of_a_plan_without_any_result() -> None:
    plan = plan_of("003", "smoke", place="figure 5")
    data = as_data(plan, [Outcome(row, {}, {}, {42: "why"}) for row in plan.rows])
    assert [row["measured"] for row in data["rows"]] == [None, None]
    assert "failed" in shown(plan, [Outcome(row, {}, {}, {42: "why"}) for row in plan.rows])
