"""The demo: the main job on embedded data, dense and sparse side by side."""

from pathlib import Path

from rich.console import Console

from fedsieve.analysis.estimate import Estimator
from fedsieve.analysis.report.plots import plot_curves
from fedsieve.analysis.report.tables import runs_table
from fedsieve.config.experiment_file import load_experiment
from fedsieve.experiment import run
from fedsieve.observe.progress import ProgressBar
from fedsieve.runs.folder import RunFolder, settled
from fedsieve.runs.read import read_metrics

RUNS = {
    "centralized, dense": "digits-central",
    "centralized, sparse": "digits-edit-central",
    "IID, dense": "digits-iid",
    "IID, sparse": "digits-edit-iid",
    "2 classes per client, dense": "digits-noniid",
    "2 classes per client, sparse": "digits-edit-noniid",
}


def run_demo(out: Path, console: Console) -> None:
    """Run the presets into `out`, print one table, draw the curves; runs of them that are there are gone on with."""
    experiments = {preset: load_experiment(preset) for preset in RUNS.values()}
    for preset, experiment in experiments.items():  # all of them first, not when their turn comes minutes later
        RunFolder(out / preset, settled(experiment, out / preset, resume=True), resume=True)
    results, estimator = {}, Estimator()
    for name, preset in RUNS.items():
        console.print(f"{name} (preset {preset})", style="bold")
        with ProgressBar(console, estimate=estimator.phases) as bar:
            results[name] = run(experiments[preset], out / preset, resume=True, callback=bar)
    console.print(runs_table(results, "pico fine-tuned on digits"))
    picture = out / "curves.png"
    plot_curves({name: read_metrics(out / preset) for name, preset in RUNS.items()}, picture)
    console.print(f"written to {out}: the runs and {picture}", soft_wrap=True)
