"""What the machine does to a command ends in one line: a full disk, too little memory, Ctrl-C at any time."""

import errno
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError, MachineError, RunError, machine_error
from fedsieve.files.atomic import written_atomically


def numpy_memory() -> None:
    np.empty(1 << 60, np.uint8)


def torch_memory() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def full_disk() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"x")


def full_database() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("PRAGMA max_page_count = 2")
        connection.execute("CREATE TABLE numbers AS SELECT zeroblob(100000)")


def full_disk_in_safetensors() -> None:
    with written_atomically(Path("/proc/model.safetensors")) as partial:  # where no file can be made
        save_file({"x": torch.zeros(3)}, partial)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (numpy_memory, "there is too little memory"),
        (torch_memory, "there is too little memory"),
        (full_disk, "the disk is full"),
        (full_database, "the disk is full"),
        (full_disk_in_safetensors, "/proc/model.safetensors cannot be written"),
    ],
)
def test_what_libraries_say_of_it(cause: Callable[[], None], said: str) -> None:
    with pytest.raises(Exception) as caught:
        cause()
    known = machine_error(caught.value)
    assert known is not None and str(known).startswith(said) and "\n" not in str(known)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("disk is full"),
        RuntimeError("shapes differ"),
        OSError(errno.ENOENT, "no"),
        RunError(""),
        InputError(""),
    ],
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert machine_error(error) is None


def test_what_is_known_stays_as_it_is() -> None:
    error = MachineError("so")
    assert machine_error(error) is error


# ------------------------------------------------------------------------------------- a disk without room

FULL = """
import io, json, os, resource, sys
import fedsieve.experiment, fedsieve.observe.progress
import fedsieve.analysis.report.tables, fedsieve.analysis.sweep.run_sweep
from fedsieve.cli import main

def command(limit, *arguments):
    "In a process of its own, in which files may have so many bytes: the exit code and what it said of errors."
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(write, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)) if limit else None
        try:
            main(list(arguments))
        except SystemExit as ended:
            sys.stderr.flush()
            os._exit(ended.code or 0)
        except BaseException as error:
            os.write(2, repr(error).encode())
        os._exit(99)
    os.close(write)
    with open(read) as said:
        text = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text

for line in sys.stdin:
    print(json.dumps(command(*json.loads(line))), file=sys.stderr, flush=True)
"""


@pytest.fixture
def limited(tmp_path: Path) -> Callable[..., list[tuple[int, str]]]:
    """Run commands, each with a limit on the size of files."""

    def run(*commands: tuple) -> list[tuple[int, str]]:
        lines = "".join(json.dumps(command) + "\n" for command in commands)
        process = [sys.executable, "-c", FULL]
        ended = subprocess.run(process, input=lines, capture_output=True, text=True, check=True, cwd=tmp_path)
        return [tuple(json.loads(line)) for line in ended.stderr.splitlines()]

    return run


def test_a_full_disk_ends_in_one_line_and_the_run_goes_on(
    experiment: Callable[..., Experiment], tmp_path: Path, limited: Callable
) -> None:
    """In each place where a run or a sweep writes; what is there by then is good to go on from."""
    mask = "phases.1.mask={sparsity: 0.5, calibration_rounds: 1, fisher: {samples: 4}}"
    cases = {  # what does not fit, into files of how many bytes, and what the experiment changes
        "experiment.yaml": (100, []),
        "masks/": (100_000, [mask]),
        "clients/": (100_000, ["phases.1.optimizer_state=carry"]),
        "checkpoints/": (100_000, []),
        "model.safetensors": (100_000, ["phases.1.rounds=1", "phases.1.train=head"]),
    }
    short, commands = ["workers=1", "phases.0.rounds=1", "phases.1.rounds=2", "phases.1.local.steps=1"], []
    for number, (size, changes) in enumerate(cases.values()):
        (tmp_path / f"{number}.yaml").write_text(experiment(*short, *changes).to_yaml())
        run = ("run", f"{number}.yaml", "--out")
        commands += [
            (size, *run, f"run-{number}"),
            (0, *run, f"run-{number}", "--resume"),
            (0, *run, f"whole-{number}"),
        ]
    (tmp_path / "sweep.yaml").write_text("experiment: 0.yaml\nsearch: {phases.0.local.lr: [0.1]}\nseeds: 1\n")
    sweep, report = ("sweep", "sweep.yaml", "--out", "sweep"), ("report", "run-0", "--out", "report.html")
    ended = limited(*commands, (100, *report), (30_000, *sweep), (250_000, *sweep), (0, *sweep))
    failed = [*ended[: 3 * len(cases) : 3], *ended[-4:-1]]
    for (code, said), place in zip(failed, [*cases, "report.html", "disk", "seed-7"], strict=True):
        assert code == 1 and said.startswith("error: ") and said.count("\n") == 1 and place in said, said
    assert all(code == 0 for code, _ in [*ended[1 : 3 * len(cases) : 3], ended[-1]])
    for number in range(len(cases)):
        resumed, whole = (
            json.loads((tmp_path / f"{one}-{number}/result.json").read_text()) for one in ("run", "whole")
        )
        assert resumed["model_sha256"] == whole["model_sha256"]
    (trial,) = json.loads((tmp_path / "sweep" / "results.json").read_text())["arms"][0]["trials"]
    assert trial["state"] == "complete"  # the full disk was not the fault of its settings
    assert not list(tmp_path.rglob("*.partial")) and not list(tmp_path.rglob(".tmp*"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_printing_to_a_full_disk() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-m", "fedsieve", "presets"], stdout=full, stderr=subprocess.PIPE)
    assert ended.returncode == 1 and ended.stderr.count(b"\n") == 1 and b"error: the disk is full" in ended.stderr


# ---------------------------------------------------------------------------------------------------- Ctrl-C

INTERRUPTED = "error: interrupted; the same command with --out (and --resume, for a run) goes on\n"
PRESS = (
    "import os, signal, sys\npress = lambda: os.kill(os.getpid(), signal.SIGINT)\nsys.argv = ['fedsieve', 'presets']\n"
)
WHILE_IMPORTING = """
class Hook:
    def find_spec(name, *_):
        if name == "typer":
            press()
sys.meta_path.insert(0, Hook)
"""
OFTEN = """
import fedsieve.cli
def command():
    try:
        press()
    finally:
        try:
            press()
        finally:
            press()
            print("not so", file=sys.stderr)
fedsieve.cli.main = command
"""
IN_A_LIBRARY = """
import fedsieve.cli
def command():
    try:
        press()
    except KeyboardInterrupt:
        raise ImportError("numpy could not be imported") from None
fedsieve.cli.main = command
"""


@pytest.mark.parametrize("program", [WHILE_IMPORTING, OFTEN, IN_A_LIBRARY])
def test_ctrl_c_is_one_line(program: str) -> None:
    code = f"{PRESS}{program}\nfrom fedsieve.__main__ import main\nmain()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, INTERRUPTED)
