"""Unfinished runs with a damaged file: resumed, they end in the same model and metrics, or in one line that names it.

FEDSIEVE_DAMAGE_CASES=2000 pytest tests/runs/test_damage_unfinished.py    (of each of the three runs a third)
"""

import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from damage import Damage, damages
from fedsieve.analysis.phase_mask import calibrate_phase
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError, RunError
from fedsieve.experiment import run
from listeners import interrupt

CASES = int(os.environ.get("FEDSIEVE_DAMAGE_CASES", "150"))
SEED = int(os.environ.get("FEDSIEVE_DAMAGE_SEED", "0"))
OFTEN, SELDOM = float("inf"), 1e-9  # the share of time for checkpoints: one a round, or only those that must be
BASES = {
    "in the midst of a phase with masks of clients and mixing": (
        OFTEN,
        "phases.1.mask={sparsity: 0.5, fisher: {samples: 4}}",
        "phases.*.method={fisher_mixing: {fisher: {samples: 4}}}",
        "clients.fraction=0.7",
        "wire.values=int8",
        "evaluate.keep=best",
    ),
    "before the first round of a phase with a federated mask": (
        SELDOM,
        "phases.1.mask={sparsity: 0.5, scope: federated, fisher: {samples: 4}}",
        "phases.*.method={fisher_mixing: {fisher: {samples: 4}}}",
    ),
    "in the midst of a phase with a mask from a file": (OFTEN, "phases.1.mask={file: FILE}"),
}


SMALL = (
    "clients.count=3",
    "clients.fraction=1.0",
    "phases.0.rounds=1",
    "phases.0.optimizer_state=carry",
    "phases.1.rounds=3",
    "phases.1.train={blocks: [2], head: true}",
    "phases.1.optimizer_state=carry",
    "phases.1.local.steps=1",
)


@dataclass(frozen=True)
class Base:
    """An interrupted run, and what it ends in if nothing is damaged."""

    experiment: Experiment
    folder: Path
    outcome: tuple[str, list[dict]]

    def files(self) -> list[Path]:
        found = (path for path in self.folder.rglob("*") if path.is_file() and path.name != ".lock")
        return sorted(path.relative_to(self.folder) for path in found)


def outcome(out: Path) -> tuple[str, list[dict]]:
    """The model's hash, and the metrics less what is measured in seconds."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"]
    return json.loads((out / "result.json").read_text())["model_sha256"], lines


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def base(request: pytest.FixtureRequest, experiment: Callable[..., Experiment], tmp_path: Path, monkeypatch) -> Base:
    share, *overrides = BASES[request.param]
    monkeypatch.setattr("fedsieve.runs.folder.CHECKPOINT_SHARE", share)
    monkeypatch.setattr("os.fsync", lambda _: None)  # no power is cut here, and waiting for disks takes minutes
    if any("FILE" in override for override in overrides):
        mask = calibrate_phase(experiment(*SMALL, "phases.1.mask={sparsity: 0.5, rule: random}"), tmp_path / "mask")
        mask.save(tmp_path / "mask.safetensors")
        overrides = [override.replace("FILE", str(tmp_path / "mask.safetensors")) for override in overrides]
    settings = experiment(*SMALL, *overrides)
    run(settings, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "run", callback=interrupt(3 if share is OFTEN else 2))
    return Base(settings, tmp_path / "run", outcome(tmp_path / "whole"))


def cases(base: Base, count: int, rng: random.Random) -> Iterator[tuple[Path, Callable[[Path], Damage]]]:
    """Files to damage, each as often as any other, and how."""
    files: list[Path] = []
    for _ in range(count):
        if not files:
            files = rng.sample(base.files(), len(base.files()))
        yield files.pop(), lambda path: next(damages(path, rng))


def resumed(base: Base, out: Path, damage: Damage) -> str:
    """How a run ends after damage to its folder; an AssertionError if it may not."""
    damage.apply()
    before = contents(out)
    try:
        run(base.experiment, out, resume=True)
    except (InputError, RunError) as error:
        assert len(str(error).splitlines()) == 1
        assert any(str(place) in str(error) for path in damage.contents for place in (path, path.parent)), str(error)
        assert contents(out) == before, "the folder was changed"
        return "refused"
    assert outcome(out) == base.outcome, "the outcome differs"
    return "healed"


@pytest.mark.parametrize("base", BASES, indirect=True)
def test_a_damaged_file_is_healed_or_named(base: Base, tmp_path: Path) -> None:
    rng, counts, wrong = random.Random(SEED), Counter[str](), []
    for number, (file, damaged) in enumerate(cases(base, -(-CASES // len(BASES)), rng)):
        out = tmp_path / "damaged"
        shutil.copytree(base.folder, out)
        damage = damaged(out / file)
        try:
            ended = resumed(base, out, damage)
        except Exception as error:
            ended = "wrong"
            wrong.append(f"case {number}: {file}, {damage.kind}: {type(error).__name__}: {error}")
        counts[f"{ended}: {kind_of(file)}"] += 1
        shutil.rmtree(out)
    print(*(f"{count:5} {what}" for what, count in sorted(counts.items())), sep="\n")
    assert not wrong, "\n".join(wrong)


def kind_of(file: Path) -> str:
    return re.sub(r"\d{6,}", "N", str(file))


@pytest.mark.parametrize("base", BASES, indirect=True)
def test_a_folder_that_is_gone_is_healed_or_named(base: Base, tmp_path: Path) -> None:
    for folder in sorted({path.parent for path in base.files()} - {Path()}):
        out = tmp_path / "damaged"
        shutil.copytree(base.folder, out)
        resumed(base, out, Damage("gone", dict.fromkeys((out / folder).iterdir())))
        shutil.rmtree(out)
