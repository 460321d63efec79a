"""Whether this code gives the same bits as an earlier version: a check for every rebuild.

    python scripts/same_bits.py REV [--only WORD] [--out DIR]       # about 10 minutes on 2 cores

Small experiments that together use every feature run twice: with the code at REV, in a git worktree, and with the code
as it is here. Model hashes, metrics and byte counts must be equal, apart from seconds. Each difference is printed, and
the exit code is 1 if there is any. Rows that the earlier version does not know are new, and only have to run. Where the
two versions spell a setting differently, each row is written in the newest spelling, and `OLDER` takes it back step by
step until the code accepts it.
"""

import argparse
import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
BAD_INPUT = 2  # exit code
UNLIKE = ("seconds", "files", "digest")  # what differs from run to run: times, and digests of files that hold times
Settings = dict[str, Any]

BASE = """
seed: 7
device: cpu
threads: 1
workers: 1
data: {name: digits, limit: 500, validation: 0.2}
model: {backbone: pico}
clients: {count: 6, fraction: 0.5, split: {kind: classes, per_client: 4}}
phases:
  - {name: head, train: head, rounds: 3, local: {steps: 4, lr: 0.1, batch_size: 16}}
  - {name: edit, train: backbone, rounds: 3, local: {steps: 3, lr: 0.3, batch_size: 8}}
"""


@dataclass(frozen=True)
class Row:
    """An experiment: `BASE` with some settings changed, by dotted keys."""

    name: str
    change: Settings = field(default_factory=dict)
    kills: tuple[int, ...] = ()  # after so many rounds the run is killed, and resumed

    def settings(self) -> Settings:
        settings = yaml.safe_load(BASE)
        for key, value in self.change.items():
            *parents, last = key.split(".")
            holder = settings
            for part in parents:
                holder = holder[int(part)] if isinstance(holder, list) else holder.setdefault(part, {})
            holder[int(last) if isinstance(holder, list) else last] = value
        return settings


def mask(**settings: Any) -> Settings:
    """A mask for the second phase."""
    return {"phases.1.mask": {"sparsity": 0.8, "calibration_rounds": 1, "fisher": {"samples": 16}, **settings}}


def each_phase(key: str, value: Any) -> Settings:
    return {f"phases.{number}.{key}": value for number in range(2)}


CARRY = {"phases.0.optimizer_state": "carry", "phases.1.optimizer_state": "carry"}
EPOCHS = {"phases.1.local": {"epochs": 2, "lr": 0.3, "batch_size": 16}}
ALL = {"phases.1.train": "all"}
SCAFFOLD = {**each_phase("method", "scaffold"), **each_phase("local.momentum", 0.0)}

ROWS = [
    Row("dense"),
    Row("dense, two workers", {"workers": 2}),
    Row("one client", {"clients": {"count": 1}, "phases.1.rounds": 4}),
    Row("head only, nesterov, clipped", {
        "phases": [{"name": "head", "train": "head", "rounds": 6, "local": {
            "epochs": 1, "lr": 0.5, "batch_size": 8, "nesterov": True, "clip_norm": 0.5, "schedule": "linear"}}],
    }),
    Row("mlp head, everything trained", {"model.head": {"mlp": {"hidden": 32}}, **ALL}),
    Row("least sensitive, own masks, two calibration rounds", mask(calibration_rounds=2)),
    Row("least sensitive, own masks, two workers", {"workers": 2, **mask(calibration_rounds=2)}),
    Row("most sensitive, federated, two calibration rounds, two workers", {
        "workers": 2, **mask(rule="most_sensitive", scope="federated", calibration_rounds=2)}),
    Row("least sensitive at the server, batch scores", mask(
        scope="server", fisher={"kind": "batch", "samples": 32})),
    Row("least sensitive, federated, each round, empirical scores", mask(
        scope="federated", refresh="round", fisher={"kind": "empirical", "samples": 8})),
    Row("largest, in rows, each tensor its share", mask(
        rule="largest_magnitude", scope="server", unit="row", across="tensor")),
    Row("smallest, own masks, each round, momentum carried", {
        **CARRY, **mask(rule="smallest_magnitude", refresh="round", momentum="carry", rescale=True)}),
    Row("random tensors, each epoch, momentum leaks", {
        **EPOCHS, **CARRY, **mask(rule="random", unit="tensor", refresh="epoch", momentum="leak")}),
    Row("least sensitive, each epoch, two workers", {"workers": 2, **EPOCHS, **mask(refresh="epoch")}),
    Row("random, one for all, each round, bernoulli", mask(
        rule="random", scope="server", refresh="round", draw="bernoulli")),
    Row("random, own masks, averaged over the active", {
        **each_phase("aggregate", "active"), **mask(rule="random", only=["attention", "mlp"])}),
    Row("head dense beside a mask", {**ALL, **mask(dense=["head"], calibration_rounds=2)}),
    Row("head dense beside a shared mask, active, two workers", {
        "workers": 2, **each_phase("aggregate", "active"), **ALL, **mask(dense=["head"], scope="federated")}),
    Row("float16 and compressed", {"wire": {"values": "float16", "compress": True}, **mask(rule="random")}),
    Row("bfloat16 on the wire, full broadcasts", {
        "wire": {"values": "bfloat16", "broadcast": "full"}, **mask(scope="federated", calibration_rounds=2)}),
    Row("int8 with residuals, two workers", {"workers": 2, "phases.1.rounds": 5, "wire": {"values": "int8"}, **mask()}),
    Row("zero sum", {"clients.secure": "zero_sum", **mask(scope="server")}),
    Row("zero sum, dense, two workers, momentum carried", {"workers": 2, "clients.secure": "zero_sum", **CARRY}),
    Row("zero sum, high loss, equal weights", {
        "clients.secure": "zero_sum", "clients.select": {"high_loss": {"candidates": 5}},
        "clients.weighting": "equal"}),
    Row("Fisher mixing", {
        **each_phase("method", {"fisher_mixing": {"fisher": {"samples": 16}}}), "phases.1.rounds": 5, **mask()}),
    Row("Fisher mixing, bfloat16, two workers", {
        "workers": 2, **each_phase("method", {"fisher_mixing": {"dtype": "bfloat16", "fisher": {"samples": 16}}}),
        "phases.1.rounds": 5, **mask(scope="server"), **CARRY}),
    Row("Fisher mixing in float32, everything trained", {
        **each_phase("method", {"fisher_mixing": {"dtype": "float32", "fisher": {"kind": "empirical", "samples": 16}}}),
        "clients.fraction": 1.0, **ALL}),
    Row("ridge head", {"model.head": "ridge", "phases": []}),
    Row("ridge head, then editing, two workers", {"model.head": {"ridge": {"penalty": 10.0}}, "workers": 2, **mask()}),
    Row("clients of high loss, two workers", {"clients.select": {"high_loss": {"candidates": 5}}, "workers": 2}),
    Row("clients by size, equal weights", {
        "clients.select": "by_size", "clients.weighting": "equal",
        "clients.split": {"kind": "dirichlet", "alpha": 0.5, "balanced": False}}),
    Row("the best round is kept", {
        "evaluate": {"keep": "best", "every": 2, "test": "each", "clients": True}, **mask()}),
    Row("clients fail", {"clients.fail_rate": 0.3, "clients.fraction": 1.0, "phases.1.rounds": 5, **mask(), **CARRY}),
    Row("clients fail, norm limit, two workers", {
        "clients.fail_rate": 0.3, "clients.fraction": 1.0, "clients.norm_limit": 1.5, "workers": 2, **mask()}),
    Row("samples held out at clients, augmented, blocks analyzed", {
        "clients.holdout": 0.2, "data.augment": ["horizontal_flip"], "evaluate.clients": True,
        "analyze.level": "blocks", "phases.1.train": {"blocks": [2, 3], "head": True}}),
    Row("killed: momentum, residuals, the best round", {
        **CARRY, "wire": {"values": "int8"}, "evaluate.keep": "best", "phases.0.rounds": 6, "phases.1.rounds": 6,
        **mask(calibration_rounds=2)}, kills=(2, 7, 10)),
    Row("killed: Fisher mixing, two workers", {
        **each_phase("method", {"fisher_mixing": {"fisher": {"samples": 16}}}), "workers": 2,
        "phases.0.rounds": 6, "phases.1.rounds": 6, **mask(scope="federated")}, kills=(4, 9)),
    Row("FedProx and FedAvgM, own masks", {
        **each_phase("method", {"fedprox": {"mu": 0.5}}),
        **each_phase("server_optimizer", {"sgd": {"lr": 0.5, "momentum": 0.9}}), **mask(rule="random")}),
    Row("SCAFFOLD, own masks each epoch, two workers", {
        "workers": 2, **SCAFFOLD, **mask(rule="random", refresh="epoch"),
        "phases.1.local": {"epochs": 2, "lr": 0.3, "batch_size": 16, "momentum": 0.0}}),
    Row("SCAFFOLD and zero sum", {"clients.secure": "zero_sum", **SCAFFOLD, **mask(scope="server")}),
    Row("FedNova, nesterov, clients of different sizes", {
        **each_phase("method", "fednova"), "clients.split": {"kind": "dirichlet", "alpha": 0.5, "balanced": False},
        "phases.1.local": {"epochs": 1, "lr": 0.3, "batch_size": 16, "nesterov": True}}),
    Row("FedAdam, one mask for all, each round", {
        **each_phase("server_optimizer", "adam"), **mask(rule="random", scope="server", refresh="round")}),
    Row("FedYogi, then FedAdagrad", {"phases.0.server_optimizer": "yogi", "phases.1.server_optimizer": "adagrad"}),
    Row("median, then trimmed mean under own masks", {
        "clients.fraction": 1.0, "phases.0.aggregate": "median",
        "phases.1.aggregate": {"trimmed_mean": {"share": 0.2}}, **mask(rule="random")}),
    Row("AdamW, momentum carried, masks of rows each round", {
        **CARRY, "phases.0.local.optimizer": "adamw", "phases.1.local.optimizer": "adamw",
        **mask(rule="random", unit="row", refresh="round", momentum="carry")}),
    Row("a phase that stops early", {"phases.0.rounds": 10, "phases.0.stop": {"patience": 2}}),
    Row("killed: SCAFFOLD, 8 bits, FedAdam, two workers", {
        "workers": 2, **SCAFFOLD, "wire": {"values": "int8"}, **each_phase("server_optimizer", "adam"),
        "phases.0.rounds": 6, "phases.1.rounds": 6, **mask(rule="random")}, kills=(4, 9)),
]  # fmt: skip


def combine_for_all_phases(settings: Settings) -> None:
    """There was one key for all phases, `clients.combine`, and none for their methods and aggregators."""
    for phase in settings["phases"]:
        method, aggregate = phase.pop("method", None), phase.pop("aggregate", None)
        if method or aggregate:
            settings["clients"]["combine"] = method or aggregate


OLDER = [combine_for_all_phases]  # each takes settings back to the spelling before it


# ----------------------------------------------------------------------------------------------- a side


@dataclass(frozen=True)
class Side:
    """A version of the code."""

    name: str
    root: Path

    def run(self, row: Row, folder: Path) -> dict[str, Any]:
        """What came out of a row: the result, and the metrics round by round, without times."""
        settings = copy.deepcopy(row.settings())
        for step in (None, *OLDER):
            if step is not None:
                step(settings)
            code, errors = self._attempt(settings, row.kills, folder)
            if code != BAD_INPUT:
                break
        if code == BAD_INPUT:
            return {"refused": errors.strip()}
        if code:
            return {"error": errors.strip().splitlines()[-1] if errors.strip() else f"exit code {code}"}
        result = json.loads((folder / "run" / "result.json").read_text(encoding="utf-8"))
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        metrics = {f"{line['phase']} {line['round']}": line for line in map(json.loads, lines)}
        return without_times({"result": result, "metrics": metrics})

    def _attempt(self, settings: Settings, kills: tuple[int, ...], folder: Path) -> tuple[int, str]:
        folder.mkdir(parents=True, exist_ok=True)
        file, out = folder / "experiment.yaml", folder / "run"
        file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        for rounds in kills:
            with self._start(file, out) as process:
                while process.poll() is None and lines_in(out / "metrics.jsonl") < rounds:
                    time.sleep(0.01)
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            if process.returncode == BAD_INPUT:
                return BAD_INPUT, "bad input"
        with self._start(file, out) as process:
            _, errors = process.communicate()
        return process.returncode, errors

    def _start(self, file: Path, out: Path) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.root / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "fedsieve", "run", str(file), "--out", str(out), "--resume"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **quiet)  # type: ignore


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key not in UNLIKE}
    return [without_times(one) for one in value] if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------ differences


def differences(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Each place at which two results differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{place}.{key}".lstrip(".")
            if key not in new:
                yield f"{inner} is gone (was {short(old[key])})"
            elif key not in old:
                yield f"{inner} is new ({short(new[key])})"
            else:
                yield from differences(old[key], new[key], inner)
    elif old != new:
        yield f"{place}: {short(old)} -> {short(new)}"


def short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """The code at a revision, in a folder that is removed again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), revision], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revision", metavar="REV", help="the commit to compare with")
    parser.add_argument("--only", default="", metavar="WORD", help="only rows whose names hold this word")
    parser.add_argument("--out", type=Path, help="keep the runs in this folder")
    asked = parser.parse_args()
    rows, unequal, added = [row for row in ROWS if asked.only in row.name], 0, 0
    with worktree(asked.revision) as code, tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(ROOT / "src", Path(scratch) / "code" / "src")  # so that one can go on writing
        sides = [Side("old", code), Side("new", Path(scratch) / "code")]
        for number, row in enumerate(rows):
            old, new = (side.run(row, (asked.out or Path(scratch)) / f"{number:02d}-{side.name}") for side in sides)
            if "refused" in old and "result" in new:
                print(f"new      {row.name}", flush=True)
                added += 1
                continue
            found = list(differences(old, new))
            if "result" not in new:
                found.append(f"no result: {new.get('error') or new.get('refused')}")
            unequal += bool(found)
            print(f"{'differs' if found else 'equal':8} {row.name}", flush=True)
            for one in found[:8]:
                print(f"         {one}")
    print(f"{len(rows) - added - unequal} of {len(rows) - added} rows are equal, {added} are new")
    return int(unequal > 0)


if __name__ == "__main__":
    sys.exit(main())
