"""The page of verdicts is what its raw results say."""

import importlib.util
import json
import re
import statistics
from pathlib import Path
from types import ModuleType

import pytest
import scipy.stats
import yaml

from fedsieve.analysis.sweep.sweep_file import combinations

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def claims() -> ModuleType:
    spec = importlib.util.spec_from_file_location("claims", ROOT / "scripts" / "claims.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_built_from_the_results_that_stand_beside_it(claims: ModuleType, tmp_path: Path) -> None:
    page = claims.build(tmp_path)
    assert page == (DOCS / "claims.md").read_text(), "run `make claims`"
    for name in re.findall(r"\]\((claims/[\w.-]+)\)", page):
        assert (DOCS / name).exists(), name
    headings = [claims.anchor(title) for title in re.findall(r"^## (.+)$", page, re.MULTILINE)]
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= set(headings)


def test_without_a_p_value_nothing_is_told_apart(claims: ModuleType) -> None:
    assert [claims.may_be_chance(p) for p in (None, 1.0, 0.06, 0.04, 0.0)] == [True, True, True, False, False]


def test_differences_are_shown_on_both_kinds_of_images(claims: ModuleType) -> None:
    """Recomputed by scipy from the raw results: five calibration rounds against one, centrally."""
    one, five = (arm["seeds"] for arm in claims.results("central-calibration")["arms"])
    page = (DOCS / "claims.md").read_text()
    for images, figure in (("test", "test_accuracy"), ("validation", "val_accuracy")):
        differences = [100 * (five[seed][figure] - one[seed][figure]) for seed in one]
        p = scipy.stats.ttest_1samp(differences, 0).pvalue
        row = page.split(f"points more than *1 round*, paired, {images} images | one client |")[1].split("\n")[2]
        assert f"{statistics.mean(differences):+.1f} ± " in row
        assert f"(p {p:.3f})" in row or f"(p {p:.2f})" in row


def test_results_name_no_machine() -> None:
    for path in (DOCS / "results").glob("*.json"):
        found = json.loads(path.read_text())
        assert Path(found["experiment"]).name == found["experiment"], path.name
        assert "/" not in json.dumps(found), path.name


def test_sweeps_and_results_belong_together() -> None:
    """Each result is of a sweep in docs/claims, with the arms and seeds that its file asks for."""
    for path in (DOCS / "results").glob("*.json"):
        found, asked = json.loads(path.read_text()), yaml.safe_load((DOCS / "claims" / f"{path.stem}.yaml").read_text())
        arms = [arm["values"] for arm in found["arms"]]
        wanted = combinations(asked["arms"])
        assert arms == wanted, path.name
        for arm in found["arms"]:
            tried = {trial["values"][key] for trial in arm["trials"] for key in trial["values"]}
            assert tried <= {value for values in asked.get("search", {}).values() for value in values}, path.name


def test_a_row_may_come_from_two_sweeps(claims: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sweep sets for all its arms counts as much as what tells them apart."""
    (tmp_path / "results").mkdir()
    for name, fixed, varied, accuracy in (
        ("splits", {"rule": "least"}, {"split": "iid"}, 0.25),
        ("rules", {"split": "one class"}, {"rule": "least"}, 0.5),
    ):
        arm = {"values": varied, "chosen": None, "seeds": {"42": {"test_accuracy": accuracy}}}
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps({"set": fixed, "arms": [arm]}))
    monkeypatch.setattr(claims, "DOCS", tmp_path)

    row = {"sweep": ["splits", "rules"], "where": {"rule": "least"}}
    assert claims.find(row, {"where": {"split": "iid"}}).accuracies == {42: 0.25}
    assert claims.find(row, {"where": {"split": "one class"}}).accuracies == {42: 0.5}
    assert claims.find({**row, "where": {"rule": "most"}}, {"where": {"split": "one class"}}) is None


def test_the_best_is_told_from_seeds_that_all_have(claims: ModuleType) -> None:
    def cell(**accuracies: float) -> object:
        return claims.Cell({"seeds": {seed[1:]: {"val_accuracy": value} for seed, value in accuracies.items()}})

    cells = {"three seeds": cell(s1=0.5, s2=0.5, s3=0.5), "four seeds": cell(s1=0.4, s2=0.4, s3=0.4, s4=0.9)}
    assert claims.best_of(cells) == "three seeds"


def test_figures_agree_with_scipy(claims: ModuleType) -> None:
    """Means, intervals and paired tests of whatever is measured, computed another way."""
    arms = [arm for path in (DOCS / "results").glob("*.json") for arm in json.loads(path.read_text())["arms"]]
    repeated = [arm for arm in arms if len(arm["seeds"]) > 2]
    assert repeated
    for arm in repeated:
        values = [run["test_accuracy"] for run in arm["seeds"].values()]
        cell = claims.Cell(arm)
        about = claims.interval(list(cell.accuracies.values()))
        low, high = scipy.stats.t.interval(
            0.95, len(values) - 1, statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
        )
        assert about.mean - about.margin == pytest.approx(low) and about.mean + about.margin == pytest.approx(high)
        text = claims.with_margin(about)
        assert text == f"{50 * (low + high):.1f} ± {50 * (high - low):.1f}"
    one, other = repeated[0]["seeds"], repeated[1]["seeds"]
    seeds = [seed for seed in one if seed in other]
    expected = scipy.stats.ttest_rel(
        [one[seed]["test_accuracy"] for seed in seeds], [other[seed]["test_accuracy"] for seed in seeds]
    )
    found = claims.paired(claims.Cell(repeated[0]).accuracies, claims.Cell(repeated[1]).accuracies)
    assert found.p == pytest.approx(expected.pvalue)


def test_what_a_phase_brings_is_told_from_where_it_began(claims: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended, others = [0.30, 0.31, 0.28], [0.36, 0.35, 0.33], [0.37, 0.35, 0.36]
    arms = [
        {
            "values": {"rule": rule},
            "chosen": None,
            "seeds": {
                str(seed): {"test_accuracy": end, "val_accuracy": end, "test_accuracy_before": start}
                for seed, (start, end) in enumerate(zip(began, ends, strict=True))
            },
        }
        for rule, ends in (("least", ended), ("random", others))
    ]
    monkeypatch.setattr(claims, "results", lambda _: {"set": {}, "arms": arms})
    rows = {rule: {"sweep": "some", "where": {"rule": rule}} for rule in ("least", "random")}
    study = claims.Study(rows, {"all": {}}, "random")

    p_values = [scipy.stats.ttest_rel(ends, began).pvalue for ends in (ended, others)]
    corrected = [min(1, 2 * min(p_values)), max(2 * min(p_values), max(p_values))]
    least = corrected[0] if p_values[0] < p_values[1] else corrected[1]
    line = next(line for line in claims.gain_table(study) if line.startswith("| least"))
    assert line.startswith("| least | +5.0 ± ") and line.endswith(f"(p {least:.3f}) |")
    assert f"(p {scipy.stats.ttest_rel(ended, others).pvalue:.2f}) |" in claims.difference_table(study)[2]


def test_what_an_optimizer_keeps_is_what_it_keeps(claims: ModuleType) -> None:
    """The memory in the guidelines, against the state of a real SparseSGDM after a step."""
    import torch

    from fedsieve import Mask, SparseSGDM

    weight = torch.nn.Parameter(torch.randn(300, 400))
    for active in (0.05, 0.1, 0.5, 0.8, 1.0):
        bits = (torch.rand(300, 400, generator=torch.Generator().manual_seed(7)) < active) | (active == 1)
        optimizer = SparseSGDM(
            [("weight", weight)], Mask.pack({"weight": (300, 400)}, bits.flatten()), lr=0.1, momentum=0.9
        )
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        momentum = optimizer.state[weight]["momentum_buffer"]
        selection = optimizer._selections[weight]
        positions = [one for one in (selection.index, selection.held) if one is not None]
        size = sum(one.numel() * one.element_size() for one in (momentum, *positions))
        share = float(bits.float().mean())
        assert claims.kept(share, bits.numel()) == pytest.approx(size, rel=0.01)


def test_guidelines_take_the_best_within_each_budget(claims: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def arm(sent: int, *accuracies: float) -> dict[str, object]:
        runs = {
            str(seed): {
                "test_accuracy": value,
                "val_accuracy": value,
                "test_accuracy_before": 0.25 + seed / 1000,
                "phase_bytes_up": sent,
            }
            for seed, value in enumerate(accuracies)
        }
        return {"arms": [{"values": {}, "chosen": None, "seeds": runs}], "set": {}}

    results = {
        "all": arm(1000, 0.43, 0.40, 0.42),
        "half": arm(500, 0.40, 0.41, 0.42),
        "tenth": arm(100, 0.30, 0.311, 0.32),
        "none": arm(9, 0.25, 0.26, 0.271),
    }
    monkeypatch.setattr(claims, "results", results.__getitem__)
    frozen = {"all": 0.0, "half": 0.5, "tenth": 0.9, "none": 1.0}
    spec = {
        "weights": 1000,
        "columns": {"IID": {}},
        "budgets": [
            {},
            {"sent": 800, "kept": 4000},
            {"sent": 600, "kept": 4000},
            {"sent": 600, "kept": 800},
            {"sent": 5, "kept": 800},
        ],
        "candidates": {
            name: {"sweep": name, "rule": name, "frozen": share, "calibration": 1, "steps": 4}
            for name, share in frozen.items()
        },
    }
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in claims.guidelines(spec)[2:]]

    assert [row[2] for row in rows] == ["all", "half", "tenth", "none"]  # 600 bytes bring no other advice than 800
    assert [row[1] for row in rows] == ["none", "800 B, 4.0 kB", "600 B, 800 B", "5 B, 800 B"]
    assert [row[8] for row in rows] == ["1.0 kB", "500 B", "100 B", "0 B"]  # without a phase nothing is sent
    assert [row[9] for row in rows] == ["4.0 kB", "4.0 kB", "800 B", "0 B"]
    assert rows[0][10] == "half" and rows[1][10] == "–"  # half may be as good as all; a tenth is worse beyond doubt
    assert rows[2][7].startswith("+5.9 ± ")  # 0.310 after 0.251
