"""What presets say was reported stands in the reports, where their texts are at hand.

They are looked for in `$FEDSIEVE_ASSETS/reports` (default `../shared/reports`); without them these tests are skipped.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsieve.config.experiment_file import load_experiment, preset_names
from fedsieve.config.partition_settings import ClassesSplit
from fedsieve.config.schema import Experiment

ASSETS = Path(os.environ.get("FEDSIEVE_ASSETS") or Path(__file__).parents[2] / "../shared").resolve()
REPORTS = ASSETS / "reports"
pytestmark = pytest.mark.skipif(not REPORTS.is_dir(), reason="no texts of the reports at hand")
OF_REPORTS = [name for name in preset_names() if re.match(r"\d{3}-", name) and not name.endswith("-literal")]


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


# Tables, row by row: what a report says of a row, read from its text, is what a preset of that table says.
Facts = tuple[object, ...]


def facts_of(prefix: str, facts: Callable[[Experiment], Facts]) -> list[Facts]:
    """Of all presets of a table, with the figure they expect, in percent."""
    found = []
    for name in (name for name in OF_REPORTS if name.startswith(prefix)):
        experiment = load_experiment(name)
        assert experiment.expect is not None
        figure = experiment.expect.test_accuracy or experiment.expect.val_accuracy
        found.append((*facts(experiment), None if figure is None else round(100 * figure, 2)))
    return sorted(found, key=str)


def classes_of(experiment: Experiment) -> int | None:
    """Classes per client; None for IID data."""
    split = experiment.clients.split
    return split.per_client if isinstance(split, ClassesSplit) else None


def frozen(experiment: Experiment) -> float | None:
    mask = experiment.phases[-1].mask
    return None if mask is None else mask.sparsity


def calibrations(experiment: Experiment) -> int | None:
    mask = experiment.phases[-1].mask
    return None if mask is None else mask.calibration_rounds


def table(number: str, start: str, end: str) -> list[list[str]]:
    """The tab-separated lines between two pieces of a report's text."""
    text = report_text(number)
    text = text[text.index(start) :]
    return [line.split("\t") for line in text[: text.index(end)].splitlines() if "\t" in line]


def percents(text: str) -> float:
    """The last accuracy in a text: 0.6888 → 0.7476, or 74.76%."""
    value = float(re.findall(r"\d+\.\d+", text)[-1])
    return round(100 * value if value < 1 and "%" not in text else value, 2)


def test_rows_of_table_1_of_report_001() -> None:
    rows = [row for row in table("001", "Centralized setting results", "Table 1. Hyper") if row[0].startswith("<i>")]
    said = [
        (None if row[1] == "-" else float(row[1]), sum(map(int, row[2].split("+"))), percents(row[6])) for row in rows
    ]
    found = facts_of("001-table1-", lambda one: (frozen(one), sum(phase.rounds for phase in one.phases)))
    assert len(said) == 8 and found == sorted(said, key=str)


def test_rows_of_table_2_of_report_001() -> None:
    text = report_text("001")
    text = text[text.index("Federated Learning setting results") : text.index("Table 2. Hyperparameters")]
    said: set[Facts] = set()
    for part in re.split(r"\nFigure ", text)[1:]:
        title, head, *rows = [line for line in part.splitlines() if line.strip()]
        for row in rows:
            cells = dict(zip(head.split("\t"), row.split("\t"), strict=True))
            kept = {
                key: float(value)
                for key, value in re.findall(r"(Sparsity|Local epochs|Calibration Rounds) = ([\d.]+)", title)
            }
            many = re.search(r"Nc(\d+)", cells["Name"])
            is_sparse = not cells["Name"].startswith("<i>Scen1")
            figure = next(value for key, value in cells.items() if key.startswith("Test Acc."))
            said.add(
                (
                    int(many[1]) if many else None,
                    int(cells.get("Local Epochs") or kept["Local epochs"]),
                    sum(map(int, cells["Global Epochs"].split("+"))) if "+" not in cells["Global Epochs"] else 100,
                    float(cells.get("Sparsity") or kept["Sparsity"]) if is_sparse else None,
                    int(float(cells.get("Calib. Rounds") or kept["Calibration Rounds"])) if is_sparse else None,
                    percents(figure),
                )
            )
    found = facts_of(
        "001-table2-",
        lambda one: (
            classes_of(one),
            one.phases[-1].local.epochs,
            one.phases[-1].rounds,
            frozen(one),
            calibrations(one),
        ),
    )
    assert set(found) == said


def test_rows_of_the_tables_of_report_002() -> None:
    rows = table("002", "Table 4.1", "4.4 Comparison")[1:]
    said: list[Facts] = [(None if row[2] == "-" else int(row[2]), int(row[1]), percents(row[3])) for row in rows]
    assert facts_of("002-table4.1-", lambda one: (classes_of(one), one.phases[-1].rounds)) == sorted(said, key=str)
    said = []
    for rounds, sparsity, iid, other in table("002", "Table 4.2", "4.6 Comparison")[1:]:
        said += [
            (None, int(rounds), float(sparsity), percents(iid)),
            (50, int(rounds), float(sparsity), percents(other)),
        ]
    assert facts_of("002-table4.2-", lambda one: (classes_of(one), calibrations(one), frozen(one))) == sorted(
        said, key=str
    )
    kinds = {"Centr": "central", "CentrEdit": "central", "FedAvgIID": None, "FedAvgIIDEdit": None}
    said = []
    for name, sparsity, rounds, figure in table("002", "Table 4.3", "4.7 Analysis")[1:]:
        is_sparse = name.endswith("Edit")
        held = kinds.get(name, 50)
        said.append(
            (held, float(sparsity) if is_sparse else None, int(rounds) if is_sparse else None, percents(figure))
        )
    found = facts_of(
        "002-table4.3-",
        lambda one: ("central" if one.clients.count == 1 else classes_of(one), frozen(one), calibrations(one)),
    )
    assert len(said) == 6 and found == sorted(said, key=str)


def test_rows_of_table_1_of_report_003() -> None:
    said = []
    for kind, data, figure in table("003", "SUMMARY OF FINAL TEST ACCURACIES", "difference is expected")[1:]:
        many = re.search(r"N_c=(\d+)", data)
        said.append(("Centralized" in kind, "Sparse" in kind, int(many[1]) if many else None, float(figure)))
    found = facts_of("003-table1-", lambda one: (one.clients.count == 1, frozen(one) is not None, classes_of(one)))
    assert len(said) == 12 and found == sorted(said, key=str)


def test_rows_of_table_1_of_report_004() -> None:
    said = []
    for names, figures in table("004", "Experimental Setting\tTest", "5.5. Comprehensive")[1:]:
        for name, figure in zip(re.findall(r".+?\)", names), figures.split(), strict=True):
            rule = "least_sensitive" if "Least" in name else "random" if "Random" in name else None
            said.append(("Centralized" in name, 2 if "Non-IID" in name else None, rule, float(figure)))

    def facts(one: Experiment) -> Facts:
        mask = one.phases[-1].mask
        return (one.clients.count == 1, classes_of(one), mask.rule if mask else None)

    found = [row for row in facts_of("004-table1-", facts) if row[-1] is not None]
    assert len(said) == 7 and found == sorted(said, key=str)
