"""fedsieve beside its peers: the same data, model, batches, cores and rounds, the same weights at the end.

python bench/peers.py                        # or: make bench; updates results.json, README.md and the pictures
python bench/peers.py --only small --runs 1  # a quick look; fewer than 3 runs are printed and not kept
python bench/peers.py --fedsieve "threads=1" # overrides of fedsieve's experiments

Needs Flower and pfl, which `make bench` installs into bench/.venv.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from cases import CASES, Bar, Case, Contender, provenance
from safetensors.torch import load_file
from scale import clients, clients_memory, memory, ray_memory, start
from tables import keep, show, show_all_bars
from torch import Tensor
from workload import Workload, make_workload, trained_tensors

CLOSE, CLOSE_TO_CHANGE = 1e-4, 0.01  # how far weights may be apart: each, and all together beside how far they went
LITTLE, TIMES = 2.0, 3  # seconds, and how often to spend them in a turn
Result = dict[str, Any]


class Arena:
    """A place where contenders meet: workloads, caches and what they reached, in a folder that is gone afterwards."""

    def __init__(self, folder: Path, case: Case, overrides: str) -> None:
        self.folder, self.case, self.overrides = folder, case, overrides
        self.caches = 0
        self.made: dict[str, Path] = {}
        self.processes: dict[tuple[str, Path], subprocess.Popen[str]] = {}  # that stay for another run

    def workload(self, contender: Contender) -> Path:
        """The file of a contender's work, with the experiment beside it."""
        make = contender.settings or self.case.settings
        name = f"work-{id(make)}"
        if name not in self.made:
            path, settings = self.folder / name, make(self.folder)
            path.with_suffix(".json").write_text(json.dumps(settings))
            os.environ["FEDSIEVE_CACHE"] = str(self.folder / "cache")
            make_workload(settings, self.case.on_features).save(path)
            self.made[name] = path
        return self.made[name]

    def run(self, contender: Contender) -> Result:
        """One run: what it says, and under "weights" the file of those it reached."""
        work, options = self.workload(contender), dict(contender.options)
        weights = self.folder / f"weights-{contender.kind}"
        if contender.kind == "fedsieve":
            options["overrides"] = f"{self.overrides} {options.get('overrides', '')}".strip()
            self.caches += self.case.cold
            options["cache"] = self.folder / (f"cache-{self.caches}" if self.case.cold else "cache")
        process = self.processes.pop((contender.kind, work), None) or self._start(contender.kind, work, weights)
        print(shlex.join(f"{key}={value}" for key, value in options.items()), file=process.stdin, flush=True)
        said = next((line for line in process.stdout if line.startswith('{"seconds"')), None)
        if said is None:
            process.wait()
            raise SystemExit(f"{contender.kind} failed:\n{self._complaints(contender.kind).read_text()[-4000:]}")
        if options.get("processes", 1) == 1:
            self.processes[contender.kind, work] = process
        else:  # neither Ray nor torch.distributed likes to be started again by the same process
            process.communicate()
        return {**json.loads(said), "weights": weights}

    def _start(self, kind: str, work: Path, weights: Path) -> "subprocess.Popen[str]":
        """A contender in a process of its own, for as many runs as it is asked for."""
        with self._complaints(kind).open("w") as complaints:
            return subprocess.Popen(
                [sys.executable, Path(__file__).with_name("contenders.py"), kind, work, weights],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
            )

    def _complaints(self, kind: str) -> Path:
        return self.folder / f"stderr-{kind}.txt"

    def close(self) -> None:
        for process in self.processes.values():
            process.communicate()


def meet(case: Case, runs: int, overrides: str, say: Callable[[str], None]) -> Result:
    """All contenders in turns, so that a slow moment of the machine hits all of them; what each reached is checked.

    Who takes little time takes it several times in a turn, the median of which counts.
    """
    with tempfile.TemporaryDirectory() as folder, closing(Arena(Path(folder), case, overrides)) as arena:
        found: dict[str, Result] = {}
        for name, contender in case.contenders.items():
            found[name] = {"options": contender.options, "values": [], "start": [], "more": []}
            if contender.warm:
                arena.run(contender)
        expected: dict[str, Tensor] | None = None
        for turn in range(runs):
            for name, contender in case.contenders.items():
                said, one = arena.run(contender), found[name]
                reached = load_file(said.pop("weights"))
                seconds = [said.pop("seconds")]
                while seconds[0] < LITTLE and len(seconds) < TIMES:
                    seconds.append(arena.run(contender)["seconds"])
                one["values"].append(statistics.median(seconds))
                one["start"].append(said.pop("start"))
                said.pop("each round", None)  # for costs.py
                one["more"].append(said)
                say(f"  turn {turn + 1}: {name}, {one['values'][-1]:.3f} s")
                if expected is None and contender.kind == "fedsieve" and contender.settings is None:
                    expected = reached
                if turn == 0 and reached:
                    one |= compare(arena, contender, reached, expected)
        data = provenance(case.settings(Path(folder)))
        return {"title": case.title, "unit": "s", "data": data, "contenders": found, "bars": judge(case.bars, found)}


def compare(
    arena: Arena, contender: Contender, reached: dict[str, Tensor], expected: dict[str, Tensor] | None
) -> Result:
    """How far a contender's weights are from fedsieve's; under a mask, its own from those of plain masked steps."""
    work = arena.workload(contender)
    if contender.settings is not None:
        options = {"reached": arena.folder / "weights-fedsieve"}
        said = arena.run(Contender("masked", options, contender.settings))
        return {"frozen": said["frozen"], **distance(work, reached, load_file(said["weights"]))}
    return distance(work, reached, expected) if expected is not None else {}


def distance(work: Path, reached: dict[str, Tensor], expected: dict[str, Tensor]) -> Result:
    """The largest difference of any weight, and that of all together relative to how far training moved them."""
    start = trained_tensors(Workload.load(work).network)
    largest = max(float((reached[name] - expected[name]).abs().max()) for name in start)
    apart = sum(float((reached[name] - expected[name]).double().square().sum()) for name in start)
    moved = sum(float((expected[name] - one).double().square().sum()) for name, one in start.items())
    relative = (apart / moved) ** 0.5 if moved else float("inf")
    return {"difference": largest, "relative": relative, "same": largest <= CLOSE and relative <= CLOSE_TO_CHANGE}


def judge(bars: tuple[Bar, ...], found: dict[str, Result]) -> list[Result]:
    """Each bar by the median of the turns' ratios, so that it hardly matters how fast the machine is in a turn."""
    judged = []
    for bar in bars:
        values = found[bar.what]["values"]
        others = found[bar.to]["values"] if bar.to else [1.0] * len(values)
        ratios = [one / other for one, other in zip(values, others, strict=True)]
        ratio = statistics.median(ratios)
        judged.append(
            {
                "what": bar.what,
                "to": bar.to,
                "ratio": ratio,
                "ratios": ratios,
                "bar": str(bar),
                "met": bar.is_met(ratio),
            }
        )
    return judged


OTHERS = {  # of fedsieve alone
    "start": start,
    "clients": clients,
    "clients-memory": clients_memory,
    "memory": memory,
    "ray-memory": ray_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=[*CASES, *OTHERS], help="this case; may be given again")
    parser.add_argument("--runs", type=int, default=3, help="of each contender; results of at least 3 are kept")
    parser.add_argument("--fedsieve", default="", metavar="OVERRIDES", help='such as "threads=1 workers=2"')
    arguments = parser.parse_args()
    results: dict[str, Result] = {}
    for name in arguments.only or [*(name for name, case in CASES.items() if not case.on_request), *OTHERS]:
        print(f"{name} …", flush=True)
        if name in CASES:
            result = meet(CASES[name], arguments.runs, arguments.fedsieve, partial(print, flush=True))
        else:
            result = OTHERS[name](arguments.runs, arguments.fedsieve)
            result["bars"] = judge(result["bars"], result["contenders"])
        show(name, result)
        results[name] = result
        if arguments.runs >= 3:
            keep(name, result)
    show_all_bars(results)


if __name__ == "__main__":
    main()
