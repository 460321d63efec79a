"""Clients in other processes: the same bits however many there are, and whatever becomes of them."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsieve.config import Experiment
from fedsieve.errors import RunError
from fedsieve.experiment import run
from fedsieve.federate.jobs import Answer, Job
from fedsieve.observer import Observer
from fedsieve.runs.read import read_metrics
from fedsieve.sieve import rules
from fedsieve.workbench import Workbench
from fedsieve.workers import crew as crew_module
from fedsieve.workers.crew import AHEAD, ATTEMPTS, Crew, at_work

Maker = Callable[..., Experiment]


class Listener(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warning(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All jobs are done by workers, also those of short runs; the list counts them."""
    made, heard, done = Crew.__init__, Crew._hear, []

    def wait_first(self: Crew, *arguments: object) -> None:
        made(self, *arguments)
        self.wait()
        assert len({worker.pid for worker in self.workers}) == self.size

    def count(self: Crew, worker: object) -> None:
        done.extend([1] * (worker.ticket is not None))
        heard(self, worker)

    monkeypatch.setattr(Crew, "__init__", wait_first)
    monkeypatch.setattr(Crew, "_hear", count)
    monkeypatch.setattr(crew_module, "TINY", 0.0)
    return done


def edit(mask: str, local: str = "epochs: 1, batch_size: 16, lr: 0.02", more: str = "") -> str:
    mask = f"sparsity: 0.8, calibration_rounds: 2, fisher: {{samples: 20}}, {mask}"
    head = "{name: head, train: head, rounds: 1, local: {epochs: 1, batch_size: 16, lr: 0.05}}"
    return f"phases=[{head}, {{name: edit, train: backbone, rounds: 2, local: {{{local}}}, mask: {{{mask}}} {more}}}]"


CASES = {
    "dense, evaluated at clients": [
        "clients.fraction=1.0",
        "clients.holdout=0.2",
        "evaluate.clients=true",
        "evaluate.keep=best",
        "data.augment=[horizontal_flip]",
    ],
    "masks, momentum, 8 bits, failures": [
        edit("scope: client", more=", optimizer_state: carry"),
        "wire.values=int8",
        "clients.fail_rate=0.3",
        "clients.norm_limit=1.5",
        "clients.fraction=1.0",
    ],
    "a mask from everybody, each round": [
        edit("scope: federated, refresh: round, unit: row"),
        "clients.select={high_loss: {candidates: 5}}",
    ],
    "a mask for each epoch": [
        edit("rule: random, refresh: epoch, momentum: leak", "epochs: 2, batch_size: 8, lr: 0.1")
    ],
    "in secret": [edit("scope: federated"), "clients.secure=zero_sum"],
    "ridge, mixing, cached tokens": [
        "model.head={ridge: {penalty: 1.0}}",
        "phases.1.train={blocks: [2]}",
        "phases.1.local.steps=20",
        "clients.combine={fisher_mixing: {fisher: {samples: 20}}}",
    ],
}


def outcome(folder: Path, result: dict) -> tuple:
    """Everything but how long it took, and the digests of files that say so."""
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in read_metrics(folder)]
    scores = {key: value for key, value in result.items() if key not in ("seconds", "phases", "files", "digest")}
    return json.dumps(lines), json.dumps(scores)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_two_workers_make_no_difference(
    changes: list[str], experiment: Maker, tmp_path: Path, patient: list[int]
) -> None:
    alone, together = Listener(), Listener()
    one = run(experiment(*changes, "workers=1"), tmp_path / "one", observer=alone)
    assert not patient
    two = run(experiment(*changes, "workers=2"), tmp_path / "two", observer=together)
    assert len(patient) > 10
    assert outcome(tmp_path / "one", one) == outcome(tmp_path / "two", two)
    assert sorted(alone.notes) == sorted(together.notes)
    assert alone.warnings == together.warnings


def test_three_workers_make_no_difference(experiment: Maker, tmp_path: Path, patient: list[int]) -> None:
    changes = [edit("scope: federated"), "clients.fraction=1.0"]
    results = [run(experiment(*changes, f"workers={n}"), tmp_path / str(n)) for n in (1, 2, 3)]
    assert len({outcome(tmp_path / str(n), result) for n, result in zip((1, 2, 3), results, strict=True)}) == 1


def test_who_starts_alone_is_joined_by_workers(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are done here until a worker is ready, and by workers from then on."""
    made, crews, jobs_here = Crew.__init__, [], []

    def remember(self: Crew, *arguments: object) -> None:
        made(self, *arguments)
        crews.append(self)

    class Watch(Observer):
        def round(self, line: dict) -> None:
            if line["round"] == 2:
                crews[0].wait()
            jobs_here.append(any(worker.pid for worker in crews[0].workers))

    monkeypatch.setattr(Crew, "__init__", remember)
    both = run(experiment("workers=2"), tmp_path / "both", observer=Watch())
    assert jobs_here == [False, True, True, True, True]
    assert both["model_sha256"] == run(experiment("workers=1"), tmp_path / "alone")["model_sha256"]


# ------------------------------------------------------------------------------------ when things go wrong


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Crew, int], list[int]]], None]:
    """Kill the processes that the given function names after the n-th time that jobs were handed out."""

    def install(whom: Callable[[Crew, int], list[int]]) -> None:
        hand_out, times = Crew._hand_out, 0

        def then_kill(self: Crew, waiting: object) -> None:
            nonlocal times
            hand_out(self, waiting)
            times += 1
            for pid in whom(self, times):
                with suppress(ProcessLookupError):  # killed before, which the crew has not heard of yet
                    os.kill(pid, signal.SIGKILL)

        monkeypatch.setattr(Crew, "_hand_out", then_kill)

    return install


def busy(crew: Crew) -> list[int]:
    return [worker.pid for worker in crew.workers if worker.ticket is not None and worker.pid]


@pytest.mark.parametrize("victim", ["one worker", "all workers", "the nursery"])
def test_killed_in_the_midst_of_a_round(
    victim: str, experiment: Maker, tmp_path: Path, patient: list[int], killing: Callable
) -> None:
    changes = [edit("scope: client", more=", optimizer_state: carry"), "clients.fraction=1.0"]
    expected = run(experiment(*changes, "workers=1"), tmp_path / "expected")

    due = [20, 5]  # the first time a worker is busy from then on

    def whom(crew: Crew, times: int) -> list[int]:
        if not due or times < due[-1] or not busy(crew) or not all(worker.pid for worker in crew.workers):
            return []
        due.pop()
        if victim == "the nursery":
            return [crew._nursery.pid] if crew._nursery else []
        return busy(crew)[: 1 if victim == "one worker" else None]

    killing(whom)
    listener = Listener()
    result = run(experiment(*changes, "workers=2"), tmp_path / "killed", observer=listener)
    assert not due and listener.warnings
    assert all("a worker process died; what it was doing is done again" in text for text in listener.warnings)
    assert outcome(tmp_path / "expected", expected) == outcome(tmp_path / "killed", result)


def test_a_job_that_kills_whoever_does_it(
    experiment: Maker, tmp_path: Path, patient: list[int], killing: Callable
) -> None:
    killing(lambda crew, times: busy(crew))
    with pytest.raises(RunError, match=f"{ATTEMPTS} worker processes died at the same job"):
        run(experiment("workers=2"), tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("left", [1, 0])
def test_workers_that_cannot_be_replaced(
    left: int, experiment: Maker, tmp_path: Path, patient: list[int], killing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who are left go on, even in the midst of a job; without any the main process does."""
    changes = [edit("scope: client"), "clients.fraction=1.0"]
    expected = run(experiment(*changes, "workers=1"), tmp_path / "expected")

    def whom(crew: Crew, times: int) -> list[int]:
        if times != 5:
            return []
        os.kill(crew._nursery.pid, signal.SIGSTOP)  # it makes no more of them, and nobody notices
        hire = Crew._hire

        def in_vain(self: Crew, number: int) -> None:
            hire(self, number)
            self.workers[-1].line.shutdown(socket.SHUT_RDWR)

        monkeypatch.setattr(Crew, "_hire", in_vain)
        return [worker.pid for worker in crew.workers if worker.pid][left:]

    killing(whom)
    listener = Listener()
    result = run(experiment(*changes, "workers=2"), tmp_path / "run", observer=listener)
    assert outcome(tmp_path / "expected", expected) == outcome(tmp_path / "run", result)
    said = "going on with 1" if left else "going on in one process"
    assert any("could not start" in note and said in note for note in listener.notes)


def test_workers_that_cannot_start(experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that only this process knows, as in a script that adds its own: then it does everything itself."""
    monkeypatch.setitem(rules.RULES, "biggest", rules.RULES["largest_magnitude"])
    made = Crew.__init__

    def wait_first(self: Crew, *arguments: object) -> None:
        made(self, *arguments)
        self.wait()

    monkeypatch.setattr(Crew, "__init__", wait_first)
    listener, changes = Listener(), [edit("rule: biggest")]
    result = run(experiment(*changes, "workers=2"), tmp_path / "two", observer=listener)
    assert any("there is no rule 'biggest'" in note and "going on in one process" in note for note in listener.notes)
    assert result["model_sha256"] == run(experiment(*changes, "workers=1"), tmp_path / "one")["model_sha256"]


def test_clients_that_fail_in_workers_end_the_run_with_advice(
    experiment: Maker, tmp_path: Path, patient: list[int]
) -> None:
    with pytest.raises(RunError, match=r"the loss became|fewer than clients.minimum"):
        run(experiment("workers=2", "phases.0.local.lr=1e30", "phases.0.local.epochs=9"), tmp_path / "run")


# ------------------------------------------------------------------------------------------- the mechanism


@pytest.fixture
def crew(experiment: Maker, tmp_path: Path, patient: list[int]) -> Iterator[Crew]:
    settings = experiment("workers=2").resolved()
    with at_work(settings, Workbench(settings, Observer()), tmp_path) as crew:
        assert crew is not None
        crew.wait()
        yield crew


def test_answers_come_in_order_and_never_far_ahead(crew: Crew) -> None:
    bench, taken, given = crew.bench, 0, 0

    def jobs() -> Iterator[Job]:
        nonlocal given
        for first in range(0, 240, 4):
            given += 1
            yield Job("outputs", {"part": "train", "depth": 4, "first": first}, b"")

    here = [bytes(memoryview(answer.data).cast("B")) for answer in bench.desk.ask(jobs())]
    given = 0
    for answer in crew.ask(jobs()):
        assert bytes(memoryview(answer.data).cast("B")) == here[taken]
        taken += 1
        assert given <= taken + AHEAD * crew.size
    assert taken == len(here) == 60


def test_no_more_memory_than_the_window(crew: Crew) -> None:
    """However many answers there are, their data lies in the same few places."""
    job = Job("outputs", {"part": "train", "depth": 1, "first": 0}, b"")
    seen = {answer.data.obj for answer in crew.ask([job] * 40) if isinstance(answer.data, memoryview)}
    assert 1 <= len(seen) <= AHEAD * crew.size


def test_tiny_jobs_are_done_here(crew: Crew, patient: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Job("outputs", {"part": "train", "depth": 4, "first": 0}, b"")] * 10
    there = [bytes(memoryview(answer.data).cast("B")) for answer in crew.ask(jobs)]
    assert len(patient) == 10
    monkeypatch.setattr(crew_module, "TINY", 1e9)
    assert [bytes(memoryview(answer.data).cast("B")) for answer in crew.ask(jobs)] == there
    assert len(patient) == 10
    crew.bench.begin_phase([])  # what is done now may take longer
    list(crew.ask(jobs))
    assert len(patient) == 20


def test_light_jobs_are_done_here_until_they_turn_out_to_be_heavy(
    crew: Crew, patient: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Job("outputs", {"part": "train", "depth": 4, "first": 0}, b"", is_light=True)] * 10
    monkeypatch.setattr(crew_module, "TINY", 1e-9)
    here = [bytes(memoryview(answer.data).cast("B")) for answer in crew.ask(jobs)]
    assert not patient
    assert [bytes(memoryview(answer.data).cast("B")) for answer in crew.ask(jobs)] == here
    assert len(patient) == 10


def test_who_is_asked_in_the_midst_of_a_job_does_it_alone(crew: Crew) -> None:
    job = Job("outputs", {"part": "train", "depth": 4, "first": 0}, b"")
    for outer in crew.ask([job, job]):
        (inner,) = crew.ask([job])
        assert bytes(memoryview(inner.data).cast("B")) == bytes(memoryview(outer.data).cast("B"))


def test_a_failed_job_is_an_error_here(crew: Crew) -> None:
    with pytest.raises(RunError, match="nonsense"):
        list(crew.ask([Job("nonsense")]))
    (answer,) = crew.ask([Job("outputs", {"part": "test", "depth": 4, "first": 0})])  # those that come next are well
    assert isinstance(answer, Answer) and len(crew.workers) == 2


def test_an_asking_that_is_given_up_leaves_the_crew_usable(crew: Crew) -> None:
    job = Job("outputs", {"part": "train", "depth": 4, "first": 0}, b"")
    answers = crew.ask([job] * 9)
    expected = bytes(memoryview(next(answers).data).cast("B"))
    answers.close()
    assert [bytes(memoryview(one.data).cast("B")) for one in crew.ask([job] * 3)] == [expected] * 3
    assert len(crew.workers) == 2


def test_two_threads_in_each_worker(experiment: Maker, tmp_path: Path) -> None:
    """Images that torch has to cut into a test set: what is forked afterwards must not wait for threads of others."""
    generator = np.random.default_rng(0)
    for name, number in itertools.product("ab", range(40)):
        (tmp_path / "images/train" / name).mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images/train" / name / f"{number}.png")
    data = f"data={{name: folder, path: {tmp_path / 'images'}, image_size: 64, validation: 0.25}}"
    phases = "phases=[{name: head, train: head, rounds: 1, local: {epochs: 1, lr: 0.1}}]"
    settings = experiment(data, "workers=2", "threads=2", "model.backbone=pico", phases)
    (tmp_path / "experiment.yaml").write_text(settings.to_yaml())
    program = (
        "import sys; from pathlib import Path; from fedsieve.workers import crew; from fedsieve.experiment import run\n"
        "from fedsieve.experiment_file import load_experiment\n"
        "made, crew.TINY = crew.Crew.__init__, 0.0\n"
        "crew.Crew.__init__ = lambda self, *arguments: (made(self, *arguments), self.wait())[0]\n"
        "print(run(load_experiment(sys.argv[1]), Path(sys.argv[2]))['model_sha256'])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "experiment.yaml"), str(tmp_path / "two")]
    two = subprocess.run(command, capture_output=True, text=True, timeout=120)
    one = run(settings.model_copy(update={"workers": 1}), tmp_path / "one")
    assert two.stdout.strip() == one["model_sha256"], two.stderr


def test_resumed_with_other_workers_a_run_keeps_its_threads(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Observer):
        def round(self, line: dict) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    with pytest.raises(KeyboardInterrupt):
        run(experiment("workers=2", "threads=auto"), tmp_path / "run", observer=Stop())
    resumed = run(experiment("workers=1", "threads=auto"), tmp_path / "run", resume=True)
    assert resumed["model_sha256"] == run(experiment("workers=1", "threads=1"), tmp_path / "whole")["model_sha256"]


# --------------------------------------------------------------------------------------- nothing is left


def processes_of(group: int) -> list[int]:
    """Living processes that were started by the process `group` or its children."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, own = status.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(own) == group and state != "Z":
            found.append(int(status.parent.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_killed_run_leaves_no_process_and_goes_on(experiment: Maker, tmp_path: Path) -> None:
    settings = experiment("workers=2", "phases.0.rounds=1", "phases.1.rounds=40", "phases.1.local.steps=8")
    (tmp_path / "experiment.yaml").write_text(settings.to_yaml())
    command = [
        sys.executable,
        "-m",
        "fedsieve",
        "run",
        str(tmp_path / "experiment.yaml"),
        "--out",
        str(tmp_path / "run"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while len(read_metrics(tmp_path / "run")) < 3 or len(processes_of(process.pid)) < 4:  # itself, nursery, workers
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    while processes_of(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (tmp_path / "run" / "result.json").exists()
    resumed = run(settings.model_copy(update={"workers": 1}), tmp_path / "run", resume=True)
    whole = run(settings.model_copy(update={"workers": 1}), tmp_path / "whole")
    assert resumed["model_sha256"] == whole["model_sha256"]


PROGRAM = """
import os, sys, threading
from pathlib import Path
from fedsieve.experiment_file import load_experiment
from fedsieve.observer import Observer
from fedsieve.workbench import Workbench, configure_torch
from fedsieve.workers import crew as module
from fedsieve.experiment import run

file, data, out, moment = sys.argv[1:]
settings, made, hand_out = load_experiment(file), module.Crew.__init__, module.Crew._hand_out

def starts(self, *arguments):
    if moment == "starting":
        os.unlink(data)
        os.mkfifo(data)  # the nursery would wait for its data for ever
    made(self, *arguments)
    print(self._nursery.pid, flush=True)
    self.wait()

def busy(self, waiting):
    hand_out(self, waiting)
    if all(worker.ticket for worker in self.workers):
        print("busy", flush=True)

module.Crew.__init__, module.Crew._hand_out = starts, busy
target = lambda: run(settings, Path(out))
if moment == "in a thread":  # whose end must not end the workers, so that the system cannot be asked to
    threading.Thread(target=target).start()
else:
    target()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_way_of_dying_leaves_a_process(experiment: Maker, images: Path, tmp_path: Path) -> None:
    """While the nursery starts, and in the midst of jobs that would take days."""
    long = [
        "workers=2",
        "clients.fraction=1.0",
        "phases=[{name: all, train: all, rounds: 1, local: {steps: 100000000, lr: 0.001}}]",
    ]
    programs: dict[str, subprocess.Popen] = {}
    for moment in ("starting", "in a thread", "without a nursery"):
        folder = tmp_path / moment
        folder.mkdir()
        data = folder / "data.npz"
        data.write_bytes(images.read_bytes())
        (folder / "experiment.yaml").write_text(experiment(*long, f"data.path={data}").to_yaml())
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            str(folder / "experiment.yaml"),
            str(data),
            str(folder / "run"),
            moment,
        ]
        programs[moment] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        for moment, program in programs.items():
            assert program.stdout is not None
            nursery = int(program.stdout.readline())
            if moment != "starting":
                assert program.stdout.readline() == "busy\n"
            if moment == "without a nursery":
                program.send_signal(signal.SIGSTOP)  # so that it cannot end workers itself
                os.kill(nursery, signal.SIGKILL)
            else:
                program.kill()
                program.wait()
            deadline = time.monotonic() + 5
            while left := [pid for pid in processes_of(program.pid) if pid != program.pid]:
                assert time.monotonic() < deadline, (moment, left)
                time.sleep(0.02)
    finally:
        for program in programs.values():
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.communicate()
