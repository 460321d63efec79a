"""Where the time goes: every second belongs to one section, and they add up."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from fedsieve.observe.callbacks import Callback
from fedsieve.observe.profile import IDLE, OTHER, SECTIONS, Stopwatch, Times, section, stopwatch


def test_seconds_belong_to_the_innermost_section(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    watch = Stopwatch()

    def after(seconds: float) -> None:
        nonlocal now
        now += seconds

    after(1)
    watch.enter("forward")
    after(2)
    watch.enter("transform")
    after(4)
    watch.leave()
    after(8)
    watch.leave()
    after(16)
    assert watch.take() == {OTHER: 17, "forward": 10, "transform": 4}
    after(32)
    assert watch.take() == {OTHER: 32}  # what was taken is not counted again


def test_a_section_ends_with_an_error() -> None:
    stopwatch.start()
    with pytest.raises(ZeroDivisionError), section("forward"):
        raise ZeroDivisionError
    stopwatch.take()
    time.sleep(0.01)
    assert set(stopwatch.take()) == {OTHER}


def test_each_column_adds_up_to_the_wall_time() -> None:
    times = Times(10.0, {"forward": 4.0, IDLE: 6.0}, {"forward": 12.0, "backward": 2.0}, 2)
    assert times.each_worker == {"forward": 6.0, "backward": 1.0, IDLE: 3.0}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_says_where_its_time_went(workers: int, experiment: Callable[..., Experiment], tmp_path: Path) -> None:
    found: list[Times] = []

    class Watch(Callback):
        def finished(self, times: Times) -> None:
            found.append(times)

    started = time.perf_counter()
    run(experiment(f"workers={workers}"), tmp_path / "run", callback=Watch())
    wall = time.perf_counter() - started
    (times,) = found
    assert times.workers == workers
    assert times.wall == pytest.approx(sum(times.main.values())) == pytest.approx(wall, abs=0.3)
    assert sum(times.each_worker.values()) == pytest.approx(times.wall)
    assert set(times.main) | set(times.of_workers) <= set(SECTIONS)
    both = {name: times.main.get(name, 0) + times.of_workers.get(name, 0) for name in SECTIONS}
    for name in (
        "features",
        "transform",
        "forward",
        "backward",
        "optimizer",
        "encode",
        "aggregate",
        "evaluate",
        "files",
    ):
        assert both[name] > 0, name


def test_the_table(fedsieve: Callable, experiment: Callable[..., Experiment], tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(experiment("workers=1").to_yaml())
    code, printed, _ = fedsieve("run", str(tmp_path / "small.yaml"), "--profile")
    assert code == 0
    for name in ("start", "forward", "backward", "optimizer", "encode", "aggregate", "evaluate", OTHER):
        assert f"│ {name}" in printed
    assert "in all" in printed and "100.0%" in printed
    code, printed, _ = fedsieve("run", str(tmp_path / "small.yaml"))
    assert code == 0 and "backward" not in printed
