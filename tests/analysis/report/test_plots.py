"""Pictures: in the pages' colours, phase by phase, and what lies on each other told apart."""

import re
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from fedsieve.analysis.report import plots
from fedsieve.analysis.report.page import page
from fedsieve.analysis.report.palette import COLOURS, where_equal


def line(phase: str, round: int, accuracy: float | None, loss: float = 1.0) -> dict[str, Any]:
    return {"phase": phase, "round": round, "val_accuracy": accuracy, "train_loss": loss}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would be saved."""
    figures: list[Any] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    return figures


def test_the_colours_are_those_of_the_pages() -> None:
    text = page("t", "explore", {})
    assert [re.search(rf"--c{k}: light-dark\((#\w+),", text)[1] for k in range(8)] == COLOURS  # type: ignore[index]


def test_each_phase_has_axes_of_its_own(drawn: list[Any]) -> None:
    head = [line("head", round, round / 100, 8 / round) for round in range(1, 31)]
    runs = {
        "dense": [*head, *(line("all", round, 0.5, 0.2) for round in (1, 2))],
        "sparse": [*head, *(line("edit", round, 0.6, 0.1) for round in (1, 2))],
        "head only": head,
    }
    plots.plot_curves(runs, Path("x.png"))
    (accuracy, after), (loss, _) = np.array(drawn[0].axes).reshape(2, 2)
    assert [axis.get_title(loc="left") for axis in (accuracy, after)] == ["phase 1: head", "phase 2: all / edit"]
    found = {one.get_label(): (list(one.get_xdata()), list(one.get_ydata())) for one in after.lines}
    assert found == {"dense": ([0, 1, 2], [0.3, 0.5, 0.5]), "sparse": ([0, 1, 2], [0.3, 0.6, 0.6])}
    assert after.get_xlim()[1] < 3 and len(accuracy.lines) == 3
    assert loss.get_yscale() == "log" and accuracy.get_yscale() == "linear"
    styles = [one.get_linestyle() for one in accuracy.lines]
    assert styles == ["-", "--", "--"] and {one.get_linestyle() for one in after.lines} == {"-"}


def test_equal_curves_have_dashes_and_markers_side_by_side() -> None:
    same, other = {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}, {1: 0.9, 2: 0.8, 3: 0.7, 4: 0.6}
    looks = where_equal([same, other, dict(same), dict(same)])
    assert [look["linestyle"] == "-" for look in looks] == [True, True, False, False]
    assert len({look["markevery"][0] for look in (looks[0], looks[2], looks[3])}) == 3
    (second, dashes), (third, same_dashes) = looks[2]["linestyle"], looks[3]["linestyle"]
    assert dashes == same_dashes and dashes[1] == 2 * dashes[0] and abs(second - third) == dashes[0]


def test_classes_are_named(drawn: list[Any]) -> None:
    plots.plot_split(np.array([[3, 0], [1, 2]]), ["cat", "dog $1 and $2"], Path("x.png"))
    (axis, *_) = drawn[0].axes
    assert [text.get_text() for text in axis.get_xticklabels()] == ["cat", "dog $1 and $2"]
    drawn[0].canvas.draw()  # as text, not as a formula


@pytest.mark.parametrize("most", [1, 2, 9, 20])
def test_there_is_no_half_sample(most: int, drawn: list[Any]) -> None:
    plots.plot_split(np.array([[most, 0], [1, 1]]), ["a", "b"], Path("x.png"))
    bar = drawn[0].axes[1]
    ticks = bar.get_yticks()
    assert len(ticks) > 1 and np.array_equal(ticks, np.rint(ticks)) and bar.get_ylabel() == "samples"


def test_the_file_has_the_pages_paper_and_the_darkest_cell_its_darkest_colour(tmp_path: Path) -> None:
    plots.plot_split(np.array([[9, 0], [1, 2]]), ["a", "b"], tmp_path / "x.png")
    red, green, blue = np.round(255 * matplotlib.image.imread(tmp_path / "x.png")[..., :3]).astype(int).reshape(-1, 3).T
    there = {f"#{colour:06x}" for colour in np.unique(red << 16 | green << 8 | blue)}
    assert {"#fdfdfb", "#12436d"} <= there
