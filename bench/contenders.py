"""Those who do the same federated work: a notebook, a bare loop, and in files of their own fedsieve, Flower and pfl.

python bench/contenders.py NAME WORKLOAD WEIGHTS [threads=2] [processes=1] …   # prints one line of JSON

A contender is a function of the workload's file and its options that gives the seconds of all rounds and the weights
that it reached. Everything before the first round (imports, reading, starting workers) is its start-up. Without any
options the process stays, and runs once for each line of them that it is given.
"""

import copy
import importlib
import json
import multiprocessing
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset
from workload import Workload, evaluate, set_tensors, train, trained_tensors

STARTED = time.perf_counter()
FORWARD_BATCHES = (25, 50, 100, 250)


@dataclass(frozen=True)
class Options:
    threads: int = 2  # of each process
    processes: int = 1
    overrides: str = ""  # of fedsieve's experiment, such as "threads=1 workers=2"
    all_travel: int = 0  # 1: fedsieve sends even jobs that are done sooner here than sent
    cache: str = ""  # fedsieve's folder of features
    reached: str = ""  # the weights that fedsieve reached, for `masked`

    @staticmethod
    def parse(arguments: list[str]) -> "Options":
        values = dict(argument.split("=", 1) for argument in arguments)
        return Options(**{key: int(value) if value.isdigit() else value for key, value in values.items()})

    def as_arguments(self) -> list[str]:
        return [f"{key}={value}" for key, value in vars(self).items()]


@dataclass(frozen=True)
class Outcome:
    seconds: float  # of all rounds
    ready: float  # when the first of them began, by time.perf_counter
    weights: dict[str, Tensor]
    more: dict[str, Any]  # whatever else is worth knowing


class Stopwatch:
    """Adds up the time between `go` and `stop`, and what this process and this thread computed meanwhile."""

    def __init__(self) -> None:
        self.seconds, self.cores, self.thread, self.ready = 0.0, 0.0, 0.0, 0.0

    def go(self) -> None:
        self._since, self._cores_since, self._thread_since = (
            time.perf_counter(),
            time.process_time(),
            time.thread_time(),
        )
        self.ready = self.ready or self._since

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._since
        self.cores += time.process_time() - self._cores_since
        self.thread += time.thread_time() - self._thread_since

    def outcome(self, weights: dict[str, Tensor], **more: Any) -> Outcome:
        spent = {"core seconds": self.cores, "thread seconds": self.thread}
        return Outcome(self.seconds, self.ready, weights, {**spent, **more})


def load(file: Path, options: Options) -> Workload:
    """The work at hand, with torch set up for it and warm: its first optimizer imports for more than a second."""
    torch.set_num_threads(options.threads)
    work = Workload.load(file)
    train(work.network, (work.inputs, work.labels), [[torch.arange(16)]], {"lr": 0.0})
    work.network.zero_grad()
    return work


# ---------------------------------------------------------------------------------------- notebook


def notebook(file: Path, options: Options) -> Outcome:
    """As in many a student's notebook: a copy of the model for each client, a DataLoader, an average of state dicts."""
    work, watch = load(file, options), Stopwatch()
    watch.go()
    network = copy.deepcopy(work.network)
    for chosen in work.rounds:
        states, sizes = [], []
        for client, epochs in chosen.items():
            local, dataset = copy.deepcopy(network), TensorDataset(*work.data_of(client))
            optimizer = torch.optim.SGD([one for one in local.parameters() if one.requires_grad], **work.optimizer)
            for epoch in epochs:
                for inputs, labels in DataLoader(dataset, batch_sampler=epoch):
                    optimizer.zero_grad()
                    F.cross_entropy(local(inputs), labels).backward()
                    optimizer.step()
            states.append(local.state_dict())
            sizes.append(len(dataset))
        average = {
            name: sum(state[name] * (size / sum(sizes)) for state, size in zip(states, sizes, strict=True))
            for name in states[0]
        }
        network.load_state_dict(average)
        evaluate(network, work)
    watch.stop()
    return watch.outcome(trained_tensors(network))


# -------------------------------------------------------------------------------------------- bare


def bare(file: Path, options: Options) -> Outcome:
    """Forward, backward and SGD on the batches, and nothing else: the clock stands still for all that comes between.

    With two processes each trains every other client, and a round takes as long as the slower of them.
    """
    work, shares = load(file, options), []
    for number in range(options.processes):
        shares.append(Share(file, options, number) if options.processes > 1 else OwnShare(work))
    weights, seconds, ready = trained_tensors(copy.deepcopy(work.network)), 0.0, time.perf_counter()
    for number, chosen in enumerate(work.rounds):
        for share in shares:
            share.begin(number, weights)
        took, sums = zip(*(share.result() for share in shares), strict=True)
        seconds += max(took)
        total = sum(len(work.clients[client]) for client in chosen)
        weights = {name: (sum(one[name] for one in sums) / total).float() for name in weights}
    for share in shares:
        share.end()
    return Outcome(seconds, ready, weights, {})


def trained_share(
    work: Workload, number: int, weights: dict[str, Tensor], part: slice
) -> tuple[float, dict[str, Tensor]]:
    """The seconds of training some of a round's clients, and the sum of their weights, each times its samples."""
    watch, network = Stopwatch(), work.network
    sums = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in weights.items()}
    for client, epochs in list(work.rounds[number].items())[part]:
        set_tensors(network, weights)
        data = work.data_of(client)
        watch.go()
        train(network, data, epochs, work.optimizer)
        watch.stop()
        for name, one in trained_tensors(network).items():
            sums[name].add_(one, alpha=len(work.clients[client]))
    return watch.seconds, sums


class OwnShare:
    """All clients, here."""

    def __init__(self, work: Workload) -> None:
        self.work = work

    def begin(self, number: int, weights: dict[str, Tensor]) -> None:
        self.found = trained_share(self.work, number, weights, slice(None))

    def result(self) -> tuple[float, dict[str, Tensor]]:
        return self.found

    def end(self) -> None: ...


class Share:
    """Every n-th client, in a process of its own."""

    def __init__(self, file: Path, options: Options, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=serve_share, args=(file, options, number, end))
        self.process.start()
        self.pipe.recv()  # it is ready

    def begin(self, number: int, weights: dict[str, Tensor]) -> None:
        self.pipe.send((number, {name: one.numpy() for name, one in weights.items()}))

    def result(self) -> tuple[float, dict[str, Tensor]]:
        seconds, sums = self.pipe.recv()
        return seconds, {name: torch.from_numpy(one) for name, one in sums.items()}

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join()


def serve_share(file: Path, options: Options, share: int, pipe: Connection) -> None:
    work = load(file, options)
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        number, weights = message
        weights = {name: torch.from_numpy(one) for name, one in weights.items()}
        seconds, sums = trained_share(work, number, weights, slice(share, None, options.processes))
        pipe.send((seconds, {name: one.numpy() for name, one in sums.items()}))


def masked(file: Path, options: Options) -> Outcome:
    """What masked training has to reach: plain steps, after each of which all that fedsieve left alone is put back.

    It is there to be checked against, not to be timed.
    """
    work = load(file, options)
    start = {name: one.clone() for name, one in trained_tensors(work.network).items()}
    reached = load_file(options.reached)
    frozen = {name: one == reached[name] for name, one in start.items()}

    def put_back(*_: Any) -> None:
        for name, one in trained_tensors(work.network).items():
            one.copy_(torch.where(frozen[name], start[name], one))

    hook = register_optimizer_step_post_hook(put_back)
    seconds, sums = trained_share(work, 0, start, slice(None))
    hook.remove()
    total = sum(len(work.clients[client]) for client in work.rounds[0])
    share = sum(int(one.sum()) for one in frozen.values()) / sum(one.numel() for one in frozen.values())
    weights = {name: (one / total).float() for name, one in sums.items()}
    return Outcome(seconds, time.perf_counter(), weights, {"frozen": share})


def forward(file: Path, options: Options) -> Outcome:
    """One pass of the backbone over all images, in batches of the size that a short try finds fastest.

    Images of clients who never take part are fedsieve's to compute as well; others stand in for them here.
    """
    work = load(file, options)
    backbone = work.network.backbone
    images = torch.cat((work.inputs, work.inputs[: work.samples - len(work.inputs)]))

    @torch.no_grad()
    def seconds_of(images: Tensor, batch: int) -> float:
        start = time.perf_counter()
        for part in images.split(batch):
            backbone(part)
        return time.perf_counter() - start

    batch = min(FORWARD_BATCHES, key=lambda size: seconds_of(images[: FORWARD_BATCHES[-1]], size))
    ready = time.perf_counter()
    return Outcome(seconds_of(images, batch), ready, {}, {"batch": batch, "images": len(images)})


# ------------------------------------------------------------------------------------------- command


def fedsieve(file: Path, options: Options) -> Outcome:
    return importlib.import_module("with_fedsieve").fedsieve(file, options)


def flower(file: Path, options: Options) -> Outcome:
    return importlib.import_module("with_flower").flower(file, options)  # only here: importing it takes seconds


def pfl(file: Path, options: Options) -> Outcome:
    return importlib.import_module("with_pfl").pfl(file, options)


CONTENDERS: dict[str, Callable[[Path, Options], Outcome]] = {
    one.__name__: one for one in (notebook, bare, masked, forward, fedsieve, flower, pfl)
}


def main() -> None:
    name, file, weights, *given = sys.argv[1:]
    began = STARTED
    for line in [shlex.join(given)] if given else sys.stdin:
        outcome = CONTENDERS[name](Path(file), Options.parse(shlex.split(line)))
        save_file({key: one.contiguous() for key, one in outcome.weights.items()}, weights)
        print(json.dumps({"seconds": outcome.seconds, "start": outcome.ready - began, **outcome.more}), flush=True)
        began = time.perf_counter()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # threads of Flower's would go on waiting
