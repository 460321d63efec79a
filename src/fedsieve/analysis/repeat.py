"""One experiment from several seeds: a run for each, and what they say together."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsieve.analysis.statistics import LEVEL, Interval, interval
from fedsieve.config.schema import Experiment
from fedsieve.data.manifest import read_federation
from fedsieve.data.pictures import shown
from fedsieve.errors import InputError
from fedsieve.experiment import run
from fedsieve.files.atomic import write_text
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.folder import RunFolder, settled
from fedsieve.runs.read import FIGURES


def repeat(
    experiment: Experiment, folder: Path, count: int, resume: bool = False, callback: Callback | None = None
) -> list[dict[str, Any]]:
    """Run the experiment with the seeds seed, seed + 1, … into `folder`/seed-N; what their result.json say.

    With `resume`, finished runs are read, an unfinished one goes on, and missing ones are run.
    """
    callback = callback or Callback()
    if experiment.seed + count > 2**63:  # the limit of `seed`
        raise InputError(f"--seeds {count} from seed {experiment.seed} on ends above {2**63 - 1}; use a lower seed")
    refuse_unless_any_seed(experiment, count)
    refuse_unless_ours(folder, experiment, resume)
    results = []
    for number, (seeded, place) in enumerate(seeded_runs(experiment, folder, count), start=1):
        callback.repetition(number, count)
        results.append(run(seeded, place, resume, callback))
    write_text(folder / "seeds.json", json.dumps(summary(results), indent=2, allow_nan=False) + "\n")
    return results


def seeded_runs(experiment: Experiment, folder: Path, count: int) -> list[tuple[Experiment, Path]]:
    """The experiment with each of its seeds, and the folder for it."""
    seeds = range(experiment.seed, experiment.seed + count)
    return [(with_seed(experiment, seed), folder / f"seed-{seed}") for seed in seeds]


def with_seed(experiment: Experiment, seed: int) -> Experiment:
    return experiment.model_copy(update={"seed": seed})


def refuse_unless_any_seed(experiment: Experiment, count: int) -> None:
    """InputError if a federation's data are those of one seed, and there are several."""
    settings = experiment.federation
    if count < 2 or settings is None or settings.manifest is None:
        return
    federation = read_federation(Path(settings.manifest))
    if "seed" in federation.made_for:
        seed = shown(str(federation.made_for["seed"]))[:40]
        raise InputError(
            f"{count} seeds are asked for, and the federation's data were split for seed {seed}; use that one, or "
            "remove made_for from the manifest"
        )


def refuse_unless_ours(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Every run that is there is looked at before the first seed runs, not when its turn comes hours later."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"--out {folder} is a file; give the name of a new folder")
    names = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")} - {"seeds.json"}
    if "experiment.yaml" in names:
        raise InputError(f"--out {folder} holds a single run, not one for each seed; give another folder")
    found = {name: re.fullmatch(r"seed-(\d+)", name) for name in names}
    if not all(found.values()):
        raise InputError(f"--out {folder} holds something else than runs over seeds; give the name of a new folder")
    for name, match in found.items():
        assert match is not None
        RunFolder(folder / name, settled(with_seed(experiment, int(match[1])), folder / name, resume=True), resume=True)
    if names and not resume:
        raise InputError(
            f"--out {folder} holds runs of this experiment already; add --resume to keep what is finished and go on "
            "with the rest, or give another folder"
        )


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What seeds.json says: of each figure the values in the order of the seeds, their mean and its interval."""
    figures: dict[str, Any] = dict.fromkeys(FIGURES)
    for name, mean in means(results).items():
        values = [result[name] for result in results]
        figures[name] = {"mean": mean.mean, "low": mean.low, "high": mean.high, "values": values}
    return {"level": LEVEL, "seeds": [result["seed"] for result in results], **figures}


def means(results: Sequence[Mapping[str, Any]]) -> dict[str, Interval]:
    """Mean and interval of each figure that all results have: none of test accuracy, say, with `test: never`."""
    known = [name for name in FIGURES if all(result[name] is not None for result in results)]
    return {name: interval([result[name] for result in results]) for name in known}
