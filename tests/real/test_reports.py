"""What presets say was reported stands in the reports, where their texts are at hand.

They are looked for in `$FEDSIEVE_ASSETS/reports` (default `../shared/reports`); without them these tests are skipped.
"""

import os
import re
from pathlib import Path

import pytest

from fedsieve.experiment_file import load_experiment, preset_names

ASSETS = Path(os.environ.get("FEDSIEVE_ASSETS", Path(__file__).parents[2] / "../shared")).resolve()
REPORTS = ASSETS / "reports"
pytestmark = pytest.mark.skipif(not REPORTS.is_dir(), reason="no texts of the reports at hand")
OF_REPORTS = [name for name in preset_names() if re.match(r"\d{3}-", name)]


def report_text(number: str) -> str:
    (path,) = REPORTS.glob(f"{number}_*.txt")
    return path.read_text()


def stands_in(text: str, accuracy: float) -> bool:
    """Whether a text has it as 0.7476, 74.76 or 74,76, with or without zeros behind it."""
    patterns = []
    for value in (accuracy, 100 * accuracy):
        whole, part = f"{value:.4f}".rstrip("0").split(".")
        patterns.append(rf"(?<![\d.,]){whole}[.,]{part}0*(?!\d)")
    return any(re.search(pattern, text) for pattern in patterns)


def test_how_figures_are_found() -> None:
    assert all(stands_in(text, 0.7476) for text in ("is 0.7476.", "74.76%", "74,76 %", "| 74.760"))
    assert not any(stands_in(text, 0.7476) for text in ("174.76", "74.761", "0.74765", "10.7476", "74 76"))
    assert stands_in("9.2%", 0.092) and stands_in("31.80%", 0.318) and not stands_in("9.25%", 0.092)


@pytest.mark.parametrize("name", OF_REPORTS)
def test_reported_figures_stand_in_the_report(name: str) -> None:
    expect = load_experiment(name).expect
    assert expect is not None
    text = report_text(name[:3])
    for figure in (expect.test_accuracy, expect.val_accuracy):
        assert figure is None or stands_in(text, figure), f"{figure} is not in report {name[:3]}"


def test_every_accuracy_of_table_2_of_report_001_has_its_preset() -> None:
    text = report_text("001")
    table = text[text.index("Federated Learning setting results") : text.index("Table 2. Hyperparameters")]
    rows = [line.split("\t") for line in table.splitlines() if line.startswith("<i>")]
    reported = sorted(re.findall(r"0\.\d{4}", row[3])[-1] for row in rows)
    presets = [load_experiment(name).expect for name in OF_REPORTS if name.startswith("001-table2-")]
    assert sorted(f"{expect.test_accuracy:.4f}" for expect in presets if expect) == reported


def test_every_accuracy_of_table_1_of_report_003_has_its_preset() -> None:
    text = report_text("003")
    table = text[text.index("SUMMARY OF FINAL TEST ACCURACIES") :]
    reported = sorted(re.findall(r"\t(\d\d\.\d\d)\n", table))
    presets = [load_experiment(name).expect for name in OF_REPORTS if name.startswith("003-table1-")]
    assert len(reported) == 12
    assert (
        sorted(f"{100 * expect.test_accuracy:.2f}" for expect in presets if expect and expect.test_accuracy) == reported
    )
