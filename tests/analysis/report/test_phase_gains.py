"""Accuracy before and after each phase, against what a run tested round by round."""

import json
from pathlib import Path

import pytest

from fedsieve.analysis.collection import Run, find_runs
from fedsieve.analysis.report.overview_tables import gains_table
from fedsieve.analysis.report.phase_gains import phase_gains, phase_outcomes
from fedsieve.config.experiment_file import parse_experiment
from fedsieve.experiment import run

SMALL = """
device: cpu
threads: 1
data: {name: digits, image_size: 16, limit: 300}
clients: {count: 2}
phases:
  - {name: head, train: head, rounds: 3, local: {steps: 4, batch_size: 16, lr: 0.5}}
  - {name: last, train: {blocks: [11]}, rounds: 3, local: {steps: 1, batch_size: 16, lr: 1.0, clip_norm: 1.0}}
evaluate: {test: each}
"""


@pytest.fixture(scope="module", params=["last", "best"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    for seed in (1, 2):
        run(parse_experiment(SMALL, "x", [f"evaluate.keep={request.param}", f"seed={seed}"]), place / f"seed-{seed}")
    return place


def found(folder: Path) -> list[Run]:
    return find_runs([folder])[0]


def test_a_phase_begins_where_the_one_before_ends(folder: Path) -> None:
    one = found(folder)[0]
    assert one.result is not None
    outcomes = phase_outcomes(one)
    assert list(outcomes) == ["head", "last"]
    assert outcomes["head"].before == {"val": None, "test": None} and outcomes["head"].gain("test") is None
    assert outcomes["last"].before == outcomes["head"].after
    for result in one.result["phases"]:
        outcome = outcomes[result["name"]]
        assert outcome.after["test"] == result["test_accuracy"] and outcome.of is None
        assert outcome.costs == {name: result[name] for name in ("bytes_up", "bytes_down", "seconds")}
    assert outcomes["last"].after["val"] == one.result["val_accuracy"]
    for name, outcome in outcomes.items():  # the round that the phase's weights are of, as it was tested then
        lines = [line for line in one.metrics if line["phase"] == name]
        best = one.experiment.evaluate.keep == "best"
        kept = max(lines, key=lambda line: (line["val_accuracy"], -line["val_loss"])) if best else lines[-1]
        assert outcome.after == {"val": kept["val_accuracy"], "test": kept["test_accuracy"]}


def test_gains_are_means_over_seeds_of_each_runs_own(folder: Path) -> None:
    runs = found(folder)
    gains = [phase_outcomes(one)["last"].gain("test") for one in runs]
    head, last = phase_gains(runs)
    assert head["test"]["gain"] is None and head["val"]["before"] is None and head["rounds"] == [3, 0, 2]
    margin = 12.706 * abs(gains[0] - gains[1]) / 2  # Student's t with one degree of freedom
    assert last["test"]["gain"] == [pytest.approx(sum(gains) / 2), pytest.approx(margin, rel=1e-4), 2]
    assert last["test"]["gain"][0] == pytest.approx(last["test"]["after"][0] - last["test"]["before"][0])


def test_the_table_marks_gains_on_validation_samples() -> None:
    known, unknown = (
        {"before": [0.5, None, 1], "after": [0.625, None, 1], "gain": gain} for gain in ([0.125, 0.01, 2], None)
    )
    phases = [
        {"name": name, "rounds": [3, 0, 2], "of": None, "val": val, "test": test}
        for name, val, test in (("both", known, known), ("untested", known, unknown), ("first", unknown, unknown))
    ]
    (column,) = (one for one in gains_table([{"name": "a", "gains": phases}]).columns if one.header == "gain (points)")
    assert list(column.cells) == ["+12.5 ± 1.0", "val +12.5 ± 1.0", "–"]


def test_an_unfinished_phase_has_its_newest_figures(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "seed-1/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "experiment.yaml").write_text((folder / "seed-1/experiment.yaml").read_text())
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:5]))
    (one,) = found(tmp_path)
    newest = json.loads(lines[4])
    last = phase_outcomes(one)["last"]
    assert (last.rounds, last.of) == (2, 3) and phase_gains([one])[1]["of"] == 3
    assert last.after == {"val": newest["val_accuracy"], "test": newest["test_accuracy"]}
    assert last.before == phase_outcomes(found(folder)[0])["head"].after
    latest = one.latest
    assert (latest["val_accuracy"], latest["test_loss"]) == (newest["val_accuracy"], newest["test_loss"])
    told = [json.loads(line) for line in lines[:5]]
    assert latest["best_val_accuracy"] == max(line["val_accuracy"] for line in told)
    assert latest["bytes_down"] == sum(line["bytes_down"] for line in told)
