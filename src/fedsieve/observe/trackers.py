"""The trackers. Each class imports its package when it is opened, and replays the rounds already done."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedsieve.config.dotted import as_text
from fedsieve.files.atomic import write_text


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker gets when it is opened."""

    folder: Path  # for its files
    name: str  # of the run, for people
    identity: str  # of the run, the same after an interruption
    settings: Mapping[str, Any]  # by dotted key
    rounds: Sequence[Mapping[str, float]]  # that are done already


class Tracker(Protocol):
    """Opened with the run that it tracks. A step is a round, counted over all phases from 1."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def close(self, finished: bool) -> None: ...


class TensorBoard:
    """An event file. It cannot be corrected, so it is written anew whenever the run resumes.

    torch's SummaryWriter is not used, since its thread would report a full disk late and in its own way.
    """

    def __init__(self, tracked: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import hparams

        shutil.rmtree(tracked.folder, ignore_errors=True)
        tracked.folder.mkdir(parents=True)
        self.file = (tracked.folder / f"events.out.tfevents.{time.time_ns()}").open("wb")
        self.writer = RecordWriter(self.file)
        self._write(file_version="brain.Event:2")
        self._write(session_log=SessionLog(status=SessionLog.START))  # so that viewers drop the deleted file
        plain = {key: value for key, value in tracked.settings.items() if isinstance(value, bool | int | float)}
        settings = {key: plain.get(key, as_text(value)) for key, value in tracked.settings.items()}
        for summary in hparams(settings, {"result/test_accuracy": 0.0}):  # named here, known at the end
            self._write(summary=summary)
        for step, numbers in enumerate(tracked.rounds, 1):
            self.log(step, numbers)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._write(step=step, summary=Summary(value=values))
        self.file.flush()

    def _write(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.write(Event(wall_time=time.time(), **content).SerializeToString())

    def close(self, finished: bool) -> None:
        self.file.close()


class WeightsAndBiases:
    """Offline unless WANDB_MODE says otherwise. Its files are written anew; an online run is continued by its id."""

    def __init__(self, tracked: TrackedRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # do not send crash reports
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":
            shutil.rmtree(tracked.folder, ignore_errors=True)
        self.folder = tracked.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedsieve"),
            id=tracked.identity,
            name=tracked.name,
            config=dict(tracked.settings),
            dir=self.folder,
            mode=mode,
            resume=None if mode == "offline" else "allow",
            reinit="create_new",  # a script may have a run of its own
            settings=wandb.Settings(console="off", silent=True),
        )
        logging.getLogger("wandb").setLevel(logging.CRITICAL)  # its log would fill the terminal when a disk is full
        for step, numbers in enumerate(tracked.rounds, 1):
            if step >= self.run.starting_step:  # the server has what comes before
                self.log(step, numbers)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if all(name.startswith("result/") for name in numbers):  # of the run, not of its last round
            self.run.summary.update(dict(numbers))
        else:
            self.run.log(dict(numbers), step=step, commit=True)
        write_text(self.folder / "step", str(step))  # fails on a full disk, which its own process does not report

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class MLflow:
    """A database in the run's folder, or the server at MLFLOW_TRACKING_URI. It gets no number twice."""

    def __init__(self, tracked: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # errors are raised anyway
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(uri) if uri else _own_database(tracked.folder, MlflowClient)
        place = self._experiment(None if uri else (tracked.folder / "artifacts").as_uri())
        found = self.client.search_runs([place], f"tags.`fedsieve.id` = '{tracked.identity}'")
        tags = {"fedsieve.id": tracked.identity}
        run = found[0] if found else self.client.create_run(place, run_name=tracked.name, tags=tags)
        self.run_id, self.is_new = run.info.run_id, not found
        self.client.update_run(self.run_id, status="RUNNING")
        self.known: dict[str, set[int]] = {}
        params = [Param(key, as_text(value)) for key, value in tracked.settings.items() if key not in run.data.params]
        for first in range(0, len(params), 100):  # the most it takes at a time
            self.client.log_batch(self.run_id, params=params[first : first + 100])
        for step, numbers in enumerate(tracked.rounds, 1):
            self.log(step, numbers)

    def _experiment(self, artifacts: str | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedsieve")
        found = self.client.get_experiment_by_name(name)
        return str(found.experiment_id) if found else self.client.create_experiment(name, artifact_location=artifacts)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        new = [Metric(name, value, now, step) for name, value in numbers.items() if step not in self._steps(name)]
        if new:
            self.client.log_batch(self.run_id, metrics=new)

    def _steps(self, name: str) -> set[int]:
        """The rounds for which it got this number before the run was interrupted."""
        if name not in self.known:
            history = [] if self.is_new else self.client.get_metric_history(self.run_id, name)
            self.known[name] = {metric.step for metric in history}
        return self.known[name]

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.run_id, "FINISHED" if finished else "FAILED")


def _own_database(folder: Path, client: Callable[[str], Any]) -> Any:
    """Making its tables takes seconds; if that was interrupted, the database is still empty and is made anew."""
    ready = folder / "ready"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    opened = client(f"sqlite:///{folder / 'mlflow.db'}")
    ready.touch()
    return opened


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
