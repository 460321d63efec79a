"""`fedsieve demo`: it goes on with its own runs, and leaves others as they are."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedsieve.analysis.report import demo
from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from listeners import interrupt

Maker = Callable[..., Experiment]
DENSE, SPARSE = (), ("phases.1.mask={sparsity: 0.5, rule: random}",)


@pytest.fixture
def small(experiment: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo of two small experiments."""
    presets = {"one": experiment(*DENSE), "two": experiment(*SPARSE)}
    monkeypatch.setattr(demo, "RUNS", {"dense": "one", "sparse": "two"})
    monkeypatch.setattr(demo, "load_experiment", presets.__getitem__)


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("small")
def test_finished_runs_are_kept_and_an_unfinished_one_goes_on(fedsieve: Callable, experiment: Maker) -> None:
    out = Path("out")
    run(experiment(*DENSE), out / "one")
    with pytest.raises(KeyboardInterrupt):
        run(experiment(*SPARSE), out / "two", callback=interrupt(4))
    (out / "one" / "notes.txt").write_text("my own")
    before = content(out / "one")
    code, printed, _ = fedsieve("demo", "--out", "out")
    assert code == 0 and "out/one is finished already" in printed and "going on after round" in printed
    assert content(out / "one") == before and (out / "curves.png").exists()
    before = content(out)
    again = fedsieve("demo", "--out", "out")[1]
    assert again.split("┏")[1] == printed.split("┏")[1], "the same table, with the same times"
    del before[out / "curves.png"]
    assert before.items() <= content(out).items()


@pytest.mark.usefixtures("small")
def test_another_run_is_refused_before_the_first_begins(fedsieve: Callable, experiment: Maker) -> None:
    run(experiment(*SPARSE, "seed=8"), Path("out", "two"))
    before = content(Path("out"))
    code, _, told = fedsieve("demo", "--out", "out")
    assert code == 2 and told.count("\n") == 1
    assert "--out out/two holds a different run (seed is 8" in told and "give another folder" in told
    assert content(Path("out")) == before


@pytest.mark.usefixtures("small")
def test_other_files_are_refused_before_the_first_begins(fedsieve: Callable) -> None:
    Path("out", "two").mkdir(parents=True)
    Path("out", "two", "thesis.tex").write_text("my own")
    code, _, told = fedsieve("demo", "--out", "out")
    assert code == 2 and told.count("\n") == 1 and "give the name of a new folder" in told
    assert set(content(Path("out"))) == {Path("out", "two", "thesis.tex")}
