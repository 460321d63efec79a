"""Clients in other processes: the same bits however many there are, and whatever becomes of them."""

import itertools
import json
import os
import shutil
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
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fedsieve.config.registry import Registry
from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.engine import pace
from fedsieve.engine.channel import SharedBuffer
from fedsieve.engine.dispatch import AHEAD, ATTEMPTS
from fedsieve.engine.published import PublishedVectors, VectorReader
from fedsieve.engine.start import engine_for
from fedsieve.engine.worker_pool import WorkerPool
from fedsieve.errors import RunError
from fedsieve.experiment import run
from fedsieve.experiment.prepare import publish_phase
from fedsieve.federate.types import Answer, Job
from fedsieve.observe.callbacks import Callback
from fedsieve.phase import plan
from fedsieve.runs.read import read_metrics
from fedsieve.sieve import rules
from listeners import Listener
from small_runs import edit, outcome

Maker = Callable[..., Experiment]


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
    "AdamW that is carried": [
        edit("rule: random, refresh: epoch, momentum: carry", "epochs: 2, batch_size: 32, lr: 0.01, optimizer: adamw"),
        "phases.*.optimizer_state=carry",
        "clients.fraction=1.0",
    ],
    "in secret": [edit("scope: federated"), "clients.secure=zero_sum"],
    "ridge, mixing, cached tokens": [
        "model.head={ridge: {penalty: 1.0}}",
        "phases.1.train={blocks: [2]}",
        "phases.1.local.steps=20",
        "phases.*.method={fisher_mixing: {fisher: {samples: 20}}}",
    ],
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_two_workers_make_no_difference(
    changes: list[str], experiment: Maker, tmp_path: Path, by_workers: list[str]
) -> None:
    alone, together = Listener(), Listener()
    one = run(experiment(*changes, "workers=1"), tmp_path / "one", callback=alone)
    assert not by_workers
    two = run(experiment(*changes, "workers=2"), tmp_path / "two", callback=together)
    assert len(by_workers) > 10
    assert outcome(tmp_path / "one", one) == outcome(tmp_path / "two", two)
    assert sorted(alone.notes) == sorted(together.notes)
    assert alone.warnings == together.warnings


def test_three_workers_make_no_difference(experiment: Maker, tmp_path: Path, by_workers: list[str]) -> None:
    changes = [edit("scope: federated"), "clients.fraction=1.0"]
    results = [run(experiment(*changes, f"workers={n}"), tmp_path / str(n)) for n in (1, 2, 3)]
    assert len({outcome(tmp_path / str(n), result) for n, result in zip((1, 2, 3), results, strict=True)}) == 1


LAST_FIRST = """
import fedsieve
from fedsieve.federate.aggregators.mean import Mean

@fedsieve.aggregator
class LastFirst(Mean):
    needs_all = True

    def __init__(self, settings, weights):
        super().__init__(settings, weights)
        self.kept = []

    def add(self, update):
        self.kept.append(update)

    def finish(self):
        for update in reversed(self.kept):
            super().add(update)
        return super().finish()
"""


def test_updates_that_are_kept_stay_as_they_are(experiment: Maker, tmp_path: Path, by_workers: list[str]) -> None:
    """An aggregator that needs all updates of a round gets the same ones from workers, whose memory is used again."""
    plugin = tmp_path / "last_first.py"
    plugin.write_text(LAST_FIRST, encoding="utf-8")
    changes = [f"plugins=[{plugin}]", "phases.*.aggregate=last_first", edit("rule: random"), "clients.fraction=1.0"]
    one, two = (run(experiment(*changes, f"workers={n}"), tmp_path / str(n)) for n in (1, 2))
    assert len(by_workers) > 10 and one["model_sha256"] == two["model_sha256"]


def test_workers_that_load_other_weights_are_sent_away(
    experiment: Maker, backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the backbone is overwritten when the main process has read it."""
    copy, listener = Path(shutil.copy(backbone, tmp_path / "copy.safetensors")), Listener()
    settings = experiment(f"model.backbone={copy}")
    expected = run(settings, tmp_path / "one")["model_sha256"]
    made = WorkerPool.__init__

    def overwrite(self: WorkerPool, *arguments: object) -> None:
        tensors = {name: tensor + 1 for name, tensor in load_file(copy).items()}
        save_file(tensors, copy)
        made(self, *arguments)
        self.wait()

    monkeypatch.setattr(WorkerPool, "__init__", overwrite)
    result = run(experiment(f"model.backbone={copy}", "workers=2"), tmp_path / "two", callback=listener)
    assert result["model_sha256"] == expected
    assert "weights on disk have changed since the run began" in " ".join(listener.notes)


def test_published_tensors_keep_their_shapes() -> None:
    buffer = SharedBuffer()
    published, reader = PublishedVectors(buffer), VectorReader(buffer)
    given = {
        "model": torch.arange(5.0),
        "number": torch.tensor(3.5),
        "table": torch.arange(6).view(2, 3),
        "none": torch.empty(0, 4),
        "bits": torch.tensor([True, False]),
    }
    published.write(given)
    for name, tensor in reader.new(json.loads(json.dumps(published.places))).items():
        assert torch.equal(tensor, given[name]) and tensor.shape == given[name].shape
    published.write({"number": torch.tensor(4.5)})
    assert {name: float(one) for name, one in reader.new(published.places).items()} == {"number": 4.5}


def test_who_starts_alone_is_joined_by_workers(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are done here until a worker is ready, and by workers from then on."""
    made, pools, jobs_here = WorkerPool.__init__, [], []

    def remember(self: WorkerPool, *arguments: object) -> None:
        made(self, *arguments)
        pools.append(self)

    class Watch(Callback):
        def round(self, line: dict) -> None:
            if line["round"] == 2:
                pools[0].wait()
            jobs_here.append(any(worker.pid for worker in pools[0].workers))

    monkeypatch.setattr(WorkerPool, "__init__", remember)
    both = run(experiment("workers=2"), tmp_path / "both", callback=Watch())
    assert jobs_here == [False, True, True, True, True]
    assert both["model_sha256"] == run(experiment("workers=1"), tmp_path / "alone")["model_sha256"]


# ------------------------------------------------------------------------------------ when things go wrong


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[WorkerPool, int], list[int]]], None]:
    """Kill the processes that the given function names after the n-th time that jobs were handed out."""

    def install(whom: Callable[[WorkerPool, int], list[int]]) -> None:
        hand_out, times = WorkerPool._hand_out, 0

        def then_kill(self: WorkerPool, waiting: object) -> None:
            nonlocal times
            hand_out(self, waiting)
            times += 1
            for pid in whom(self, times):
                with suppress(ProcessLookupError):  # killed before, which the pool has not heard of yet
                    os.kill(pid, signal.SIGKILL)

        monkeypatch.setattr(WorkerPool, "_hand_out", then_kill)

    return install


def busy(pool: WorkerPool) -> list[int]:
    return [worker.pid for worker in pool.workers if worker.ticket is not None and worker.pid]


@pytest.mark.parametrize("victim", ["one worker", "all workers", "the fork server"])
def test_killed_in_the_midst_of_a_round(
    victim: str, experiment: Maker, tmp_path: Path, by_workers: list[str], killing: Callable
) -> None:
    changes = [edit("scope: client", more=", optimizer_state: carry"), "clients.fraction=1.0"]
    expected = run(experiment(*changes, "workers=1"), tmp_path / "expected")

    due = [20, 5]  # the first time a worker is busy from then on

    def whom(pool: WorkerPool, times: int) -> list[int]:
        if not due or times < due[-1] or not busy(pool) or not all(worker.pid for worker in pool.workers):
            return []
        due.pop()
        if victim == "the fork server":
            return [pool._fork_server.pid] if pool._fork_server else []
        return busy(pool)[: 1 if victim == "one worker" else None]

    killing(whom)
    listener = Listener()
    result = run(experiment(*changes, "workers=2"), tmp_path / "killed", callback=listener)
    assert not due and listener.warnings
    assert all("a worker process died; what it was doing is done again" in text for text in listener.warnings)
    assert outcome(tmp_path / "expected", expected) == outcome(tmp_path / "killed", result)


def test_a_job_that_kills_whoever_does_it(
    experiment: Maker, tmp_path: Path, by_workers: list[str], killing: Callable
) -> None:
    killing(lambda pool, times: busy(pool))
    with pytest.raises(RunError, match=f"{ATTEMPTS} worker processes died at the same job"):
        run(experiment("workers=2"), tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("left", [1, 0])
def test_workers_that_cannot_be_replaced(
    left: int,
    experiment: Maker,
    tmp_path: Path,
    by_workers: list[str],
    killing: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those who are left go on, even in the midst of a job; without any the main process does."""
    changes = [edit("scope: client"), "clients.fraction=1.0"]
    expected = run(experiment(*changes, "workers=1"), tmp_path / "expected")

    def whom(pool: WorkerPool, times: int) -> list[int]:
        if times != 5:
            return []
        os.kill(pool._fork_server.pid, signal.SIGSTOP)  # it makes no more of them, and nobody notices
        hire = WorkerPool._hire

        def in_vain(self: WorkerPool, number: int) -> None:
            hire(self, number)
            self.workers[-1].line.shutdown(socket.SHUT_RDWR)

        monkeypatch.setattr(WorkerPool, "_hire", in_vain)
        return [worker.pid for worker in pool.workers if worker.pid][left:]

    killing(whom)
    listener = Listener()
    result = run(experiment(*changes, "workers=2"), tmp_path / "run", callback=listener)
    assert outcome(tmp_path / "expected", expected) == outcome(tmp_path / "run", result)
    said = "going on with 1" if left else "going on in one process"
    assert any("could not start" in note and said in note for note in listener.notes)


def test_workers_that_cannot_start(experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that only this process knows, and this goes unnoticed at first: then it does everything itself."""
    monkeypatch.setitem(rules.RULES, "biggest", rules.RULES["largest_magnitude"])
    monkeypatch.setattr(Registry, "is_changed", False)
    made = WorkerPool.__init__

    def wait_first(self: WorkerPool, *arguments: object) -> None:
        made(self, *arguments)
        self.wait()

    monkeypatch.setattr(WorkerPool, "__init__", wait_first)
    listener, changes = Listener(), [edit("rule: biggest")]
    result = run(experiment(*changes, "workers=2"), tmp_path / "two", callback=listener)
    assert any("mask.rule is 'biggest'; use" in note and "going on in one process" in note for note in listener.notes)
    assert result["model_sha256"] == run(experiment(*changes, "workers=1"), tmp_path / "one")["model_sha256"]


def test_clients_that_fail_in_workers_end_the_run_with_advice(
    experiment: Maker, tmp_path: Path, by_workers: list[str]
) -> None:
    with pytest.raises(RunError, match=r"the loss became|fewer than clients.minimum"):
        run(experiment("workers=2", "phases.0.local.lr=1e30", "phases.0.local.epochs=9"), tmp_path / "run")


# ------------------------------------------------------------------------------------------- the mechanism


@pytest.fixture
def pool(experiment: Maker, tmp_path: Path, by_workers: list[str]) -> Iterator[WorkerPool]:
    settings = experiment("workers=2").resolved()
    context = RunContext(settings, Callback())
    phases = plan(settings, context)
    with engine_for(context, phases, tmp_path) as pool:
        assert isinstance(pool, WorkerPool)
        pool.wait()
        publish_phase(pool, phases[0], context.model.vector.clone())
        yield pool


def test_answers_come_in_order_and_never_far_ahead(pool: WorkerPool) -> None:
    taken, given = 0, 0

    def jobs() -> Iterator[Job]:
        nonlocal given
        for first in range(0, 240, 4):
            given += 1
            yield Job("outputs", {"phase": 0, "part": "train", "depth": 4, "first": first}, b"")

    here = [bytes(memoryview(answer.data).cast("B")) for answer in map(pool.runtime.do, jobs())]
    given = 0
    for answer in pool.map(jobs()):
        assert bytes(memoryview(answer.data).cast("B")) == here[taken]
        taken += 1
        assert given <= taken + AHEAD * pool.size
    assert taken == len(here) == 60


def test_no_more_memory_than_the_window(pool: WorkerPool) -> None:
    """However many answers there are, their data lies in the same few places."""
    job = Job("outputs", {"phase": 0, "part": "train", "depth": 1, "first": 0}, b"")
    seen = {answer.data.obj for answer in pool.map([job] * 40) if isinstance(answer.data, memoryview)}
    assert 1 <= len(seen) <= AHEAD * pool.size


def test_tiny_jobs_are_done_here(pool: WorkerPool, by_workers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Job("outputs", {"phase": 0, "part": "train", "depth": 4, "first": 0}, b"")] * 10
    there = [bytes(memoryview(answer.data).cast("B")) for answer in pool.map(jobs)]
    assert len(by_workers) == 10
    monkeypatch.setattr(pace, "TINY", 1e9)
    assert [bytes(memoryview(answer.data).cast("B")) for answer in pool.map(jobs)] == there
    assert len(by_workers) == 10
    # The jobs of a new phase may take longer.
    publish_phase(pool, pool.runtime.phases[0], pool.context.model.vector.clone())
    list(pool.map(jobs))
    assert len(by_workers) == 20


def test_light_jobs_are_done_here_until_they_turn_out_to_be_heavy(
    pool: WorkerPool, by_workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Job("outputs", {"phase": 0, "part": "train", "depth": 4, "first": 0}, b"", is_light=True)] * 10
    monkeypatch.setattr(pace, "TINY", 1e-9)
    here = [bytes(memoryview(answer.data).cast("B")) for answer in pool.map(jobs)]
    assert not by_workers
    assert [bytes(memoryview(answer.data).cast("B")) for answer in pool.map(jobs)] == here
    assert len(by_workers) == 10


def test_who_is_asked_in_the_midst_of_a_job_does_it_alone(pool: WorkerPool) -> None:
    job = Job("outputs", {"phase": 0, "part": "train", "depth": 4, "first": 0}, b"")
    for outer in pool.map([job, job]):
        (inner,) = pool.map([job])
        assert bytes(memoryview(inner.data).cast("B")) == bytes(memoryview(outer.data).cast("B"))


def test_a_failed_job_is_an_error_here(pool: WorkerPool) -> None:
    with pytest.raises(RunError, match="nonsense"):
        list(pool.map([Job("nonsense")]))
    (answer,) = pool.map(
        [Job("outputs", {"phase": 0, "part": "test", "depth": 4, "first": 0})]
    )  # those that come next are well
    assert isinstance(answer, Answer) and len(pool.workers) == 2


def test_an_asking_that_is_given_up_leaves_the_pool_usable(pool: WorkerPool) -> None:
    job = Job("outputs", {"phase": 0, "part": "train", "depth": 4, "first": 0}, b"")
    answers = pool.map([job] * 9)
    expected = bytes(memoryview(next(answers).data).cast("B"))
    answers.close()
    assert [bytes(memoryview(one.data).cast("B")) for one in pool.map([job] * 3)] == [expected] * 3
    assert len(pool.workers) == 2


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
        "import sys; from pathlib import Path; from fedsieve.engine import pace, worker_pool as pool\n"
        "from fedsieve.experiment import run\n"
        "from fedsieve.config.experiment_file import load_experiment\n"
        "made, pace.TINY = pool.WorkerPool.__init__, 0.0\n"
        "pool.WorkerPool.__init__ = lambda self, *arguments: (made(self, *arguments), self.wait())[0]\n"
        "print(run(load_experiment(sys.argv[1]), Path(sys.argv[2]))['model_sha256'])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "experiment.yaml"), str(tmp_path / "two")]
    two = subprocess.run(command, capture_output=True, text=True, timeout=120)
    one = run(settings.model_copy(update={"workers": 1}), tmp_path / "one")
    assert two.stdout.strip() == one["model_sha256"], two.stderr


def test_resumed_with_other_workers_a_run_keeps_its_threads(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Callback):
        def round(self, line: dict) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    with pytest.raises(KeyboardInterrupt):
        run(experiment("workers=2", "threads=auto"), tmp_path / "run", callback=Stop())
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
    while len(read_metrics(tmp_path / "run")) < 3 or len(processes_of(process.pid)) < 4:  # itself, fork server, workers
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
from fedsieve.config.experiment_file import load_experiment
from fedsieve.observe.callbacks import Callback
from fedsieve.context import RunContext
from fedsieve.engine.torch_setup import configure_torch
from fedsieve.engine import worker_pool as module
from fedsieve.experiment import run

file, data, out, moment = sys.argv[1:]
settings, made, hand_out = load_experiment(file), module.WorkerPool.__init__, module.WorkerPool._hand_out

def starts(self, *arguments):
    if moment == "starting":
        os.unlink(data)
        os.mkfifo(data)  # the fork server would wait for its data for ever
    made(self, *arguments)
    print(self._fork_server.pid, flush=True)
    self.wait()

def busy(self, waiting):
    hand_out(self, waiting)
    if all(worker.ticket for worker in self.workers):
        print("busy", flush=True)

module.WorkerPool.__init__, module.WorkerPool._hand_out = starts, busy
target = lambda: run(settings, Path(out))
if moment == "in a thread":  # whose end must not end the workers, so that the system cannot be asked to
    threading.Thread(target=target).start()
else:
    target()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_way_of_dying_leaves_a_process(experiment: Maker, images: Path, tmp_path: Path) -> None:
    """While the fork server starts, and in the midst of jobs that would take days."""
    long = [
        "workers=2",
        "clients.fraction=1.0",
        "phases=[{name: all, train: all, rounds: 1, local: {steps: 100000000, lr: 0.001}}]",
    ]
    programs: dict[str, subprocess.Popen] = {}
    for moment in ("starting", "in a thread", "without a fork server"):
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
            fork_server = int(program.stdout.readline())
            if moment != "starting":
                assert program.stdout.readline() == "busy\n"
            if moment == "without a fork server":
                program.send_signal(signal.SIGSTOP)  # so that it cannot end workers itself
                os.kill(fork_server, signal.SIGKILL)
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
