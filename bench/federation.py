"""Federations whose nodes are real, over Flower, without any training: what a round takes, and how much memory.

.venv/bin/python bench/federation.py                          # all, in turns; keeps "federation" in bench/results.json
.venv/bin/python bench/federation.py --only rounds --turns 1  # a quick look; fewer than 3 turns are not kept
.venv/bin/python bench/federation.py --quick                  # tiny models, to see whether all of it works

- `rounds`: the seconds of a round with 5 nodes, from the first message to the new weights: the median of a run's
  rounds without the first. fedsieve with its SuperLink, nodes and relays, beside Flower's own SuperLink and SuperNodes
  with its FedAvg. Both have TLS, authenticated nodes, and as many random weights, in one array. Clients return other
  weights than they got, without training. `--also tensors`: Flower with an array for each tensor of the model, as in
  its tutorials. `--also echo`: Flower with clients that return the same numbers, which are not uploaded, since the
  SuperLink has what has the same hash.
- `memory`: the most memory that `fedsieve run` and the SuperLink hold, of 5 nodes and of 50 whose updates of 9 MB are
  under way at the same time. It is looked at every 0.05 s: pages that are no file's. `results.json` has the highest
  resident memory (VmHWM), with files, too.
- `frame`: bytes between relays and the SuperLink, with TLS, HTTP and Flower's objects, that are not in the metrics, for
  a client and round; and how many an idle relay sends and gets in a second.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cases import Bar
from common import RESULTS, machine
from federation_flower import Flower
from federation_frame import CountedLoopback
from federation_ours import SERVER, SIZES, Ours
from federation_stubs import Stubs
from observed import MEGABYTE, pages_of
from peers import judge
from tables import show

Result = dict[str, Any]
NODES, FEW, MANY = 5, 5, 50
LIMIT = 1200.0  # seconds for a run
LOOK = 0.05  # seconds
IDLE = 10.0  # seconds
KEPT = 3  # turns that are enough
VERSIONS = ("fedsieve", "torch", "flwr")


@dataclass(frozen=True)
class Plan:
    """How much is done."""

    turns: int
    rounds: int
    sizes: tuple[str, ...] = ("87 MB", "9 MB")  # of `rounds`
    counts: tuple[int, int] = (FEW, MANY)  # nodes of `memory`
    replies: str = "9 MB"
    also: tuple[str, ...] = ()


def rounds(what: Plan) -> Result:
    """fedsieve and Flower in turns, with each size of the weights."""
    contenders: dict[str, Callable[[str, int], Result]] = {"fedsieve": our_rounds, "Flower": flower_rounds}
    contenders |= {f"Flower, {one}": partial(flower_rounds, **{one: True}) for one in what.also}
    found: dict[str, Result] = {}
    for turn in range(what.turns):
        for size in what.sizes:
            for contender, measure in contenders.items():
                one = found.setdefault(name := f"{contender}, {size}", {"values": [], "more": []})
                said = measure(size, what.rounds)
                one["values"].append(statistics.median(said["rounds"][1:]))
                one["more"].append(said)
                print(f"  turn {turn + 1}: {name}, {json.dumps(said)}", flush=True)
    weights = {size: f"{sum(SIZES[size].tensors):,} float32 weights" for size in what.sizes}
    return {
        "title": f"A round without training: {NODES} nodes over Flower, with TLS and keys",
        "unit": "s",
        "data": ", ".join(f"{size}: {told}" for size, told in weights.items()),
        "contenders": found,
        "bars": tuple(Bar(f"Flower, {size}", f"fedsieve, {size}", at_least=2.0) for size in what.sizes),
    }


def our_rounds(size: str, count: int) -> Result:
    """Seconds of each round, and until all was up. Checkpoints, written between rounds, are not counted."""
    with tempfile.TemporaryDirectory() as place:
        began = time.monotonic()
        ours = Ours(Path(place), SIZES[size], NODES, count)
        with ours.loopback:
            ours.start_nodes()
            started = time.monotonic() - began
            ours.begin()
            lines = ours.end(LIMIT)
    return {"rounds": [round(line["seconds"], 3) for line in lines], "start": round(started, 1)}


def flower_rounds(size: str, count: int, tensors: bool = False, echo: bool = False) -> Result:
    lengths = SIZES[size].tensors if tensors else [sum(SIZES[size].tensors)]
    with tempfile.TemporaryDirectory() as place:
        began = time.monotonic()
        with closing(Flower(Path(place), NODES)) as flower:
            flower.start()
            started = time.monotonic() - began
            found = flower.run(count, LIMIT, lengths=",".join(map(str, lengths)), echo=echo)
    return {"rounds": [round(seconds, 3) for seconds in found], "start": round(started, 1)}


def memory(what: Plan) -> Result:
    """The server and the SuperLink with few and with many nodes, in turns."""
    found: dict[str, Result] = {}
    few, many = (f"{count} nodes" for count in what.counts)
    for turn in range(what.turns):
        for count in what.counts:
            held = memory_with(count, what)
            for process, kinds in held.items():
                one = found.setdefault(f"{process}, {count} nodes", {"values": [], "more": []})
                one["values"].append(kinds["own"])
                one["more"].append(kinds)
            print(f"  turn {turn + 1}: {count} nodes, {json.dumps(held)}", flush=True)
    return {
        "title": f"Memory with updates of {what.replies} of all nodes under way at the same time, without files",
        "unit": "MB",
        "data": f"{sum(SIZES[what.replies].tensors):,} float32 weights, {what.rounds} rounds",
        "contenders": found,
        "bars": (Bar(f"fedsieve run, {many}", f"fedsieve run, {few}", at_most=1.10),),
    }


def frame(what: Plan) -> Result:
    """What is sent besides fedsieve's messages."""
    found: dict[str, Result] = {}
    for size in dict.fromkeys((*what.sizes, "tiny")):
        with tempfile.TemporaryDirectory() as place:
            ours = Ours(Path(place), SIZES[size], NODES, what.rounds, CountedLoopback)
            loopback = ours.loopback
            assert isinstance(loopback, CountedLoopback)
            with loopback:
                ours.start_nodes()
                time.sleep(IDLE)  # until relays look as seldom as they do
                before = loopback.up + loopback.down
                time.sleep(IDLE)
                idle = (loopback.up + loopback.down - before) / IDLE / NODES
                up, down = loopback.up, loopback.down
                ours.begin()
                lines = ours.end(LIMIT)
                sent = {"up": loopback.up - up, "down": loopback.down - down}
        for way, count in sent.items():
            told = sum(line[f"bytes_{way}"] for line in lines)
            more = {"bytes": count, "metrics": told, "idle_bytes_a_second": idle}
            found[f"{way}, {size}"] = {"values": [(count - told) / what.rounds / NODES / 1000], "more": [more]}
            print(f"  {way}, {size}: {json.dumps(more)}", flush=True)
    return {
        "title": "What crosses the network besides fedsieve's messages, for a client and round",
        "unit": "kB",
        "data": f"{NODES} nodes, {what.rounds} rounds",
        "contenders": found,
        "bars": (),
    }


def memory_with(count: int, what: Plan) -> dict[str, dict[str, float]]:
    """The most megabytes of each process by kind, over a run with so many nodes."""
    with tempfile.TemporaryDirectory() as place:
        ours = Ours(Path(place), SIZES[what.replies], count, what.rounds)
        with ours.loopback as loopback:
            loopback.start_superlink()
            with closing(Stubs(ours)) as stubs:
                stubs.start()
                ours.begin()
                watched = {"fedsieve run": SERVER, "SuperLink": "superlink"}
                with closing(Watch({name: loopback.processes[one].pid for name, one in watched.items()})) as watch:
                    ours.end(LIMIT)
    return watch.highest()


class Watch:
    """Looks at the memory of processes until it is closed."""

    def __init__(self, processes: dict[str, int]) -> None:
        self.processes = processes
        self.most: dict[str, Counter[str]] = {name: Counter() for name in processes}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(LOOK):
            for name, process in self.processes.items():
                pages = pages_of(process)
                own = Counter({"own": pages["Pss_Anon"] + pages["Pss_Shmem"], "VmHWM": highest_resident(process)})
                self.most[name] |= own

    def highest(self) -> dict[str, dict[str, float]]:
        """Megabytes by process and kind."""
        return {
            name: {kind: round(one / MEGABYTE, 1) for kind, one in kinds.items()} for name, kinds in self.most.items()
        }

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


def highest_resident(process: int) -> int:
    """Bytes: VmHWM, the most resident memory since a process began, with files."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return 1024 * int(line.split()[1])
    return 0


def keep(name: str, result: Result) -> None:
    """Put a part's figures into results.json."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    about = machine() | {one: importlib.metadata.version(one) for one in VERSIONS}
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    kept.setdefault("federation", {})[name] = result | {"machine": about, "date": day}
    RESULTS.write_text(json.dumps(kept, indent=2, default=str) + "\n")
    print(f"written to bench/{RESULTS.name}")


PARTS = {"rounds": rounds, "memory": memory, "frame": frame}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; may be given again")
    parser.add_argument("--turns", type=int, default=KEPT, help=f"of each; results of at least {KEPT} are kept")
    parser.add_argument("--rounds", type=int, default=5, help="of each run; the first is not counted")
    parser.add_argument("--size", action="append", choices=SIZES, help="of the weights in `rounds`; may be given again")
    parser.add_argument("--also", action="append", choices=("tensors", "echo"), help="other ways to use Flower")
    parser.add_argument("--quick", action="store_true", help="tiny models and few nodes; nothing is kept")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all processes end
    what = Plan(given.turns, given.rounds, tuple(given.size or Plan.sizes), also=tuple(given.also or ()))
    if given.quick:
        what = Plan(1, 3, ("tiny",), (3, 6), "tiny", what.also)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FEDSIEVE_CACHE"] = cache
        for name in given.only or PARTS:
            print(f"{name} …", flush=True)
            result = PARTS[name](what)
            result["bars"] = judge(result["bars"], result["contenders"])
            show(name, result)
            if what.turns >= KEPT and not given.quick:
                keep(name, result)


if __name__ == "__main__":
    main()
