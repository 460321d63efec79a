"""The cache of arrays: found again, bounded, shared, and never the reason why a run fails."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from fedsieve.files import array_file, cache
from fedsieve.files.array_file import Verified

ROWS, COLUMNS = 100, 70
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


def fetch(computer: Computer, name: str = "a", notes: list[str] | None = None) -> np.ndarray:
    note = notes.append if notes is not None else lambda text: None
    return cache.cached_array({"name": name}, ROWS, COLUMNS, computer, note)


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
    notes: list[str] = []
    np.testing.assert_array_equal(fetch(Computer(), notes=notes), TRUTH)
    assert not folder.exists()
    assert notes == [
        "0.0 MB of outputs of what is frozen are more than the cache may keep; "
        "going on without it: set FEDSIEVE_CACHE_GB to 0.1 or more"
    ]


@pytest.mark.parametrize("at", ["arrays", "."])
def test_does_without_where_nothing_can_be_written(folder: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder.parent / "place"
    place.mkdir()
    monkeypatch.setenv("FEDSIEVE_CACHE", str(place))
    if at == ".":
        place.rmdir()
    (place / at if at != "." else place).write_text("a file where the folder should be")
    notes: list[str] = []
    np.testing.assert_array_equal(fetch(Computer(), notes=notes), TRUTH)
    (note,) = notes
    assert str(place) in note and "going on without it: set FEDSIEVE_CACHE to a folder that can be written" in note


# ------------------------------------------------------------------------------------------------- damage


def interrupted(folder: Path) -> tuple[Path, Path]:
    """The file of an array of which six of ten blocks are made, and the list of them."""
    with pytest.raises(KeyboardInterrupt):
        fetch(Computer(breaks_after=6))
    (partial,), (count,) = folder.glob("*.partial"), folder.glob("*.count")
    return partial, count


@pytest.mark.parametrize(
    "header", [b"", b"x" * 128, b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (100, 70), }"]
)
def test_a_file_of_the_right_length_that_is_something_else(folder: Path, header: bytes) -> None:
    fetch(Computer())
    (path,) = folder.glob("*.npy")
    data = path.read_bytes()
    path.write_bytes(header.ljust(128) + data[128:] if header else bytes(len(data)))
    computer = Computer()
    np.testing.assert_array_equal(fetch(computer), TRUTH)
    assert computer.blocks == 10
    np.testing.assert_array_equal(np.load(path), TRUTH)  # numpy's own reader knows what it is


@pytest.mark.parametrize("place", [0, 100, 128, 128 + 35 * 4 * COLUMNS + 3, 127 + TRUTH.nbytes, 128 + TRUTH.nbytes, -1])
def test_an_array_with_a_wrong_bit(folder: Path, place: int) -> None:
    fetch(Computer())
    (path,) = folder.glob("*.npy")
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    for again in (10, 0):
        computer = Computer()
        np.testing.assert_array_equal(fetch(computer), TRUTH)
        assert computer.blocks == again


def test_an_array_without_a_digest(folder: Path) -> None:
    """As numpy writes it, and as older versions did."""
    fetch(Computer())
    (path,) = folder.glob("*.npy")
    np.save(path, TRUTH + 1)
    computer = Computer()
    np.testing.assert_array_equal(fetch(computer), TRUTH)
    assert computer.blocks == 10


def test_an_array_is_read_once_in_all_processes_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lists of what was verified stand for two processes that inherited the same file."""
    fetch(Computer())
    reads: list[int] = []
    digest_of = array_file._digest_of
    monkeypatch.setattr(array_file, "_digest_of", lambda fd, length: reads.append(fd) or digest_of(fd, length))
    first, second, stranger = Verified(), Verified(), Verified()
    with tempfile.TemporaryFile() as shared:
        for process, expected in ((first, 1), (first, 1), (second, 1), (stranger, 2), (stranger, 2)):
            if process is not stranger:
                process.share(shared.fileno())
            monkeypatch.setattr(array_file, "verified", process)
            np.testing.assert_array_equal(fetch(Computer(breaks_after=0)), TRUTH)
            assert len(reads) == expected
        fetch(Computer(), "b")
        second.share(None)
        monkeypatch.setattr(array_file, "verified", second)
        fetch(Computer(breaks_after=0), "b")  # made by a process that it shares nothing with
    assert len(reads) == 4


@pytest.mark.parametrize(("left", "again"), [(0, 10), (1, 10), (128 + 25 * 4 * COLUMNS, 8), (-1, 4)])
def test_a_truncated_half(folder: Path, left: int, again: int) -> None:
    partial, _ = interrupted(folder)
    os.truncate(partial, left if left >= 0 else 128 + 60 * 4 * COLUMNS)
    computer = Computer()
    np.testing.assert_array_equal(fetch(computer), TRUTH)
    assert computer.blocks == again


def test_a_half_with_a_wrong_bit(folder: Path) -> None:
    partial, _ = interrupted(folder)
    data = bytearray(partial.read_bytes())
    data[128 + 35 * 4 * COLUMNS] ^= 1
    partial.write_bytes(data)
    computer = Computer()
    np.testing.assert_array_equal(fetch(computer), TRUTH)
    assert computer.blocks == 7


@pytest.mark.parametrize(
    "lie",
    [
        *("", "60", "garbage", "10 12345\n", "-10 0\n", "0 0\n", "10 x\n", "10 1 2\n", "1e9 3\n", "99999999999999 0\n"),
        b"\xff\xfe\x00",
        "APPEND 10 0\n",
        "APPEND 10",
        f"APPEND 10 {zlib.crc32(TRUTH[60:70].tobytes())}\n",  # of a block that was never written
        "APPEND 50 0\n",
    ],
)
def test_a_list_of_blocks_that_lies(folder: Path, lie: str | bytes) -> None:
    _, count = interrupted(folder)
    if isinstance(lie, bytes):
        count.write_bytes(lie)
    else:
        count.write_text(count.read_text() + lie[7:] if lie.startswith("APPEND ") else lie)
    computer, notes = Computer(), []
    np.testing.assert_array_equal(fetch(computer, notes=notes), TRUTH)
    assert computer.blocks >= 4 and not notes


def test_nothing_stays_behind(folder: Path) -> None:
    interrupted(folder)
    fetch(Computer())
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".npy"]


def test_plenty_of_room_is_not_looked_for_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(Path, "glob", lambda path, pattern: looks.append(pattern) or iter(()))
    for name in range(50):
        fetch(Computer(), str(name))
    assert len(looks) == 1


# ------------------------------------------------------------------------------------------ other processes

PROGRAM = """
import errno, json, os, resource, sys, time
sys.path.insert(0, sys.argv[1])
import test_cache
from fedsieve.files import cache

class Slow(test_cache.Computer):
    def __call__(self, first):
        for block in super().__call__(first):
            if self.blocks == stops_at:
                print("stopped", flush=True)
                time.sleep(1000)
            time.sleep(pause)
            yield block

stops_at, pause, limit, reserves = json.loads(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
if not reserves:
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "not on this disk")
    os.posix_fallocate = refuse
print("started", flush=True)
computer, notes = Slow(), []
array = test_cache.fetch(computer, notes=notes)
assert (array == test_cache.TRUTH).all()
print(json.dumps([computer.blocks, notes]), flush=True)
"""


def another(
    stops_at: int = 99, pause: float = 0.0, limit: int = 0, reserves: bool = True, before: Sequence[str] = ()
) -> subprocess.Popen:
    """A process that wants the array; it may stop before a block, and may not be able to write large files."""
    arguments = [str(Path(__file__).parent), json.dumps([stops_at, pause, limit, reserves])]
    return subprocess.Popen([*before, sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)


def says(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def outcome(process: subprocess.Popen) -> tuple[int, list[str]]:
    """How many blocks it has computed, and what it had to say."""
    with process:
        blocks, notes = json.loads(process.communicate()[0].splitlines()[-1])
    assert process.returncode == 0
    return blocks, notes


def test_two_processes_compute_it_once() -> None:
    processes = [another(pause=0.05), another(pause=0.05)]
    assert sorted(outcome(process) for process in processes) == [(0, []), (10, [])]


def test_one_is_killed_and_the_other_goes_on() -> None:
    with another(stops_at=7) as first:
        assert (says(first), says(first)) == ("started", "stopped")
        second = another()
        assert says(second) == "started"
        time.sleep(0.3)
        assert second.poll() is None  # it waits
        first.kill()
    assert outcome(second) == (4, [])


def test_files_may_not_become_so_large(folder: Path) -> None:
    blocks, (note,) = outcome(another(limit=128 + 45 * 4 * COLUMNS))
    assert blocks == 10 and not [path for path in folder.iterdir() if path.suffix != ".lock"]
    assert note == (
        f"the cache {folder.parent} has no room for 0.0 MB of outputs of what is frozen (File too large); "
        "going on without it: set FEDSIEVE_CACHE to a larger place"
    )


def test_a_block_that_cannot_be_written(folder: Path) -> None:
    """Where room cannot be reserved, it ends half-way: no block is computed twice, and nothing stays behind."""
    blocks, (note,) = outcome(another(limit=128 + 45 * 4 * COLUMNS, reserves=False))
    assert blocks == 10 and not [path for path in folder.iterdir() if path.suffix != ".lock"]
    assert "has no room" in note


def test_a_block_that_is_lost_before_it_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some disks tell of a failure later, at `fsync`, and what was written may be gone by then."""

    def lost(file: int) -> None:
        os.pwrite(file, bytes(5), 128 + 35 * 4 * COLUMNS)
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "fsync", lost)
    computer, notes = Computer(), []
    np.testing.assert_array_equal(fetch(computer, notes=notes), TRUTH)
    assert computer.blocks == 10 + 7 and len(notes) == 1 and "(gone)" in notes[0]
    assert not [path for path in folder.iterdir() if path.suffix != ".lock"]


def mounted(options: str, *then: str) -> list[str]:
    """A command before a command: it runs with a disk of its own as the cache. Skips where that is not allowed."""
    mount = " && ".join([f'mount -t tmpfs -o {options} none "$FEDSIEVE_CACHE"', *then, 'exec "$@"'])
    before = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    return before


@pytest.mark.parametrize("reserves", [True, False])
def test_a_full_disk(reserves: bool) -> None:
    """Four pages of 4 kB have room for five of ten blocks, or less."""
    blocks, (note,) = outcome(another(before=mounted("size=16k"), reserves=reserves))
    assert blocks == 10 and "has no room for" in note and "(No space left on device)" in note


def test_a_folder_that_can_only_be_read(folder: Path) -> None:
    again = 'mount -o remount,ro "$FEDSIEVE_CACHE"'
    blocks, (note,) = outcome(another(before=mounted("size=1m", again)))
    assert blocks == 10 and "cannot keep" in note and "(Read-only file system)" in note
    fetch(Computer())
    (path,) = folder.glob("*.npy")
    copy = path.parent.parent.parent / "copy"
    shutil.copytree(path.parent, copy)
    filled = f'cp -r {copy} "$FEDSIEVE_CACHE/arrays"'
    assert outcome(another(before=mounted("size=1m", filled, again))) == (0, [])


# ---------------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def file(tmp_path: Path, backbone: Path) -> Path:
    """An experiment whose features take more room than any other file of the run."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, size=(2400, 16, 16), dtype=np.uint8)
    labels = generator.integers(0, 4, size=2400)
    np.savez(tmp_path / "x.npz", x_train=images, y_train=labels, x_test=images[:40], y_test=labels[:40])
    path = tmp_path / "x.yaml"
    path.write_text(f"""
device: cpu
threads: 1
data: {{name: npz, path: {tmp_path / "x.npz"}, image_size: 16}}
model: {{backbone: {backbone}}}
clients: {{count: 240, fraction: 0.02}}
phases:
  - {{name: head, train: head, rounds: 2, local: {{epochs: 1, batch_size: 16, lr: 0.05}}}}
  - {{name: last, train: {{blocks: [2], head: true}}, rounds: 2, local: {{epochs: 1, batch_size: 16, lr: 0.01}}}}
""")
    return path


def hash_of(run: Path) -> str:
    return json.loads((run / "result.json").read_text())["model_sha256"]


def test_a_run_does_without(file: Path, fedsieve: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, _ = fedsieve("run", str(file), "--out", "with")
    assert code == 0 and "cache" not in said
    truth, place = hash_of(Path("with")), Path("a file")
    place.write_text("")
    for variable, value, note in (
        ("FEDSIEVE_CACHE", str(place), "cannot keep 0.6 MB of outputs of what is frozen (Not a directory)"),
        ("FEDSIEVE_CACHE_GB", "0.0001", "0.6 MB of outputs of what is frozen are more than the cache may keep"),
    ):
        with monkeypatch.context() as changed:
            changed.setenv(variable, value)
            code, said, _ = fedsieve("run", str(file), "--out", f"without-{variable}")
        assert code == 0 and said.count("going on without it") == 1 and note in said
        assert hash_of(Path(f"without-{variable}")) == truth

    limit = 500_000  # enough for the checkpoints and the model
    program = (
        "import resource, sys; from fedsieve.cli import main; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "run", str(file), "--out", "limited"]
    monkeypatch.setenv("FEDSIEVE_CACHE", str(Path("empty").absolute()))
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("going on without it") == 1 and "has no room for 0.6 MB" in ended.stdout
    assert hash_of(Path("limited")) == truth


# ------------------------------------------------------------------------------------- only what is fedsieve's


def others(folder: Path) -> dict[Path, bytes]:
    """Files of one's own in a folder that is also the cache."""
    names = ["thesis.tex", "arrays/mine.npy", "arrays/0123.partial", "data/cifar100.npz", "data/x/y", ".hidden"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 5000)
    return {folder / name: (folder / name).read_bytes() for name in names}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"FEDSIEVE_CACHE": ""}, "home/.cache/fedsieve"),
        ({"FEDSIEVE_CACHE": "", "XDG_CACHE_HOME": ""}, "home/.cache/fedsieve"),
        ({"FEDSIEVE_CACHE": "", "XDG_CACHE_HOME": "{}/xdg"}, "xdg/fedsieve"),
        ({"FEDSIEVE_CACHE": "."}, "place"),
        ({"FEDSIEVE_CACHE": "own"}, "place/own"),
    ],
)
def test_clear_deletes_nothing_else(
    variables: dict[str, str], place: str, tmp_path: Path, fedsieve: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    kept = others(Path.cwd()) | others(Path.cwd() / "fedsieve") | others(tmp_path / place)
    fetch(Computer())
    (tmp_path / place / "data" / "fedsieve-cifar100.npz").write_bytes(bytes(300_000))
    (tmp_path / place / "data" / "fedsieve-cifar100.123.npz").write_bytes(bytes(200_000))
    _, shown, _ = fedsieve("cache", "show")
    assert shown.endswith(": 528.1 kB\n")
    code, said, _ = fedsieve("cache", "clear")
    assert code == 0 and {path: path.read_bytes() for path in kept} == kept
    freed, left = said.splitlines()
    assert freed.endswith(": 528.1 kB freed") and "thesis.tex" in left and "fedsieve-" not in said
    assert cache.cache_size() == 0 and not list((tmp_path / place).rglob("fedsieve-*"))


def test_making_room_deletes_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = others(folder.parent)
    monkeypatch.setenv("FEDSIEVE_CACHE_GB", str(1.5 * TRUTH.nbytes / 1e9))
    for name in "abc":
        fetch(Computer(), name)
    assert {path: path.read_bytes() for path in kept} == kept
    assert len(list(folder.glob("*.npy"))) == 2  # one of them is not fedsieve's


def test_clear_leaves_what_is_being_made() -> None:
    """And whoever waits for it, or comes after that, does not make it at the same time."""
    with another(stops_at=7) as first:
        assert (says(first), says(first)) == ("started", "stopped")
        fetch(Computer(), "b")
        freed, left = cache.clear()
        assert freed >= TRUTH.nbytes and len(left) == 3  # the half, the list of its blocks and the lock
        first.kill()
    computer = Computer()
    np.testing.assert_array_equal(fetch(computer), TRUTH)
    assert computer.blocks == 4
    cache.clear()
    assert cache.cache_size() == 0


@pytest.mark.parametrize("limit", ["nan", "-1", "-inf", "abc"])
def test_a_limit_that_is_none(limit: str, folder: Path, fedsieve: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIEVE_CACHE_GB", limit)
    code, _, said = fedsieve("run", "digits-iid", "--out", "run")
    assert (code, said.count("\n")) == (2, 1) and "give a number of gigabytes from 0 on" in said
    assert not Path("run").exists()


@pytest.mark.parametrize(("limit", "again"), [("inf", 0), ("", 0), ("0", 10)])
def test_extreme_limits(limit: str, again: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIEVE_CACHE_GB", limit)
    fetch(Computer())
    computer = Computer()
    np.testing.assert_array_equal(fetch(computer), TRUTH)
    assert computer.blocks == again


def test_no_home(fedsieve: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no name: arrays are computed, and commands say what is missing."""
    for name in ("HOME", "FEDSIEVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    notes: list[str] = []
    np.testing.assert_array_equal(fetch(Computer(), notes=notes), TRUTH)
    assert notes == [
        "the cache has no place, as there is no home folder; set FEDSIEVE_CACHE to a folder; going on without it"
    ]
    for command in (["cache", "show"], ["cache", "clear"], ["run", "cifar100-iid", "--out", "run"]):
        code, _, said = fedsieve(*command)
        assert (code, said.count("\n")) == (2, 1) and "set FEDSIEVE_CACHE to a folder" in said
