"""Whether every preset of a report learns at all: a short run of each, and its losses as a table.

    python scripts/check_presets.py PATH/TO/cifar-100-python [--out DIR]       # about an hour on one core

Each preset runs with pico on 700 images of CIFAR-100 at 32 px, about 10 clients that all take part in each round (100
if they draw their classes, of which 20 take part if they calibrate masks), 3 rounds in each phase, at most 2 local
epochs, and batches of at most 16 images.
The table, docs/results/presets.md, has the validation loss before and after each phase, at the first learning rates
with which it falls in every phase: the preset's own (unless one is below TOO_LOW), or the next of RATES.
"""

import argparse
import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve.analysis.reproduce.scale import Scale, shrunken
from fedsieve.config.experiment_file import load_experiment, preset_names, report_of
from fedsieve.config.partition_settings import ClassesSplit
from fedsieve.config.phase_settings import PhaseSettings
from fedsieve.config.schema import Experiment
from fedsieve.config.settings import option
from fedsieve.context import RunContext
from fedsieve.engine.torch_setup import configure_torch
from fedsieve.errors import RunError
from fedsieve.experiment import run
from fedsieve.federate.selection.high_loss import HighLoss
from fedsieve.files.atomic import write_text
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.read import read_metrics

Row = tuple[str, float, float, float]  # a phase's name, its learning rate, and the validation loss before and after it
TABLE = Path(__file__).parents[1] / "docs" / "results" / "presets.md"
IMAGES, ROUNDS, EPOCHS, BATCH = 700, 3, 2, 16
SCORED_AT_ONCE = 500
RATES = ((0.1, 0.1), (0.01, 0.01), (0.1, 1.0), (0.1, 0.01), (0.01, 0.001))  # of the first phase, and of the last
TOO_LOW = 0.01  # to do anything in so few steps
CHANGE = 0.02  # of the loss; a smaller change is nothing
INTRODUCTION = f"""\
# Does every preset learn?

A short run of each preset of a report: `pico`, {IMAGES:,} images of CIFAR-100 at 32 px, about 10 clients that all take
part in each round (100 if they draw their classes, of which 20 take part if they calibrate masks), {ROUNDS} rounds in
each phase, at most {EPOCHS} local epochs, batches of at most {BATCH} images, one seed. The losses are those of the
validation images before and after each phase; chance is {math.log(100):.2f}. Learning rates below {TOO_LOW} do nothing
in so few steps. So the table shows the first of these with which the loss falls by {CHANGE} in every phase: the
preset's own rates (unless one is below {TOO_LOW}), 0.1, 0.01, then 0.1 with 1.0 or 0.01 for the last phase, then 0.01
with 0.001 (marked * if they are not the preset's own). If there are none, it shows those that end with the lowest loss.
`-literal` readings, whose head is all but frozen, are run at 0.1 only. Accuracies after so little training mean
nothing. A preset whose loss does not fall says why in `assumed`.

    python scripts/check_presets.py PATH/TO/cifar-100-python

"""


def shortened(preset: str, data: Path) -> Experiment:
    """The preset as it is checked, at its own learning rates."""
    changes = [f"data.path={data}", "model.backbone=pico", "device=cpu", "threads=1", "evaluate.test=never"]
    small = shrunken(load_experiment(preset, changes), Scale("check", images=IMAGES, image_size=32, clients=10))
    phases = tuple(_short(phase) for phase in small.phases)
    update: dict[str, Any] = {"fraction": 1.0}  # in so few rounds all take part
    split, select = small.clients.split, small.clients.select
    if isinstance(split, ClassesSplit) and split.assign == "random":
        update["count"] = load_experiment(preset).clients.count  # ten clients would draw few of the classes
        if any(phase.mask and phase.mask.looks_at_data for phase in small.phases):
            update["fraction"] = 0.2  # to calibrate a hundred masks in each epoch would take long
    if option(select) == "high_loss":
        candidates = update.get("count", small.clients.count)
        update["select"] = select.model_copy(update={"high_loss": HighLoss.Settings(candidates=candidates)})
    clients = small.clients.model_copy(update=update)
    evaluate = small.evaluate.model_copy(update={"keep": "last"})
    return small.model_copy(update={"phases": phases, "clients": clients, "evaluate": evaluate})


def _short(phase: PhaseSettings) -> PhaseSettings:
    own = phase.local
    epochs = None if own.epochs is None else min(own.epochs, EPOCHS)
    local = own.model_copy(update={"batch_size": min(own.batch_size, BATCH), "epochs": epochs})
    return phase.model_copy(update={"rounds": min(phase.rounds, ROUNDS), "local": local})


def at_rates(experiment: Experiment, first: float, last: float) -> Experiment:
    def changed(phase: PhaseSettings) -> PhaseSettings:
        rate = last if phase is experiment.phases[-1] else first
        return phase.model_copy(update={"local": phase.local.model_copy(update={"lr": rate})})

    return experiment.model_copy(update={"phases": tuple(changed(phase) for phase in experiment.phases)})


def loss_before(experiment: Experiment) -> float:
    """The validation loss of the model that the run starts from, which is the same for all with this data and model."""
    key = (experiment.seed, experiment.data, experiment.model)
    if key not in known_losses:
        resolved = experiment.resolved()
        configure_torch(resolved)
        context = RunContext(resolved, Callback())
        batches = np.array_split(context.validation, math.ceil(len(context.validation) / SCORED_AT_ONCE))
        known_losses[key] = sum(context.score("train", one, depth=0)[1] for one in batches) / len(context.validation)
    return known_losses[key]


known_losses: dict[Any, float] = {}


def losses(experiment: Experiment, out: Path) -> list[Row]:
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


def check(preset: str, data: Path, out: Path) -> list[Row]:
    """The losses of a preset at the first learning rates with which they fall, else with which they end lowest."""
    own = shortened(preset, data)
    is_too_low = any(phase.local.lr < TOO_LOW for phase in own.phases)
    tried: list[list[Row]] = []
    rates = RATES[:1] if preset.endswith("-literal") else RATES  # a literal reading has a head that is all but frozen
    for experiment in [*([] if is_too_low else [own]), *(at_rates(own, *pair) for pair in rates)]:
        try:
            tried.append(losses(experiment, out))
        except RunError:  # it diverged
            continue
        if all(before - after >= CHANGE for *_, before, after in tried[-1]):
            return tried[-1]
    return min(tried, key=lambda rows: rows[-1][-1], default=[])


def table(found: dict[str, list[Row]]) -> str:
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
