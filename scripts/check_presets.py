"""Whether every preset of a report learns at all: a short run of each, and its losses as a table.

    python scripts/check_presets.py PATH/TO/cifar-100-python [--out DIR]       # about 40 minutes on one core

Each preset runs with pico on 1,000 images of CIFAR-100 at 32 px, about 10 clients (100 if they draw their classes) that
all take part in each round, and 3 rounds in each phase.
The table, docs/results/presets.md, has the validation loss before and after each phase. Where the preset's own learning
rate changes the loss by less than CHANGE in so few steps, the phase's rate is 0.1 instead, and the table says so.
"""

import argparse
import hashlib
import math
from pathlib import Path
from typing import Any

from fedsieve.config import ClassesSplit, Experiment
from fedsieve.experiment import run
from fedsieve.experiment_file import load_experiment, preset_names, report_of
from fedsieve.observer import Observer
from fedsieve.reproduce.scale import Scale, shrunken
from fedsieve.runs.atomic import write_text
from fedsieve.runs.read import read_metrics
from fedsieve.workbench import Workbench, configure_torch

TABLE = Path(__file__).parents[1] / "docs" / "results" / "presets.md"
IMAGES, ROUNDS, RATE = 1_000, 3, 0.1
CHANGE = 0.02  # of the loss; what a phase changes it by less than is nothing
INTRODUCTION = f"""\
# Does every preset learn?

A short run of each preset of a report: `pico`, {IMAGES:,} images of CIFAR-100 at 32 px, about 10 clients (100 if they
draw their classes) that all take part in each round, {ROUNDS} rounds in each phase, one seed. The losses are those of
the validation images before and after each phase; chance is {math.log(100):.2f}. Where the preset's own learning rate
changes a loss by less than {CHANGE} in so few steps, all phases have a rate of {RATE} instead (marked *). Accuracies
after so little training mean nothing. A preset whose loss does not fall says why in `assumed`.

    python scripts/check_presets.py PATH/TO/cifar-100-python

"""


def shortened(preset: str, data: Path) -> Experiment:
    """The preset as it is checked, at its own learning rates."""
    changes = [f"data.path={data}", "model.backbone=pico", "device=cpu", "threads=1", "evaluate.test=never"]
    small = shrunken(load_experiment(preset, changes), Scale("check", images=IMAGES, image_size=32, clients=10))
    phases = tuple(phase.model_copy(update={"rounds": min(phase.rounds, ROUNDS)}) for phase in small.phases)
    split, count = small.clients.split, small.clients.count
    if isinstance(split, ClassesSplit) and split.assign == "random":
        count = load_experiment(preset).clients.count  # ten clients would draw few of the classes
    clients = small.clients.model_copy(update={"fraction": 1.0, "count": count})  # in so few rounds all take part
    evaluate = small.evaluate.model_copy(update={"keep": "last"})
    return small.model_copy(update={"phases": phases, "clients": clients, "evaluate": evaluate})


def at_rate(experiment: Experiment, rate: float) -> Experiment:
    def changed(phase: Any) -> Any:
        return phase.model_copy(update={"local": phase.local.model_copy(update={"lr": rate})})

    return experiment.model_copy(update={"phases": tuple(changed(phase) for phase in experiment.phases)})


def loss_before(experiment: Experiment) -> float:
    """The validation loss of the model that the run starts from, which is the same for all with this data and model."""
    key = (experiment.seed, experiment.data, experiment.model)
    if key not in known_losses:
        resolved = experiment.resolved()
        configure_torch(resolved)
        bench = Workbench(resolved, Observer())
        score = bench.score(bench.data.train, bench.validation)
        assert score is not None
        known_losses[key] = score.loss
    return known_losses[key]


known_losses: dict[Any, float] = {}


def losses(experiment: Experiment, out: Path) -> list[tuple[str, float, float, float]]:
    """Of each phase its name, its learning rate, and the validation loss before and after it.

    Presets that differ only in what the check changes, such as their numbers of rounds, share one run.
    """
    same = experiment.model_copy(update={"expect": None})
    out = out / hashlib.sha256(same.to_yaml().encode()).hexdigest()[:16]
    run(same, out, resume=True)
    rows, before = [], loss_before(experiment)
    for phase in experiment.phases:
        after = [line["val_loss"] for line in read_metrics(out) if line["phase"] == phase.name][-1]
        rows.append((phase.name, phase.local.lr, before, after))
        before = after
    return rows


def check(preset: str, data: Path, out: Path) -> list[tuple[str, float, float, float]]:
    """The losses of a preset; at RATE if its own learning rates change any of them too little."""
    experiment = shortened(preset, data)
    rows = losses(experiment, out)
    if all(abs(before - after) >= CHANGE for *_, before, after in rows):
        return rows
    return losses(at_rate(experiment, RATE), out)


def table(found: dict[str, list[tuple[str, float, float, float]]]) -> str:
    lines = [
        *INTRODUCTION.splitlines(),
        "| preset | phase | rate | loss before | after | |",
        "|---|---|---|---|---|---|",
    ]
    for preset, rows in found.items():
        own = [phase.local.lr for phase in load_experiment(preset).phases]
        for (phase, rate, before, after), reported in zip(rows, own, strict=True):
            mark = "" if rate == reported else "*"
            falls = "" if before - after >= CHANGE else "does not fall"
            lines.append(f"| {preset} | {phase} | {rate:g}{mark} | {before:.3f} | {after:.3f} | {falls} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, metavar="CIFAR", help="the folder cifar-100-python")
    parser.add_argument("--out", type=Path, default=Path("runs/check-presets"), help="where the runs go")
    asked = parser.parse_args()
    found = {}
    for preset in (name for name in preset_names() if report_of(name)):
        found[preset] = check(preset, asked.data, asked.out)
        print(preset, *(f"{before:.3f} -> {after:.3f}" for *_, before, after in found[preset]), flush=True)
    write_text(TABLE, table(found))
    print(f"written to {TABLE}")


if __name__ == "__main__":
    main()
