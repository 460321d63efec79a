"""`fedsieve report`: which folders it takes, and what it says of the others."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsieve.config.experiment_file import load_experiment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that has just begun, and beside it something else."""
    for name in ("runs/a", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs/a/experiment.yaml").write_text(load_experiment("digits-iid", []).resolved().to_yaml())
    return tmp_path


def test_what_is_no_run_is_named_and_the_rest_is_reported(fedsieve: Callable, folder: Path) -> None:
    code, printed, error = fedsieve("report", str(folder / "runs"), str(folder / "other"), str(folder / "absent"))
    assert code == 0 and "written to report.html" in printed and "unfinished" in printed
    warnings = error.splitlines()
    assert [line.startswith("warning: ") for line in warnings] == [True, True]
    assert "other" in warnings[0] and "absent" in warnings[1]
    assert "absent" in Path("report.html").read_text()  # the reader of the page should know it, too


def test_no_run_at_all_is_an_error(fedsieve: Callable, folder: Path) -> None:
    code, _, error = fedsieve("report", str(folder / "other"), "--out", "page.html")
    assert code == 2 and error.startswith("error: ") and "other" in error and error.count("\n") == 1
    assert not Path("page.html").exists()


def test_json_is_the_pages_data_and_no_page_is_written(fedsieve: Callable, folder: Path) -> None:
    code, printed, error = fedsieve("report", str(folder / "runs"), "--json", "--title", "Mine")
    assert code == 0 and error == "" and list(Path.cwd().iterdir()) == []
    data = json.loads(printed)
    assert data["title"] == "Mine" and data["groups"][0]["state"].startswith("unfinished: round 0 of ")


def test_the_page_is_the_same_each_time(fedsieve: Callable, folder: Path) -> None:
    for name in ("one.html", "two.html"):
        assert fedsieve("report", str(folder / "runs"), "--out", name)[0] == 0
    assert Path("one.html").read_bytes() == Path("two.html").read_bytes()


def test_where_it_cannot_be_written_it_is_said(fedsieve: Callable, folder: Path) -> None:
    code, _, error = fedsieve("report", str(folder / "runs"), "--out", "/dev/null/x.html")
    assert code == 2 and "cannot be written" in error
