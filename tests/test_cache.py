"""The cache of arrays: found again, bounded, shared, and never the reason why a run fails."""

import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedsieve import cache

ROWS, COLUMNS = 100, 7
TRUTH = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSIEVE_CACHE", str(tmp_path))
    return tmp_path / "arrays"


class Computer:
    """Gives blocks of ten rows and counts them; may break after some."""

    def __init__(self, breaks_after: int = 99) -> None:
        self.blocks, self.breaks_after = 0, breaks_after

    def __call__(self, first: int) -> Iterator[np.ndarray]:
        for start in range(first, ROWS, 10):
            if self.blocks == self.breaks_after:
                raise KeyboardInterrupt
            self.blocks += 1
            yield TRUTH[start : start + 10]


def fetch(computer: Computer, name: str = "a") -> np.ndarray:
    return cache.cached_array({"name": name}, ROWS, COLUMNS, computer)


def test_computed_once_and_mapped() -> None:
    computer = Computer()
    for _ in range(3):
        found = fetch(computer)
        np.testing.assert_array_equal(found, TRUTH)
    assert computer.blocks == 10 and isinstance(found, np.memmap) and not found.flags.writeable
    fetch(computer, "b")
    assert computer.blocks == 20


def test_an_interruption_loses_no_block() -> None:
    with pytest.raises(KeyboardInterrupt):
        fetch(Computer(breaks_after=6))
    computer = Computer()
    np.testing.assert_array_equal(fetch(computer), TRUTH)
    assert computer.blocks == 4


def test_a_truncated_file_is_computed_again(folder: Path) -> None:
    fetch(Computer())
    (path,) = folder.glob("*.npy")
    path.write_bytes(path.read_bytes()[:-50])
    computer = Computer()
    np.testing.assert_array_equal(fetch(computer), TRUTH)
    assert computer.blocks == 10


def test_the_oldest_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIEVE_CACHE_GB", str(3.5 * TRUTH.nbytes / 1e9))
    for name in "abc":
        fetch(Computer(), name)
        time.sleep(0.01)
    fetch(Computer(), "a")  # used again: b is now the oldest
    fetch(Computer(), "d")
    computer = Computer()
    for name in "acd":
        fetch(computer, name)
    assert computer.blocks == 0
    fetch(computer, "b")
    assert computer.blocks == 10
    assert sum(path.stat().st_size for path in folder.glob("*.npy")) <= 3.5 * TRUTH.nbytes


def test_abandoned_halves_are_bounded_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIEVE_CACHE_GB", str(3.5 * TRUTH.nbytes / 1e9))
    for name in "abcdefgh":
        with pytest.raises(KeyboardInterrupt):
            fetch(Computer(breaks_after=2), name)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3.5 * TRUTH.nbytes


def test_an_array_larger_than_the_cache_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIEVE_CACHE_GB", str(0.5 * TRUTH.nbytes / 1e9))
    np.testing.assert_array_equal(fetch(Computer()), TRUTH)
    assert not folder.exists()


def test_does_without_where_nothing_can_be_written(folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the folder should be")
    np.testing.assert_array_equal(fetch(Computer()), TRUTH)


def _in_another_process(path: str, queue) -> None:
    computer = Computer()
    np.testing.assert_array_equal(fetch(computer), TRUTH)
    queue.put(computer.blocks)


def test_two_processes_compute_it_once(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_in_another_process, args=(str(folder), queue)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(queue.get() for _ in processes) == [0, 0, 10]


def test_clear() -> None:
    fetch(Computer())
    assert cache.clear() >= TRUTH.nbytes and cache.cache_size() == 0
