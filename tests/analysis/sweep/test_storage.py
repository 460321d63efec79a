"""A damaged sweep folder: named in one line, or mended; never another number."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsieve.analysis.sweep.outlook import foretell
from fedsieve.analysis.sweep.run_sweep import run_sweep
from fedsieve.analysis.sweep.sweep_file import Sweep, load_sweep
from fedsieve.analysis.sweep.trials import best_of, trials_in
from fedsieve.errors import InputError
from fedsieve.observe.callbacks import Callback


def silent(title: str) -> Any:
    return nullcontext(Callback())


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, own_cache: None, images: Path, backbone: Path
) -> tuple[Sweep, Path, dict[str, Any]]:
    """A finished sweep of two trials, one of which is repeated with a second seed: itself, its folder, its results."""
    place = tmp_path_factory.mktemp("sweep")
    experiment = {
        "data": {"name": "npz", "path": str(images), "image_size": 16},
        "model": {"backbone": str(backbone)},
        "phases": [{"name": "head", "train": "head", "rounds": 1, "local": {"steps": 2, "lr": 0.1}}],
    }
    (place / "small.yaml").write_text(yaml.safe_dump(experiment))
    search = {"phases.0.local.lr": [0.001, 0.5]}
    (place / "sweep.yaml").write_text(yaml.safe_dump({"experiment": "small.yaml", "search": search, "seeds": 2}))
    sweep = load_sweep(str(place / "sweep.yaml"))
    return sweep, place / "out", run_sweep(sweep, place / "out", silent)


def without_seconds(results: Any) -> Any:
    if isinstance(results, dict):
        return {key: without_seconds(value) for key, value in results.items() if not key.endswith("seconds")}
    return [without_seconds(one) for one in results] if isinstance(results, list) else results


def altered(statement: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        with closing(sqlite3.connect(file)) as database, database:
            assert database.execute(statement).rowcount

    return change


def replaced(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        content = file.read_bytes()
        assert old in content
        file.write_bytes(content.replace(old, new))

    return change


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "no database": lambda file: file.write_bytes(b"nonsense" * 1000),
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-5000]),
    "a better trial": altered("update trial_values set value = 0.999 where trial_id = 1"),
    "other values": altered("update trial_user_attributes set value_json = replace(value_json, '0.001', '0.5')"),
    "no values": altered("update trial_user_attributes set value_json = '\"3\"' where key = 'values'"),
    "values that are no JSON": altered("update trial_user_attributes set value_json = '{' where key = 'values'"),
    "no such state": replaced(b"COMPLETE", b"COMPLEXE"),
    "no such table": altered("alter table trial_values rename to other"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_trials_are_named(damage: str, whole: tuple[Sweep, Path, Any], tmp_path: Path) -> None:
    sweep, folder, _ = whole
    shutil.copytree(folder, tmp_path / "out", symlinks=True)
    DAMAGES[damage](tmp_path / "out/trials.sqlite")
    for use in (lambda: run_sweep(sweep, tmp_path / "out", silent), lambda: foretell(sweep, tmp_path / "out")):
        with pytest.raises(InputError, match=r"out/trials\.sqlite cannot be used, and is probably damaged \(.+\)"):
            use()


def test_a_damaged_sweep_is_one_line_and_goes_on_when_the_file_is_deleted(
    whole: tuple[Sweep, Path, dict[str, Any]], tmp_path: Path, fedsieve: Callable
) -> None:
    sweep, folder, results = whole
    out = tmp_path / "out"
    shutil.copytree(folder, out, symlinks=True)
    for name, content in (("trials.sqlite", "x" * 5000), ("sweep.yaml", "base: [")):
        before = (out / name).read_bytes()
        (out / name).write_text(content)
        code, _, told = fedsieve("sweep", str(folder.with_name("sweep.yaml")), "--out", str(out))
        assert code == 2 and told.count("\n") == 1 and told.startswith(f"error: {out}/{name} ") and "delete it" in told
        (out / name).write_bytes(before)
    for name in ("trials.sqlite", "sweep.yaml"):
        (out / name).unlink()
        assert run_sweep(sweep, out, silent) == results and (out / name).exists()


@pytest.mark.parametrize(
    "content", ["", "[]", "at: {}", "base: 3", "base: {sed: 3}", "{" * 1000, "at: 2026-13-32", b"\xff\xfe\x00"]
)
def test_a_damaged_sweep_file_is_named(content: str | bytes, whole: tuple[Sweep, Path, Any], tmp_path: Path) -> None:
    sweep, folder, _ = whole
    (tmp_path / "out").mkdir()
    shutil.copy(folder / "trials.sqlite", tmp_path / "out")
    (tmp_path / "out/sweep.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError, match=r"out/sweep\.yaml is damaged \(.+\); delete it"):
        run_sweep(sweep, tmp_path / "out", silent)


def test_runs_of_a_sweep_are_missed_or_refused(whole: tuple[Sweep, Path, dict[str, Any]], tmp_path: Path) -> None:
    """A chosen run that is gone is run again, the first seed's, too; one that was changed is named."""
    sweep, folder, results = whole
    out = tmp_path / "out"
    shutil.copytree(folder, out, symlinks=True)
    best = best_of(trials_in(out, {}))
    assert best is not None
    chosen = out / "runs/as-it-is" / f"trial-{best.number:03d}"
    (chosen / "seed-42/result.json").unlink()
    shutil.rmtree(chosen / "seed-43")
    assert without_seconds(run_sweep(sweep, out, silent)) == without_seconds(results)
    told = json.loads((chosen / "seed-43/result.json").read_text())
    (chosen / "seed-43/result.json").write_text(json.dumps({**told, "val_accuracy": 0.99}))
    with pytest.raises(InputError, match=r"seed-43/result\.json was changed since"):
        run_sweep(sweep, out, silent)
