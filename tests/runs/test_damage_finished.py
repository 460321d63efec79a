"""Finished runs, sweeps and masks with a damaged file: the same numbers as before, or one line that names the file.

    FEDSIEVE_DAMAGE_CASES=2000 pytest -s tests/runs/test_damage_finished.py    (-s shows how the cases ended)

Of runs without digests (older ones, and unfinished ones) other numbers are allowed, for nothing tells them apart.
"""

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from damage import Damage, damages
from fedsieve.analysis.collection import find_runs
from fedsieve.analysis.compare import compare
from fedsieve.analysis.report.formats import as_csv, as_data, as_latex
from fedsieve.analysis.report.overview import overview
from fedsieve.analysis.report.page import page
from fedsieve.analysis.report.tables import result_table
from fedsieve.analysis.report.watch import Watch
from fedsieve.analysis.sweep.run_sweep import run_sweep
from fedsieve.analysis.sweep.sweep_file import load_sweep
from fedsieve.config.experiment_file import parse_experiment
from fedsieve.errors import InputError, RunError
from fedsieve.experiment import evaluate_run, run
from fedsieve.model.classifier import build_classifier
from fedsieve.model.vit import ViT, ViTShape, initialize
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.export import export_run
from fedsieve.runs.model_file import start_from_run
from fedsieve.runs.read import read_metrics
from fedsieve.sieve.density import overlap
from fedsieve.sieve.mask import Mask

CASES = int(os.environ.get("FEDSIEVE_DAMAGE_CASES", "240"))
SEED = int(os.environ.get("FEDSIEVE_DAMAGE_SEED", "0"))
RUNS = {"a": ("seed=1",), "b": ("seed=2",), "c": ("seed=3", "phases.0.local.lr=0.5")}  # a and b repeat each other
SMALL = """
device: cpu
threads: 1
data: {{name: npz, path: {images}, image_size: 16, validation: 0.25}}
model: {{backbone: {backbone}}}
clients: {{count: 3, fraction: 0.67}}
evaluate: {{clients: true}}
phases:
  - {{name: head, train: head, rounds: 2, local: {{steps: 2, lr: 0.1}}}}
  - name: edit
    train: {{blocks: [1]}}
    rounds: 1
    local: {{steps: 1, lr: 0.1}}
    mask: {{rule: random, sparsity: 0.5}}
"""
TEXTS = ("result.json", "metrics.jsonl", "split.json", "experiment.yaml")
CHOSEN, OTHER = "sweep/runs/as-it-is/trial-001/seed-42", "sweep/runs/as-it-is/trial-000/seed-42"
FILES = {  # that are damaged, by the command that then reads them
    "report": [f"runs/a/{name}" for name in TEXTS],
    "compare": [f"runs/a/{name}" for name in TEXTS],
    "watch": [f"runs/a/{name}" for name in TEXTS],
    "resume": [f"runs/a/{name}" for name in TEXTS],
    "evaluate": [f"runs/a/{name}" for name in ("result.json", "experiment.yaml", "model.safetensors")],
    "export": [f"runs/a/{name}" for name in ("result.json", "experiment.yaml", "model.safetensors")],
    "model.init": [f"runs/a/{name}" for name in ("result.json", "model.safetensors")],
    "older": [f"older/a/{name}" for name in TEXTS],
    "unfinished": [f"unfinished/a/{name}" for name in TEXTS[1:]],
    "sweep": [f"sweep/{name}" for name in ("trials.sqlite", "sweep.yaml", "results.json", "best.yaml")]
    + ["sweep/trials.sqlite", *(f"{CHOSEN}/{name}" for name in TEXTS), f"{OTHER}/result.json"],
    "mask": ["masks/one.safetensors", "masks/other.safetensors"],
}
PAIRS = [(command, file) for command, files in FILES.items() for file in files]


class Place:
    """A folder with runs, a sweep and masks, that is as it was before after each case."""

    def __init__(self, root: Path, images: Path) -> None:
        self.root, backbone = root, root / "tiny.safetensors"
        network = ViT(ViTShape(image_size=16, patch_size=8, width=64, depth=2, heads=1, hidden=96))  # can be exported
        initialize(network, torch.Generator().manual_seed(0))
        save_file(network.state_dict(), backbone)
        text = SMALL.format(images=images, backbone=backbone)
        self.settings = {name: parse_experiment(text, name, changes) for name, changes in RUNS.items()}
        for name, settings in self.settings.items():
            run(settings, root / "runs" / name)
            for kind in ("older", "unfinished"):
                shutil.copytree(root / "runs" / name, root / kind / name)
                result = json.loads((root / "runs" / name / "result.json").read_text())
                del result["files"], result["digest"]
                (root / kind / name / "result.json").write_text(json.dumps(result, indent=2) + "\n")
            (root / "unfinished" / name / "result.json").unlink()
        (root / "small.yaml").write_text(text)
        search = {"phases.0.local.lr": [1e-6, 0.5]}
        file = {"experiment": "small.yaml", "set": {"seed": 42}, "search": search, "seeds": 2}
        (root / "sweep.yaml").write_text(yaml.safe_dump(file))
        self.sweep = load_sweep(str(root / "sweep.yaml"))
        run_sweep(self.sweep, root / "sweep", lambda _: nullcontext(Callback()))
        (root / "masks").mkdir()
        for seed, name in enumerate(("one", "other")):
            bits = torch.rand(1000, generator=torch.Generator().manual_seed(seed)) < 0.5
            Mask.pack({"head.weight": (100, 10)}, bits).save(root / "masks" / f"{name}.safetensors")
        self._content = {path: (path.read_bytes(), self._stamp(path)) for path in self._files()}
        self._known: dict[tuple[str, frozenset[str]], Any] = {}

    def _files(self) -> list[Path]:
        return [path for path in self.root.rglob("*") if path.is_file() and not path.is_symlink()]

    @staticmethod
    def _stamp(path: Path) -> tuple[int, int]:
        return path.stat().st_mtime_ns, path.stat().st_size

    def restore(self) -> None:
        for path in self._files():
            if path not in self._content:
                path.unlink()
        for path, (content, stamp) in self._content.items():
            if not path.exists() or self._stamp(path) != stamp:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                os.utime(path, ns=(stamp[0], stamp[0]))

    def expected(self, command: str, without: frozenset[str] = frozenset()) -> Any:
        """What the command gives of undamaged files, where these runs are not there."""
        if (command, without) not in self._known:
            self.restore()
            for name in without:
                shutil.rmtree(self.root / "runs" / name)
            self._known[command, without] = COMMANDS[command](self)
            self.restore()
        return self._known[command, without]

    # What the commands do; what is returned is all numbers that a person would see.

    def report(self, folder: str = "runs") -> Any:
        runs, problems = find_runs([self.root / folder])
        if not runs:
            raise InputError("; ".join(problems))
        data = overview(runs, problems)
        page("runs", "report", data)
        return data

    def compare(self, folder: str = "runs") -> Any:
        comparison = compare([self.root / folder])
        as_csv(comparison), as_latex(comparison)
        return as_data(comparison)

    def watch(self, folder: str = "runs") -> Any:
        data = Watch(self.root / folder).data()
        page("runs", "report", data)
        return data

    def resume(self) -> Any:
        result = run(self.settings["a"], self.root / "runs/a", resume=True)
        result_table(result)
        return result

    def evaluate(self) -> Any:
        return evaluate_run(self.root / "runs/a")

    def export(self) -> Any:
        text = export_run(self.root / "runs/a", self.root / "export")
        files = sorted((self.root / "export").iterdir())
        told = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        shutil.rmtree(self.root / "export")
        return {**told, "text": text}

    def init(self) -> Any:
        model = build_classifier(self.settings["b"].resolved(), ["0", "1", "2", "3"])
        start_from_run(model, str(self.root / "runs/a"))
        return float(sum(tensor.double().abs().sum() for tensor in model.state_dict().values()))

    def all_of(self, folder: str) -> None:
        """All commands for several runs, and their exceptions only."""
        for use in (self.report, self.compare, self.watch):
            with suppress(InputError):
                use(folder)

    def search(self) -> Any:
        return run_sweep(self.sweep, self.root / "sweep", lambda _: nullcontext(Callback()))

    def mask(self) -> Any:
        one, other = (Mask.load(self.root / "masks" / f"{name}.safetensors") for name in ("one", "other"))
        other.must_fit(one.shapes, str(self.root / "masks/other.safetensors"))
        return overlap(one, other).total, {one.density, other.density}  # whoever renames a mask does not damage it


COMMANDS: dict[str, Callable[[Place], Any]] = {
    "report": Place.report,
    "compare": Place.compare,
    "watch": Place.watch,
    "resume": Place.resume,
    "evaluate": Place.evaluate,
    "export": Place.export,
    "model.init": Place.init,
    "older": lambda place: place.all_of("older"),
    "unfinished": lambda place: place.all_of("unfinished"),
    "sweep": Place.search,
    "mask": Place.mask,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, own_cache: None, images: Path) -> Place:
    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        return Place(tmp_path_factory.mktemp("place"), images)


def leave_out_pictures(patch: pytest.MonkeyPatch) -> None:
    """Those of sweeps, which take a second and are never read."""
    for name in ("plot_importances", "plot_parallel"):
        patch.setattr(f"fedsieve.analysis.sweep.run_sweep.{name}", lambda *_: None)


def outcome_of(place: Place, command: str, damage: Damage) -> str:
    """Apply the damage and use what is left; in a word how that ended, which begins with FAULT if it must not."""
    try:
        expected = place.expected(command)
        damage.apply()
        try:
            found = COMMANDS[command](place)
        except (InputError, RunError) as error:
            return "refused" if is_named(damage, str(error)) else f"FAULT: refused without the file's name: {error}"
        except Exception as error:
            return f"FAULT: {type(error).__name__}: {error}"
        if command in ("report", "compare", "watch"):
            return outcome_of_many(place, command, damage, found)
        if command in ("older", "unfinished"):
            return "read or refused"
        if found == expected:
            return "the same"
        if command in ("resume", "sweep") and any(content is None for content in damage.contents.values()):
            return "made again" if without_times(found) == without_times(expected) else f"FAULT: made anew: {found}"
        return f"FAULT: other numbers: {found}"
    finally:
        place.restore()


def outcome_of_many(place: Place, command: str, damage: Damage, found: dict[str, Any]) -> str:
    """The runs that are shown have the numbers that they have without the others, which must be named."""
    told = "\n".join(found["warnings"])
    shown = {seed for group in found["groups"] for seed in group["seeds"]}
    hidden = frozenset(name for name, settings in place.settings.items() if settings.seed not in shown)
    damaged = {path.parent.name for path in damage.contents}
    results_gone = [path for path, content in damage.contents.items() if path.name == "result.json" and content is None]
    if results_gone:  # then it is an unfinished run
        if command == "compare":
            is_told = [one["path"] for one in found["unfinished"]] == [str(results_gone[0].parent)]
            same = found["groups"] == place.expected(command, frozenset("a"))["groups"]
            return "unfinished" if is_told and same else "FAULT: a run without its result counts"
        states = {one["seed"]: one["state"] for group in found["groups"] for one in group["runs"]}
        return "unfinished" if states[1] == "unfinished: round 3 of 3" else "FAULT: finished without a result"
    if not hidden <= damaged or any(not is_named(damage, told, name) for name in hidden):
        return f"FAULT: {sorted(hidden)} are left out, and told was: {told}"
    expected = place.expected(command, hidden)
    if "split.json" in told and not hidden:
        found, expected = (without(data, "split", "splits") for data in (found, expected))
        hidden = frozenset("a")
    if without(found, "warnings") != without(expected, "warnings"):
        return f"FAULT: other numbers, and told was: {told}"
    return "left out with a warning" if hidden else "the same"


def is_named(damage: Damage, text: str, run: str | None = None) -> bool:
    """Whether a damaged file (of this run) is named: by its path, or its folder's and its name."""
    paths = [path for path in damage.contents if run in (None, path.parent.name)]
    return "\n" not in text.strip() * (run is None) and any(str(p.parent) in text and p.name in text for p in paths)


def without(value: Any, *keys: str) -> Any:
    if isinstance(value, dict):
        return {key: without(one, *keys) for key, one in value.items() if key not in keys}
    return [without(one, *keys) for one in value] if isinstance(value, list) else value


def without_times(value: Any) -> Any:
    return without(value, "seconds", "phase_seconds", "files", "digest")


@pytest.mark.parametrize("command", FILES)
def test_damage_is_named_or_changes_nothing(command: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_pictures(monkeypatch)
    outcomes: Counter[str] = Counter()
    faults = []
    for number in range(CASES):
        used, file = PAIRS[number % len(PAIRS)]
        if used != command:
            continue
        rng = random.Random(f"{SEED} {number}")
        damage = next(damages(place.root / file, rng))
        outcome = outcome_of(place, command, damage)
        outcomes[outcome.partition(":")[0]] += 1
        if outcome.startswith("FAULT"):
            faults.append(f"case {number}, {file}, {damage.kind}: {outcome[:300]}")
    print(f"{command}: {dict(outcomes)}")
    assert not faults, "\n".join(faults)


def test_the_damaged_runs_are_worth_it(place: Place) -> None:
    """Else nothing could be seen in them."""
    assert [line["phase"] for line in read_metrics(place.root / "runs/a")] == ["head", "head", "edit"]
    assert place.expected("report")["groups"][0]["seeds"] == [1, 2] and not place.expected("report")["warnings"]
    assert place.search()["arms"][0]["chosen"] == {"phases.0.local.lr": 0.5}
    assert (place.root / CHOSEN / "result.json").exists() and len(place.search()["arms"][0]["seeds"]) == 2
