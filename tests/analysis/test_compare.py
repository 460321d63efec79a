"""Comparing runs; end to end against scipy, on what real runs wrote."""

import json
import re
from collections.abc import Callable
from csv import DictReader
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from fedsieve.analysis.compare import compare, in_few_words, short, telling
from fedsieve.analysis.repeat import repeat
from fedsieve.analysis.report.formats import as_csv, as_data, as_latex, escaped
from fedsieve.analysis.report.tables import comparison_table
from fedsieve.config.experiment_file import load_experiment, parse_experiment
from fedsieve.errors import InputError
from fedsieve.runs.read import FIGURES, read_result

SMALL = """
device: cpu
threads: 1
data: {name: digits, image_size: 16}
clients: {count: 2}
phases: [{name: head, train: head, rounds: 2, local: {steps: 2, batch_size: 32, lr: 0.1}}]
"""
PHASE = dict.fromkeys(("best_round", "best_val_accuracy", "best_val_loss", "test_accuracy", "test_loss"))
PHASE |= {"name": "head", "rounds": 1, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0}  # of a result.json


def made(folder: Path, accuracy: float | None, *overrides: str, rounds: int | None = None, data: str = "x") -> Path:
    """A folder as a run leaves it: finished with this accuracy, or after some rounds."""
    folder.mkdir(parents=True)
    experiment = load_experiment("digits-edit-iid", list(overrides)).resolved()
    (folder / "experiment.yaml").write_text(experiment.to_yaml())
    line = {"phase": "head", "round": 1, "val_accuracy": None, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0}
    (folder / "metrics.jsonl").write_text((json.dumps(line) + "\n") * (rounds or 1))
    if rounds is not None:
        return folder
    result = {name: accuracy if name.endswith("accuracy") else 10 * experiment.seed for name in FIGURES}
    result |= {"seed": experiment.seed, "model_sha256": "0", "phases": [PHASE], "data_fingerprint": data}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def four(place: Path) -> Path:
    """Two settings over two seeds."""
    for seed in (1, 2):
        made(place / f"dense-{seed}", 0.5 + seed / 100, f"seed={seed}", "phases.1.mask=null")
        made(place / f"sparse-{seed}", 0.6 + seed / 50, f"seed={seed}")
    return place


@pytest.fixture(scope="module")
def real(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of two learning rates, really run."""
    place = tmp_path_factory.mktemp("real")
    for lr in (0.1, 0.01):
        repeat(parse_experiment(SMALL, "small", [f"phases.0.local.lr={lr}"]), place / f"lr-{lr}", 3)
    return place


def test_real_runs_give_what_scipy_says(fedsieve: Callable, real: Path) -> None:
    code, printed, said = fedsieve("compare", str(real), "--baseline", "lr=0.1", "--json")
    assert code == 0 and not said
    shown = json.loads(printed)
    results = {lr: [read_result(real / f"lr-{lr}/seed-{seed}") for seed in (42, 43, 44)] for lr in (0.01, 0.1)}
    assert shown["by"] == ["phases.0.local.lr"]
    groups = {group["settings"]["phases.0.local.lr"]: group for group in shown["groups"]}
    for lr, group in groups.items():
        assert group["n"] == 3 and group["seeds"] == [42, 43, 44]
        for name in FIGURES:
            values = [result[name] for result in results[lr]]
            assert group["figures"][name]["values"] == values
            assert group["figures"][name]["mean"] == pytest.approx(np.mean(values))
            if stats.sem(values) > 0:
                limits = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
                assert (group["figures"][name]["low"], group["figures"][name]["high"]) == pytest.approx(limits)
    small, large = ([result["test_accuracy"] for result in results[lr]] for lr in (0.01, 0.1))
    test = stats.ttest_rel(small, large)
    span = test.confidence_interval(0.95)
    difference = groups[0.01]["difference"]
    assert groups[0.1]["difference"] is None and groups[0.1]["is_baseline"]
    assert difference["pairs"] == 3 and difference["mean"] == pytest.approx(np.mean(np.subtract(small, large)))
    assert (difference["low"], difference["high"]) == pytest.approx((span.low, span.high))
    assert difference["p"] == pytest.approx(test.pvalue) and difference["p_holm"] == difference["p"]  # a single test


def test_the_command_prints_and_writes(fedsieve: Callable, real: Path) -> None:
    code, printed, _ = fedsieve("compare", str(real), "--csv", "x.csv", "--latex", "x.tex")
    accuracies = [read_result(real / f"lr-0.01/seed-{seed}")["test_accuracy"] for seed in (42, 43, 44)]
    assert code == 0 and f"{100 * np.mean(accuracies):.1f}" in printed and "p (Holm)" in printed
    assert max(map(len, printed.splitlines())) <= 100
    rows = list(DictReader(Path("x.csv").read_text().splitlines()))
    row = next(row for row in rows if row["phases.0.local.lr"] == "0.01")
    assert float(row["test_accuracy_mean"]) == pytest.approx(np.mean(accuracies), rel=1e-14)
    assert row["seeds"] == "42 43 44"
    assert r"\begin{tabular}" in Path("x.tex").read_text()


def test_p_values_are_corrected_for_their_number(tmp_path: Path) -> None:
    draws = np.random.default_rng(0).normal(0.5, 0.02, size=(4, 5)) + np.array([[0], [0.05], [0.01], [0.0]])
    for group, values in enumerate(draws):
        for seed, value in enumerate(values):
            made(tmp_path / f"{group}-{seed}", float(value), f"seed={seed}", f"phases.1.mask.sparsity=0.{group + 1}")
    comparison = compare([tmp_path])
    p_values = [stats.ttest_rel(values, draws[0]).pvalue for values in draws[1:]]
    theirs = np.empty(3)
    order, highest = np.argsort(p_values), 0.0
    for rank, place in enumerate(order):
        highest = theirs[place] = max(highest, min(1, (3 - rank) * p_values[place]))
    assert [group.difference and group.difference.p for group in comparison.groups[1:]] == pytest.approx(p_values)
    assert [group.corrected for group in comparison.groups[1:]] == pytest.approx(list(theirs))


def test_groups_are_named_by_their_folders(fedsieve: Callable, tmp_path: Path) -> None:
    for seed in (1, 2):
        made(tmp_path / f"sparse/seed-{seed}", 0.5 + seed / 100, f"seed={seed}")
        made(tmp_path / f"dense/seed-{seed}", 0.5, f"seed={seed}", "phases.1.mask=null", "phases.1.local.lr=1.0")
    comparison = compare([tmp_path], baseline=["sparse"])
    assert [group.name for group in comparison.groups] == ["dense", "sparse"] and not comparison.shown
    assert comparison.baseline.name == "sparse"
    _, printed, _ = fedsieve("compare", str(tmp_path), "--csv", "x.csv", "--latex", "x.tex")
    assert "test accuracy less that of dense" in printed and "│ sparse " in printed and "│ 1.0 " not in printed
    assert "groups differ in phases.1.local.lr, phases.1.mask.*" in printed
    assert [row["name"] for row in DictReader(Path("x.csv").read_text().splitlines())] == ["dense", "sparse"]
    assert "\nsparse & 2 & " in Path("x.tex").read_text()


def test_long_names_are_broken_between_words(tmp_path: Path) -> None:
    for rule, rate in (("largest_magnitude", 0.1), ("smallest_magnitude_of_all", 0.2), ("a" * 30, 0.3)):
        for seed in (1, 2):
            accuracy = rate + seed / 50
            made(tmp_path / f"{rule}/seed-{seed}", accuracy, f"phases.0.local.lr={rate}", f"seed={seed}")
    console = Console(width=80, file=StringIO())
    console.print(comparison_table(compare([tmp_path])))
    shown = [line.split("│")[1].strip() for line in console.file.getvalue().splitlines() if "│" in line]
    words = {word for line in shown for word in line.split("_") if word.strip("a")}
    assert words == {"largest", "smallest", "magnitude", "of", "all"} and len(shown) > 7
    assert "".join(shown) == "a" * 30 + "largest_magnitude" + "smallest_magnitude_of_all"


def test_arms_of_a_sweep_are_named_though_links_lead_to_their_runs(tmp_path: Path) -> None:
    for arm in ("random", "least"):
        rule = {"random": "random", "least": "least_sensitive"}[arm]
        made(tmp_path / f"runs/{arm}/trial-000/seed-1", 0.5, "seed=1", f"phases.1.mask.rule={rule}")
        (tmp_path / "best").mkdir(exist_ok=True)
        (tmp_path / "best" / arm).symlink_to(f"../runs/{arm}/trial-000")
    for paths in ([tmp_path / "best/least", tmp_path / "best/random"], [tmp_path / "best"]):
        assert [group.name for group in compare(paths).groups] == ["least", "random"]


def test_by_takes_the_end_of_a_key(tmp_path: Path) -> None:
    comparison = compare([four(tmp_path)], by=["rule"])
    assert comparison.keys == comparison.shown == ["phases.1.mask.rule"]
    assert [group.name for group in comparison.groups] == ["rule=–", "rule=least_sensitive"]
    assert compare([tmp_path], by=["mask"]).keys == compare([tmp_path], by=["phases.1.mask"]).keys
    assert compare([tmp_path], by=["count"]).keys == ["clients.count"]  # the same in all, and a warning says so


def test_of_several_keys_with_an_end_the_one_that_differs_is_meant(tmp_path: Path) -> None:
    head = "phases.0.mask={rule: random, sparsity: 0.5}"
    for rule, rate in (("largest_magnitude", 0.1), ("smallest_magnitude", 0.2)):
        made(tmp_path / rule, 0.5, head, f"phases.1.mask.rule={rule}", f"phases.1.local.lr={rate}")
    assert compare([tmp_path], by=["rule"]).keys == ["phases.1.mask.rule"]
    assert compare([tmp_path], by=["local.lr"]).shown == ["phases.1.local.lr"]
    assert compare([tmp_path], by=["mask"]).keys == ["phases.1.mask.rule"]
    with pytest.raises(InputError, match="'sparsity' is the end of several settings"):
        compare([tmp_path], by=["sparsity"])  # the same in all


def test_phases_may_be_named_as_in_overrides(tmp_path: Path) -> None:
    four(tmp_path)
    comparison = compare([tmp_path], by=["phases.edit.mask.rule"], baseline=["phases.edit.mask.rule=least_sensitive"])
    assert comparison.keys == ["phases.1.mask.rule"] and comparison.baseline.name == "rule=least_sensitive"
    assert compare([tmp_path], by=["phases.edit"]).keys == compare([tmp_path], by=["phases.1"]).keys
    with pytest.raises(InputError, match=r"no run has a setting 'phases.tune.mask.rule'"):
        compare([tmp_path], by=["phases.tune.mask.rule"])


@pytest.mark.parametrize(
    "other",
    ["phases=[{name: edit, train: head, rounds: 1, local: {steps: 1, batch_size: 8, lr: 0.1}}]", "phases.1.name=tune"],
)
def test_a_phase_by_name_is_in_the_same_place_in_all_runs(other: str, tmp_path: Path) -> None:
    made(tmp_path / "a", 0.5), made(tmp_path / "b", 0.6, other)
    with pytest.raises(InputError, match=r"phase edit is not in the same place in all runs; give phases\.(0 or|1)"):
        compare([tmp_path], by=["phases.edit.local.lr"])


def test_groups_by_settings_show_the_fewest_that_tell_them_apart(tmp_path: Path) -> None:
    comparison = compare([four(tmp_path)], by=["phases.1.mask"])
    assert comparison.shown == ["phases.1.mask.sparsity"]
    assert len(comparison.keys) > 5 and "phases.1.mask.rule" in comparison.keys
    assert [[run.path.name for run in group.runs] for group in comparison.groups] == [
        ["dense-1", "dense-2"],
        ["sparse-1", "sparse-2"],
    ]


def test_a_folder_that_is_no_run_is_named_and_the_others_compared(fedsieve: Callable, tmp_path: Path) -> None:
    code, printed, said = fedsieve("compare", str(four(tmp_path / "runs")), str(tmp_path / "nothing"))
    assert code == 0 and "sparse-1 and 1 more" in " ".join(printed.replace("│", " ").split())
    assert said.startswith("warning: ") and "nothing is no folder" in said


LINE = '{"phase": "head", "round": 1, "val_accuracy": null, "bytes_down": 1, "seconds": 1}'


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("metrics.jsonl", LINE, "line 1: there is no bytes_up"),
        ("metrics.jsonl", "null", "line 1: this is no object"),
        ("metrics.jsonl", b"\xff\xfe", "this is not text"),
        ("metrics.jsonl", None, "Is a directory"),
        ("experiment.yaml", b"seed: \xff", "this is not text"),
        ("experiment.yaml", None, "Is a directory"),
        ("result.json", '{"model_sha256": "0", "pha', "this is not JSON"),
        ("result.json", '{"model_sha256": "0", "phases": [], "test_accuracy": 0.5}', "there is no test_loss"),
        ("result.json", "[]", "this is no object"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "report"])
def test_a_damaged_run_is_named_and_the_others_are_there(
    command: str, file: str, content: str | bytes | None, said: str, fedsieve: Callable, tmp_path: Path
) -> None:
    """`content` is what the file holds instead; None makes it a folder."""
    damaged = made(four(tmp_path) / "damaged", 0.5, "seed=3") / file
    damaged.unlink(missing_ok=True)
    if content is None:
        damaged.mkdir()
    else:
        damaged.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, printed, warning = fedsieve(command, str(tmp_path), "--json")
    assert code == 0 and warning.startswith(f"warning: {damaged} ") and f"({said})" in warning
    groups = json.loads(printed)["groups"]
    assert warning.count("\n") == 1 and [len(group["seeds"]) for group in groups] == [2, 2]


def test_an_unfinished_run_is_shown_and_left_out(fedsieve: Callable, tmp_path: Path) -> None:
    made(four(tmp_path) / "late", None, "seed=3", rounds=12)
    code, printed, _ = fedsieve("compare", str(tmp_path))
    assert code == 0 and "late is unfinished: round 12 of 40, and left out" in " ".join(printed.split())
    comparison = compare([tmp_path])
    assert [len(group.runs) for group in comparison.groups] == [2, 2]
    assert as_data(comparison)["unfinished"] == [{"path": str(tmp_path / "late"), "round": 12, "of": 40}]


def test_only_unfinished_runs_are_an_error(fedsieve: Callable, tmp_path: Path) -> None:
    made(tmp_path / "late", None, rounds=3)
    code, printed, said = fedsieve("compare", str(tmp_path), "--csv", "x.csv")
    assert code == 2 and "no finished run" in said and "unfinished: round 3 of 40" in said and not printed
    assert not Path("x.csv").exists()


def test_the_same_run_twice_counts_once(tmp_path: Path) -> None:
    made(four(tmp_path) / "later", 0.99, "seed=1", "phases.1.mask=null")
    comparison = compare([tmp_path])
    assert [len(group.runs) for group in comparison.groups] == [2, 2]
    assert comparison.groups[0].means["test_accuracy"].mean == pytest.approx(0.515)
    (warning,) = comparison.warnings
    assert "later repeats" in warning and "dense-1" in warning and "seed 1" in warning


def test_runs_of_different_data_are_named(tmp_path: Path) -> None:
    made(tmp_path / "digits", 0.5)
    made(tmp_path / "other", 0.6, "data.name=npz", "data.path=/some/images.npz")
    made(tmp_path / "changed", 0.6, "data.name=npz", "data.path=/some/images.npz", "seed=1", data="y")
    different, changed = compare([tmp_path / "digits", tmp_path / "other", tmp_path / "changed"]).warnings
    assert "different data sets: digits, npz /some/images.npz" in different
    assert "held other images or labels in" in changed and changed.endswith(f"{tmp_path}/other")


def test_runs_that_were_not_tested_are_a_group_of_their_own(tmp_path: Path) -> None:
    (
        made(tmp_path / "never", None, "evaluate.test=never"),
        made(tmp_path / "never-2", None, "evaluate.test=never", "seed=2"),
    )
    made(tmp_path / "each", 0.5, "evaluate.test=each"), made(tmp_path / "end", 0.7, "seed=2")
    comparison = compare([tmp_path])
    assert [[run.path.name for run in group.runs] for group in comparison.groups] == [
        ["each", "end"],
        ["never", "never-2"],
    ]
    tested, never = comparison.groups
    assert tested.means["test_accuracy"].mean == pytest.approx(0.6) and "test_accuracy" not in never.means
    assert never.difference is None and comparison.keys == comparison.telling == ["evaluate.test"]
    (mixed,) = compare([tmp_path], by=["data.name"]).groups
    assert len(mixed.runs) == 4 and "test_accuracy" not in mixed.means  # no mean over some of them in silence


def test_where_cifar_lies_is_no_difference(tmp_path: Path) -> None:
    for place in ("/here", "/there"):
        seed = len(place)
        made(tmp_path / place[1:], 0.5, "data.name=cifar100", f"data.path={place}", f"seed={seed}")
    comparison = compare([tmp_path])
    assert len(comparison.groups) == 1 and not comparison.keys and not comparison.warnings


def test_by_warns_of_what_else_differs_and_pairs_like_with_like(tmp_path: Path) -> None:
    """Dense and sparse for two learning rates: over the mask, pairs agree in seed and rate."""
    values = {}
    for seed in (1, 2):
        for rate in (0.1, 0.2):
            for sparsity in (0.5, 0.9):
                values[seed, rate, sparsity] = 0.5 + seed / 10 + rate - sparsity * seed / 50
                overrides = [f"seed={seed}", f"phases.0.local.lr={rate}", f"phases.1.mask.sparsity={sparsity}"]
                made(tmp_path / "-".join(map(str, overrides)), values[seed, rate, sparsity], *overrides)
    comparison = compare([tmp_path], by=["phases.1.mask.sparsity"])
    assert any("phases.0.local.lr" in warning and "--by" in warning for warning in comparison.warnings)
    first, second = comparison.groups
    assert (len(first.runs), first.values, second.values) == (
        4,
        {"phases.1.mask.sparsity": "0.5"},
        {"phases.1.mask.sparsity": "0.9"},
    )
    pairs = [(seed, rate) for seed in (1, 2) for rate in (0.1, 0.2)]
    test = stats.ttest_rel(*([values[seed, rate, sparsity] for seed, rate in pairs] for sparsity in (0.9, 0.5)))
    assert second.difference is not None and second.difference.p == pytest.approx(test.pvalue)


@pytest.mark.parametrize("word", ["clients.split", "clients.count", "phases.0"])
def test_by_what_does_not_differ_says_so(word: str, fedsieve: Callable, tmp_path: Path) -> None:
    code, printed, warnings = fedsieve("compare", str(four(tmp_path)), "--by", word)
    assert code == 0 and f"warning: all runs have the same {word}\n" in warnings and "also differ" not in printed


def test_bad_requests_say_what_would_be_right(tmp_path: Path) -> None:
    four(tmp_path)
    for arguments, parts in [
        ({"by": ["phases.1.mask.sparsiti"]}, ["'phases.1.mask.sparsiti'", "phases.1.mask.sparsity"]),
        ({"by": ["sparsiti"]}, ["did you mean phases.1.mask.sparsity?"]),
        ({"by": ["lr"]}, ["'lr' is the end of several settings: phases.0.local.lr, phases.1.local.lr; give one"]),
        (
            {"by": ["qqq"]},
            ["no run has a setting 'qqq'; the runs differ in phases.1.mask.rule, phases.1.mask.sparsity"],
        ),
        ({"metric": "accuracy"}, ["--metric accuracy", "test_accuracy, test_loss"]),
        ({"baseline": ["sparsity=0.3"]}, ["no group has that value", "–, 0.9"]),
        ({"baseline": ["seed=1"]}, ["'seed=1'", "phases.1.mask.sparsity"]),
        ({"baseline": ["sparsity"]}, ["no key=value", "use dense-1 and 1 more, sparse-1 and 1 more, or"]),
    ]:
        with pytest.raises(InputError) as error:
            compare([tmp_path], **arguments)
        for part in parts:
            assert part in str(error.value)


def test_a_baseline_may_be_any_group(tmp_path: Path) -> None:
    comparison = compare([four(tmp_path)], baseline=["sparsity=0.90"], metric="val_accuracy")
    dense, sparse = comparison.groups
    assert comparison.baseline is sparse and sparse.difference is None
    assert dense.difference is not None and dense.difference.difference.mean == pytest.approx(-0.115)
    assert compare([tmp_path], baseline=["sparsity=null"]).baseline.values["phases.1.mask.sparsity"] == "–"


def test_files_cannot_be_written_where_there_is_no_folder(fedsieve: Callable, tmp_path: Path) -> None:
    code, printed, said = fedsieve("compare", str(four(tmp_path / "a")), "--csv", "x.csv", "--latex", "no/x.tex")
    assert code == 2 and "no/x.tex cannot be written" in said and not printed and not Path("x.csv").exists()
    code, printed, said = fedsieve("compare", str(tmp_path / "a"), "--csv", long := "x" * 250)  # less than ".partial"
    assert code == 2 and f"{long} cannot be written (File name too long); give" in said and not printed


def test_all_files_are_made_before_the_first_is_written(
    fedsieve: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(comparison: object) -> str:
        raise InputError("no LaTeX today")

    monkeypatch.setattr("fedsieve.analysis.report.formats.as_latex", failing)
    code, _, said = fedsieve("compare", str(four(tmp_path / "a")), "--csv", "x.csv", "--latex", "x.tex")
    assert code == 2 and "no LaTeX today" in said and not Path("x.csv").exists()


def test_differences_of_accuracies_are_points_with_their_sign(fedsieve: Callable, tmp_path: Path) -> None:
    _, printed, _ = fedsieve("compare", str(four(tmp_path)))
    assert "+11.5 ± 6.4 points" in printed  # of 11 and 12
    _, printed, _ = fedsieve("compare", str(tmp_path), "--baseline", "sparsity=0.9")
    assert "-11.5 ± 6.4 points" in printed


def test_csv_has_every_digit(tmp_path: Path) -> None:
    made(tmp_path / "a", 0.1 + 0.2), made(tmp_path / "b", 1 / 3, "seed=1")
    (row,) = DictReader(as_csv(compare([tmp_path])).splitlines())
    assert float(row["test_accuracy_mean"]) == (0.1 + 0.2 + 1 / 3) / 2 and row["p"] == ""


def test_latex_holds_together(tmp_path: Path) -> None:
    """Every row has the columns that are announced, and every special character is escaped."""
    for seed in (1, 2):
        made(tmp_path / f"a{seed}", 0.5, f"seed={seed}", "data.name=npz", "data.path=/x/50%_of_#1&$2{~}^\\.npz")
        made(tmp_path / f"b{seed}", 0.5 + seed / 100, f"seed={seed}", "data.name=npz", "data.path=/x/y.npz")
    lines = as_latex(compare([tmp_path])).splitlines()
    assert lines[0].startswith("%")
    opening = re.fullmatch(r"\\begin\{tabular\}\{([lr]+)\}", lines[1])
    assert opening is not None
    assert [lines[2], lines[4], lines[-2], lines[-1]] == [r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"]
    for row in (lines[3], *lines[5:-2]):
        assert row.endswith(r" \\")
        bare = re.sub(r"\\(textbackslash|textasciitilde|textasciicircum)\{\}|\\[%&#$_{}]", "", row[:-3])
        assert len(bare.split("&")) == len(opening[1])
        outside = re.sub(r"\$[-+<]?[\d.n p]+( \\pm [\d.]+)?\$", "", bare)
        assert not set(outside) & set("%#$_{}~^\\")


def test_escaping() -> None:
    assert escaped("a_b & 5% #1 $x$ {y}") == r"a\_b \& 5\% \#1 \$x\$ \{y\}"
    assert escaped("\\~^–") == r"\textbackslash{}\textasciitilde{}\textasciicircum{}--"


def test_keys_are_shown_by_their_ends() -> None:
    assert short(["phases.0.local.lr", "phases.1.mask.sparsity"]) == ["lr", "sparsity"]
    assert short(["phases.0.local.lr", "phases.1.local.lr"]) == ["0.local.lr", "1.local.lr"]
    assert short(["seed", "x.seed"]) == ["seed", "x.seed"]
    keys = ["phases.1.mask.rule", "phases.1.mask.fisher.kind", "clients.count"]
    assert in_few_words(keys) == "phases.1.mask.*, clients.count"


def test_telling_prefers_what_all_groups_have() -> None:
    groups = [{"a.kind": "iid", "a.per_client": "–"}, {"a.kind": "classes", "a.per_client": "2"}]
    assert telling(groups, ["a.per_client", "a.kind"]) == ["a.kind"]
    assert telling(groups, ["a.per_client", "a.kind"], ["a.per_client"]) == ["a.per_client"]
    assert telling(groups[:1], ["a.kind"]) == []
