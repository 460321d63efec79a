"""Pictures of runs side by side: drift by round of one phase, and accuracy against the bytes that were sent.

python scripts/plot_runs.py "IID=runs/a" "5 classes=runs/b" --phase edit --out pictures
"""

import argparse
from pathlib import Path

from fedsieve.analysis.report.plots import plot_bytes, plot_drift
from fedsieve.runs.read import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN", help="a name for the legend, and a run's folder")
    parser.add_argument("--phase", default="edit", help="whose drift is shown (default: edit)")
    parser.add_argument("--out", type=Path, default=Path(), help="where drift.png and bytes.png go")
    arguments = parser.parse_args()
    runs = {name: read_metrics(Path(run)) for name, _, run in (one.rpartition("=") for one in arguments.runs)}
    plot_drift(runs, arguments.out / "drift.png", arguments.phase)
    plot_bytes(runs, arguments.out / "bytes.png")
    print(f"written to {arguments.out / 'drift.png'} and {arguments.out / 'bytes.png'}")


if __name__ == "__main__":
    main()
