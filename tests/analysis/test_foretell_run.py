"""`fedsieve run --dry-run`: what it says, that it checks the input, and that it writes nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedsieve.analysis import foretell_run
from fedsieve.analysis.foretell_run import foretold
from fedsieve.analysis.repeat import repeat
from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from fedsieve.runs.read import read_metrics
from listeners import interrupt

Maker = Callable[..., Experiment]


def test_it_says_what_would_be_run_and_writes_nothing(fedsieve: Callable, file: Path) -> None:
    code, printed, _ = fedsieve("run", str(file), "--dry-run", "--seeds", "3")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    assert code == 0 and [row[:3] for row in rows] == [
        ["head", "9", "3"],
        ["all", "6", "3"],
        ["3 seeds", "15", ""],
    ]
    assert all(row[-1].endswith(" s") for row in rows)
    assert not list(Path().iterdir())


def test_the_input_is_checked_as_for_a_run(fedsieve: Callable, file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    for wrong in (["data.path=nowhere.npz"], ["clients.count=5000"], ["--out", str(tmp_path / "mine")]):
        code, _, told = fedsieve("run", str(file), *wrong, "--dry-run")
        assert code == 2 and told.startswith("error: ") and told.count("\n") == 1


def test_bytes_are_about_those_of_the_run(experiment: Maker, tmp_path: Path) -> None:
    masked = "phases.1.mask={sparsity: 0.9, rule: random, only: [mlp]}"
    scaffold = ["phases.*.method=scaffold", "phases.*.local.momentum=0"]
    shared = "phases.1.mask={sparsity: 0.9, rule: random, scope: server}"
    for changes in (
        [],
        [masked],
        ["wire.values=float16"],
        ["model.head=ridge"],
        [*scaffold, masked, "wire.values=int8"],
        [*scaffold, shared, "clients.secure=zero_sum"],
    ):
        settings = experiment(*changes)
        phases = foretold(settings, tmp_path / "none", 1, False, False)
        run(settings, out := tmp_path / "-".join(["run", *changes]))
        for phase in phases:
            lines = [line for line in read_metrics(out) if line["phase"] == phase.name]
            assert len(lines) == phase.rounds
            for line in lines:
                assert line["bytes_up"] == pytest.approx(phase.up, rel=0.2, abs=3000)
                assert line["bytes_down"] <= phase.down + 3000


def test_a_resumed_run_says_what_is_left(experiment: Maker, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(experiment(), tmp_path / "run", callback=interrupt(4))
    head, all_ = foretold(experiment(), tmp_path / "run", 1, resume=True, force=False)
    assert (head.rounds, all_.rounds) == (0, 1) and all_.seconds > 0


@pytest.mark.parametrize("rounds", [2, 4, 5])
def test_a_phase_that_ended_early_is_over(rounds: int, experiment: Maker, tmp_path: Path) -> None:
    """A learning rate of 0 never improves on the first round, so the first phase ends after four rounds."""
    stop = ("phases.0.rounds=50", "phases.0.stop={patience: 3}", "phases.0.local.lr=0.0")
    with pytest.raises(KeyboardInterrupt):
        run(experiment(*stop), tmp_path / "run", callback=interrupt(rounds))
    head, all_ = foretold(experiment(*stop), tmp_path / "run", 1, resume=True, force=False)
    assert (head.rounds, all_.rounds) == {2: (48, 2), 4: (0, 2), 5: (0, 1)}[rounds]


def test_nothing_is_left_of_a_finished_run(experiment: Maker, tmp_path: Path) -> None:
    stop = "phases.1.stop={target: 0.0}"
    run(experiment(stop), tmp_path / "run")
    phases = foretold(experiment(stop), tmp_path / "run", 1, resume=True, force=False)
    assert [(phase.rounds, phase.seconds, phase.notes) for phase in phases] == [(0, 0.0, []), (0, 0.0, [])]


def test_finished_seeds_count_nothing(experiment: Maker, tmp_path: Path) -> None:
    repeat(experiment(), tmp_path / "runs", 2)
    with pytest.raises(KeyboardInterrupt):
        repeat(experiment(), tmp_path / "runs", 3, resume=True, callback=interrupt(4))
    left = [foretold(experiment(), tmp_path / "runs", seeds, resume=True, force=False) for seeds in (2, 3, 4)]
    assert [[phase.rounds for phase in phases] for phases in left] == [[0, 0], [0, 1], [3, 3]]
    assert [phase.seconds for phase in left[0]] == [0.0, 0.0] and left[1][0].seconds == 0.0


def test_a_runs_start_counts_once_in_each_run_that_is_left(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foretell_run, "PER_RUN", 1e6)
    with pytest.raises(KeyboardInterrupt):
        repeat(experiment(), tmp_path / "runs", 1, callback=interrupt(4))
    for seeds, runs in ((1, (0, 1)), (3, (2, 1))):
        folder = tmp_path / "runs" / "seed-7" if seeds == 1 else tmp_path / "runs"
        phases = foretold(experiment(), folder, seeds, resume=True, force=False)
        assert tuple(phase.seconds // 1e6 for phase in phases) == runs


def test_it_prints_the_notes_that_a_run_begins_with(fedsieve: Callable, file: Path) -> None:
    parts = ("phases.0.method=scaffold", "phases.0.local.momentum=0", "phases.1.aggregate=median")
    options = ("run", str(file), *parts, "phases.1.mask={rule: random, sparsity: 0.5}", "--out", "run")
    before, told = fedsieve(*options, "--dry-run")[1], fedsieve(*options)[1]
    notes = [line for line in before.splitlines() if line.startswith("note: ")]
    assert len(notes) == 3 and "remembers" in notes[0] and "holds all updates" in notes[1] and "kept" in notes[2]
    assert [line for line in told.splitlines() if line.startswith("note: phase")][:3] == notes
