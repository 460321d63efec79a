"""Small experiments that take the fixture `experiment` further, and what a run has to agree on with another one."""

import json
from pathlib import Path

from fedsieve.runs.read import read_metrics


def edit(mask: str, local: str = "epochs: 1, batch_size: 16, lr: 0.02", more: str = "") -> str:
    mask = f"sparsity: 0.8, calibration_rounds: 2, fisher: {{samples: 20}}, {mask}"
    head = "{name: head, train: head, rounds: 1, local: {epochs: 1, batch_size: 16, lr: 0.05}}"
    return f"phases=[{head}, {{name: edit, train: backbone, rounds: 2, local: {{{local}}}, mask: {{{mask}}} {more}}}]"


def outcome(folder: Path, result: dict) -> tuple[str, str]:
    """Everything but how long it took, and the digests of files that say so."""
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in read_metrics(folder)]
    scores = {key: value for key, value in result.items() if key not in ("seconds", "phases", "files", "digest")}
    return json.dumps(lines), json.dumps(scores)
