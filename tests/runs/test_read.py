"""Reading the files of runs: what was changed since a run ended is refused, and nothing is taken for what it is not."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fedsieve.analysis.collection import find_runs, read_run
from fedsieve.analysis.sweep.run_sweep import run_slim
from fedsieve.config.experiment_file import parse_experiment
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError
from fedsieve.experiment import check, evaluate_run, run
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.export import export_run
from fedsieve.runs.read import read_experiment, read_metrics, read_result, read_split

Maker = Callable[..., Experiment]
ONE_ROUND = ("phases.0.rounds=1", "phases.1.rounds=1")
LINE = {"phase": "head", "round": 1, "val_accuracy": 0.5, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0}


def lines(*changes: dict[str, Any]) -> str:
    return "".join(json.dumps(LINE | change) + "\n" for change in changes)


def test_a_finished_run_tells_the_digests_of_its_files(experiment: Maker, tmp_path: Path) -> None:
    """They are what sha256sum gives; a change of any file is refused, whatever it says now."""
    out = tmp_path / "run"
    told = run(experiment(*ONE_ROUND), out)
    result = json.loads((out / "result.json").read_text())
    assert told == result and result["files"].keys() == {"experiment.yaml", "metrics.jsonl", "split.json"}
    for name, digest in [*result["files"].items(), ("model.safetensors", result["model_sha256"])]:
        assert digest == hashlib.sha256((out / name).read_bytes()).hexdigest()
    rest = {key: value for key, value in result.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    assert result["digest"] == hashlib.sha256(text.encode()).hexdigest()

    readers = {"experiment.yaml": read_experiment, "metrics.jsonl": read_metrics, "split.json": read_split}
    for name, read in {**readers, "result.json": read_result}.items():
        whole = (out / name).read_text()
        for changed in (re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), whole, count=1), whole + " {}"):
            (out / name).write_text(changed)
            with pytest.raises(InputError, match=f"{re.escape(str(out / name))} (was changed since|is damaged)"):
                read(out)
        (out / name).write_text(whole)
        if name != "result.json":
            (out / name).unlink()
            with pytest.raises(InputError, match=r"No such file|no experiment\.yaml"):
                read(out)
            (out / name).write_text(whole)
        read(out)


def test_what_is_done_with_a_finished_run_leaves_its_digests_true(experiment: Maker, tmp_path: Path) -> None:
    settings = experiment(*ONE_ROUND, "track=[tensorboard]")
    first = run(settings, tmp_path / "run")
    assert run(settings, tmp_path / "run", resume=True) == first
    run(experiment(*ONE_ROUND), tmp_path / "run", resume=True)  # with other trackers, which the outcome is not up to
    run_slim(experiment(*ONE_ROUND, "workers=2"), tmp_path / "run", Callback())
    assert not (tmp_path / "run/checkpoints").exists()
    assert read_run(tmp_path / "run").result == first


def test_runs_from_before_there_were_digests_are_read(experiment: Maker, tmp_path: Path) -> None:
    result = run(experiment(*ONE_ROUND), tmp_path / "run")
    old = {key: value for key, value in result.items() if key not in ("files", "digest")}
    (tmp_path / "run/result.json").write_text(json.dumps(old))
    (tmp_path / "run/split.json").unlink()
    found = read_run(tmp_path / "run")
    assert found.result == old and len(found.metrics) == 2 and read_split(found.path) is None
    half = {key: value for key, value in result.items() if key != "digest"}
    (tmp_path / "run/result.json").write_text(json.dumps(half))
    with pytest.raises(InputError, match="was changed since"):
        read_result(tmp_path / "run")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("test_accuracy", "0.9", "test_accuracy is 0.9"),
        ("test_accuracy", True, "test_accuracy is True"),
        ("bytes_up", 1.5, "bytes_up is 1.5"),
        ("bytes_up", -1, "bytes_up is -1"),
        ("seconds", 10**400, "seconds is 1000"),
        ("seconds", None, "seconds is None"),
        ("val_loss", float("nan"), "this is not JSON"),
        ("phases", [], "phases is"),
        ("phases", [1], "phases.0 is 1"),
        ("phases", {}, "phases is"),
        ("clients", {"mean": 0.5}, "there is no worst_tenth"),
        ("model_sha256", 7, "model_sha256 is 7"),
    ],
)
def test_a_value_that_does_not_belong_there_is_named(
    key: str, value: Any, told: str, tmp_path: Path, finished: dict[str, Any]
) -> None:
    """In a result without digests, so that its values are looked at."""
    (tmp_path / "result.json").write_text(json.dumps({**finished, key: value}))
    with pytest.raises(InputError, match=re.escape(f"{tmp_path}/result.json is damaged")) as error:
        read_result(tmp_path)
    assert f"({told}" in str(error.value)


@pytest.fixture(scope="module")
def finished() -> dict[str, Any]:
    """A result as runs wrote it before there were digests."""
    nothing = dict.fromkeys(("test_accuracy", "test_loss", "val_accuracy", "val_loss", "best_val_accuracy"))
    result: dict[str, Any] = {**nothing, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0, "seed": 1, "model_sha256": ""}
    phase = {**result, "name": "head", "rounds": 1, "best_round": None, "best_val_loss": None}
    return {**result, "phases": [phase]}


def test_only_the_last_line_of_a_run_under_way_may_be_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_metrics(tmp_path) == []
    text = lines({"round": 1}, {"round": 2}, {"round": 3})
    first, second, third = text.splitlines()
    for end in ("", "\n", "\n" + third[:20], "\n" + "\0" * 50):
        file.write_text(f"{first}\n{second}{end}")
        assert [line["round"] for line in read_metrics(tmp_path)] == [1, 2]
    for damaged in (second[:20], "", "\0" * 50, "[" * 100_000, "1e999", '{"round": 2}', lines({"round": "2"}).strip()):
        file.write_text(f"{first}\n{damaged}\n{third}\n")
        with pytest.raises(InputError, match=r"metrics\.jsonl is damaged.*\(line 2: "):
            read_metrics(tmp_path)


def test_an_experiment_that_cannot_be_one_is_told_with_its_file(experiment: Maker, tmp_path: Path) -> None:
    text = experiment(*ONE_ROUND).resolved().to_yaml()
    for damaged in ("", "a: {" * 2000, "seed: 2026-13-32", f"seed: {'9' * 5000}", text.replace("seed: 7", "seed: x")):
        (tmp_path / "experiment.yaml").write_text(damaged)
        with pytest.raises(InputError, match=re.escape(str(tmp_path / "experiment.yaml"))):
            read_experiment(tmp_path)
    with pytest.raises(InputError, match=r"test, line 1: '2026-13-32' is no valid date"):
        parse_experiment("seed: 2026-13-32", "test")


def test_a_run_whose_experiment_is_gone_is_missed(experiment: Maker, tmp_path: Path) -> None:
    run(experiment(*ONE_ROUND), tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/metrics.jsonl").write_text(lines({}))
    runs, problems = find_runs([tmp_path])
    assert [one.path.name for one in runs] == ["good"]
    assert len(problems) == 1 and f"{tmp_path}/bad is no run (it has no experiment.yaml)" in problems[0]


def test_a_model_that_was_changed_is_not_used(experiment: Maker, tmp_path: Path) -> None:
    """One bit of one weight: scores stay plausible, so only the hash tells."""
    out, model = tmp_path / "run", tmp_path / "run/model.safetensors"
    whole = run(experiment(*ONE_ROUND), out)
    again = experiment(*ONE_ROUND, f"model.init={out}")
    uses: list[Callable[[], Any]] = [
        lambda: evaluate_run(out),
        lambda: export_run(out, tmp_path / "export"),
        lambda: run(again, tmp_path / "again"),
    ]
    content = model.read_bytes()
    model.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for use in uses:
        with pytest.raises(InputError, match=f"{re.escape(str(model))} was changed since"):
            use()
    model.unlink()
    for use in uses:
        with pytest.raises(InputError, match=re.escape(f"{model} cannot be read (No such file")):
            use()
    assert not (tmp_path / "export").exists() and not (tmp_path / "again").exists()
    model.write_bytes(content)
    assert evaluate_run(out)["test_accuracy"]["measured"] == whole["test_accuracy"]
    (out / "result.json").unlink()  # a model that was copied alone may be started from
    check(again)
    for metadata in (None, {"fedsieve": "[" * 100_000}, {"fedsieve": "[]"}, {"fedsieve": '{"classes": 3}'}):
        save_file(load_file(model), model, metadata=metadata)
        with pytest.raises(InputError, match=re.escape(f"model.init: {model} is no model of a finished run")):
            check(again)
