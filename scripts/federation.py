"""A federation on this machine, beside its simulation: both end in the same model.

python scripts/federation.py

Makes certificates and keys, starts a SuperLink, and five nodes with their relays, each with a fifth of the digits. Runs
five rounds of the head and five of a sparse edit over them. All processes end with this one.
"""

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedsieve.cli.arguments import new_folder
from fedsieve.config.experiment_file import load_experiment
from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from fedsieve.experiment.export_split import export_split
from fedsieve.federation.loopback import Loopback
from fedsieve.observe.progress import ProgressBar

CHANGES = ["clients.count=5", "clients.fraction=1.0", "phases.0.rounds=5", "phases.1.rounds=5"]
PRESET = "digits-edit-iid"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all processes end
    out, terminal = new_folder("federation"), Console(highlight=False)
    experiment = load_experiment(PRESET, CHANGES)
    terminal.print(f"{PRESET} {' '.join(CHANGES)}\nthe simulation, in one process")
    results = {"simulation": timed(terminal, experiment, out / "simulation")}
    with tempfile.TemporaryDirectory() as place:
        shards = Path(place) / "shards"
        export_split(experiment, shards)
        started = time.monotonic()
        with Loopback(shards) as federation:
            federation.start()
            count, seconds = len(federation.clients), time.monotonic() - started
            terminal.print(f"a SuperLink, {count} nodes and {count} relays are up after {seconds:.1f} s")
            over_flower = load_experiment(PRESET, [*CHANGES, federation.engine])
            results["federation"] = timed(terminal, over_flower, out / "federation")
    terminal.print(table(results))
    for name, (result, _) in results.items():
        terminal.print(f"{name:<10} {result['model_sha256']}", soft_wrap=True)
    same = len({result["model_sha256"] for result, _ in results.values()}) == 1
    terminal.print("the same model, to the last bit" if same else "the models differ")
    terminal.print(f"written to {out}")
    sys.exit(0 if same else 1)


def timed(terminal: Console, experiment: Experiment, folder: Path) -> tuple[dict[str, Any], float]:
    """The result of a run, and its seconds with all that comes before the first round."""
    started = time.monotonic()
    with ProgressBar(terminal) as bar:
        result = run(experiment, folder, callback=bar)
    return result, time.monotonic() - started


def table(results: dict[str, tuple[dict[str, Any], float]]) -> Table:
    found = Table(title="five clients, in one process and at five nodes")
    for column in ("", "test accuracy", "sent up", "time"):
        found.add_column(column, justify="right" if column else "left")
    for name, (result, seconds) in results.items():
        bytes_up = f"{result['bytes_up'] / 1e6:.1f} MB"
        found.add_row(name, f"{result['test_accuracy']:.1%}", bytes_up, f"{seconds:.1f} s")
    return found


if __name__ == "__main__":
    main()
