"""What TensorBoard, Weights & Biases and MLflow hold of a run, read back with their own means."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fedsieve.config.dotted import as_text, flat
from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from fedsieve.observe.callbacks import Callback
from fedsieve.observe.tracking import METRICS, identity_of
from fedsieve.runs.folder import RunFolder
from fedsieve.runs.read import FIGURES, read_experiment, read_metrics, read_result
from fedsieve.runs.replace import delete_runs

Maker = Callable[..., Experiment]
Told = list[tuple[str, int, float]]  # name, step, value
TRACKERS = ("tensorboard", "wandb", "mlflow")


@pytest.fixture(autouse=True)
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def trackers() -> list[str]:
    """All at once: starting them takes longer than these runs do."""
    found = [name for name in TRACKERS if find_spec(name)]
    if missing := [name for name in TRACKERS if name not in found]:
        warnings.warn(f"not tested: {', '.join(missing)}; pip install 'fedsieve[track]'", stacklevel=1)
    if not found:
        pytest.skip("no tracker is installed; pip install 'fedsieve[track]'")
    return found


# ------------------------------------------------------------------------------------------- readers


def read_tensorboard(out: Path) -> tuple[dict[str, str], Told]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = EventAccumulator(str(out / "tracking/tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    told = [(name, event.step, event.value) for name in events.Tags()["scalars"] for event in events.Scalars(name)]
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    return {key: str(getattr(value, value.WhichOneof("kind"))) for key, value in settings.items()}, told


def wandb_records(data: bytes) -> Iterator[Any]:
    """Its file is a log in LevelDB's format (blocks of 32 kB) behind 7 bytes of its own."""
    from wandb.proto import wandb_internal_pb2

    place, whole = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the end of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def read_wandb(out: Path) -> tuple[dict[str, str], Told]:
    (file,) = (out / "tracking/wandb").rglob("*.wandb")
    settings: dict[str, str] = {}
    told: Told = []
    figures: dict[str, float] = {}
    for record in wandb_records(file.read_bytes()):
        settings |= {item.key: as_text(json.loads(item.value_json)) for item in record.run.config.update}
        line = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        told += [(name, line["_step"], value) for name, value in line.items() if not name.startswith("_")]
        figures |= {item.key: json.loads(item.value_json) for item in record.summary.update if "result" in item.key}
    return settings, told + [(name, max(step for _, step, _ in told), value) for name, value in figures.items()]


def read_mlflow(out: Path) -> tuple[dict[str, str], Told]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{out.resolve()}/tracking/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("fedsieve")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    names = found.data.metrics
    told = [(name, one.step, one.value) for name in names for one in client.get_metric_history(found.info.run_id, name)]
    return found.data.params, told


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


def assert_told_once(out: Path, tracker: str) -> None:
    """Every number of metrics.jsonl and result.json is there once, and nothing else."""
    lines, result = read_metrics(out), read_result(out)
    expected = {
        (name, step): line[name] for step, line in enumerate(lines, 1) for name in METRICS if line.get(name) is not None
    }
    expected |= {(f"result/{name}", len(lines)): result[name] for name in FIGURES if result[name] is not None}
    _, told = READERS[tracker](out)
    assert Counter((name, step) for name, step, _ in told) == Counter(expected.keys())
    for name, step, value in told:
        if name != "seconds":  # a round that is done again takes another time, and may have been told before
            assert value == pytest.approx(expected[name, step], rel=1e-6)  # event files hold float32


# --------------------------------------------------------------------------------------------- tests


def test_everything_is_told_once(experiment: Maker, tmp_path: Path, trackers: list[str]) -> None:
    with_them = run(experiment(f"track=[{', '.join(trackers)}]", "evaluate.every=2"), tmp_path / "run")
    own = flat(read_experiment(tmp_path / "run").model_dump(mode="json"))
    for tracker in trackers:
        assert_told_once(tmp_path / "run", tracker)
        recorded, _ = READERS[tracker](tmp_path / "run")
        assert own.keys() <= recorded.keys()
        for key in ("seed", "clients.fraction", "phases.1.local.lr", "data.name", "model.backbone"):
            assert recorded[key] == as_text(own[key]) or float(recorded[key]) == own[key]  # event files make 7 a 7.0
    without = run(experiment("evaluate.every=2"), tmp_path / "without")
    assert with_them["model_sha256"] == without["model_sha256"]
    delete_runs(tmp_path / "run")  # `run --force` knows what trackers write
    assert [path.name for path in (tmp_path / "run").rglob("*")] == [".lock"]


def test_killed_and_resumed_nothing_is_lost_or_told_twice(
    experiment: Maker, tmp_path: Path, trackers: list[str]
) -> None:
    file, out, metrics = tmp_path / "small.yaml", tmp_path / "out", tmp_path / "out/metrics.jsonl"
    file.write_text(experiment(f"track=[{', '.join(trackers)}]", "phases.0.rounds=12").to_yaml())
    command = [sys.executable, "-m", "fedsieve", "run", str(file), "--out", str(out), "--resume"]
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # that of this process
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / "result.json").exists()
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    assert "going on after round" in said and "warning" not in said
    for tracker in trackers:
        assert_told_once(out, tracker)


def test_a_run_cut_off_before_its_result_tells_it_once(
    experiment: Maker, tmp_path: Path, trackers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between telling the result and writing it."""

    def power_cut(*_: object) -> None:
        raise KeyboardInterrupt

    settings = experiment(f"track=[{', '.join(trackers)}]")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, "save_result", power_cut)
        run(settings, tmp_path)
    run(settings, tmp_path, resume=True)
    for tracker in trackers:
        counts = Counter((name, step) for name, step, _ in READERS[tracker](tmp_path)[1])
        assert counts["result/test_accuracy", 5] == 1 and set(counts.values()) == {1}


def test_runs_share_a_store_and_are_found_again_in_it(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/shared.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    settings = experiment("track=[mlflow]")

    class Stop(Callback):
        def round(self, line: dict[str, Any]) -> None:
            if line["round"] == 2:
                raise KeyboardInterrupt

    run(settings, tmp_path / "one")
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "two", callback=Stop())
    client = mlflow.MlflowClient()
    place = client.get_experiment_by_name("mine").experiment_id
    states = {one.info.run_name.split("/")[1]: one.info.status for one in client.search_runs([place])}
    assert states == {"one": "FINISHED", "two": "FAILED"}
    run(settings, tmp_path / "two", resume=True)
    for found in client.search_runs([place]):
        assert found.info.status == "FINISHED"
        history = client.get_metric_history(found.info.run_id, "train_loss")
        assert sorted(metric.step for metric in history) == [1, 2, 3, 4, 5]
    assert not (tmp_path / "one/tracking/mlflow").exists()


def test_a_tracker_that_joins_later_gets_the_rounds_before(experiment: Maker, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")

    class Stop(Callback):
        def round(self, line: dict[str, Any]) -> None:
            if line["phase"] == "all":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment(), tmp_path, callback=Stop())
    run(experiment("track=[tensorboard]"), tmp_path, resume=True)
    assert_told_once(tmp_path, "tensorboard")


class Warnings(Callback):
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.rounds = 0

    def warning(self, text: str) -> None:
        self.heard.append(text)

    def round(self, line: dict[str, Any]) -> None:
        self.rounds += 1


def test_a_tracker_that_cannot_be_opened_costs_one_warning(experiment: Maker, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")

    class InTheWay(Warnings):
        def started(self, rounds: int, done: int) -> None:
            (tmp_path / "out/tracking").write_text("a file where a folder should be")

    listener = InTheWay()
    result = run(experiment("track=[tensorboard]"), tmp_path / "out", callback=listener)
    (warning,) = listener.heard
    assert warning.startswith("track: tensorboard failed (") and "the run goes on without it" in warning
    assert listener.rounds == 5 and result["model_sha256"] == run(experiment(), tmp_path / "other")["model_sha256"]


def test_a_tracker_that_fails_half_way_costs_one_warning(experiment: Maker, tmp_path: Path) -> None:
    """The database is destroyed after the second round; the other tracker and the run go on."""
    pytest.importorskip("mlflow")
    pytest.importorskip("tensorboard")

    class Destroyer(Warnings):
        def round(self, line: dict[str, Any]) -> None:
            super().round(line)
            if self.rounds == 2:
                (tmp_path / "tracking/mlflow/mlflow.db").write_bytes(b"no database any more" * 1000)

    listener = Destroyer()
    run(experiment("track=[mlflow, tensorboard]"), tmp_path, callback=listener)
    (warning,) = listener.heard
    assert warning.startswith("track: mlflow failed (")
    assert listener.rounds == 5 and (tmp_path / "result.json").exists()
    assert_told_once(tmp_path, "tensorboard")


def test_a_missing_package_is_said_before_anything_is_written(experiment: Maker, tmp_path: Path) -> None:
    """In a process where packages of that name cannot be found; a folder called wandb does not count as one."""
    file = tmp_path / "small.yaml"
    file.write_text(experiment("track=[wandb]").to_yaml())
    (tmp_path / "place/wandb").mkdir(parents=True)
    code = (
        "import sys\n"
        "sys.path = [''] + [path for path in sys.path if path]\n"
        "from importlib.machinery import PathFinder\n"
        "class Without(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return PathFinder.find_spec(name, [''] if name == 'wandb' else path, target)\n"
        "sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]\n"
        "from fedsieve.cli import main\n"
        f"main(['run', {str(file)!r}, '--out', 'out'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "place", capture_output=True, text=True)
    assert done.stderr == "error: track: wandb needs the package wandb; pip install 'fedsieve[wandb]'\n"
    assert done.returncode == 2 and [path.name for path in (tmp_path / "place").iterdir()] == ["wandb"]


@pytest.mark.parametrize("asked", [[], ["tensorboard"]])
def test_trackers_are_loaded_only_when_asked_for(asked: list[str], experiment: Maker, tmp_path: Path) -> None:
    """They take seconds to load, and their packages need not be there."""
    for name in asked:
        pytest.importorskip(name)
    (tmp_path / "small.yaml").write_text(experiment(f"track=[{', '.join(asked)}]").to_yaml())
    code = (
        "import sys\n"
        "from fedsieve.cli import main\n"
        "try:\n"
        "    main(['run', 'small.yaml', '--out', 'out'])\n"
        "finally:\n"
        f"    print(*[name for name in {TRACKERS} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.split() == asked


def test_an_unknown_tracker_is_refused(fedsieve: Callable) -> None:
    code, _, said = fedsieve("run", "digits-iid", "track=[tensorbord]")
    assert code == 2 and "tensorboard or wandb or mlflow" in said


def test_a_damaged_identity_is_made_anew(tmp_path: Path) -> None:
    first = identity_of(tmp_path)
    assert identity_of(tmp_path) == first
    for damage in (b"", b"\xff\xfe", first[:-1].encode()):
        (tmp_path / "tracking" / "id").write_bytes(damage)
        anew = identity_of(tmp_path)
        assert len(anew) == 32 and anew == identity_of(tmp_path)
