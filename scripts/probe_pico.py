"""What `pico` has learnt: a linear probe on its frozen features against the same network with random weights.

    python scripts/probe_pico.py --cifar PATH/TO/cifar-100-python

The probe is ridge regression in closed form; its penalty is chosen on the validation set, for each network
and data set by itself, and the test accuracy is that of the chosen one.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from fedsieve.config.experiment_file import parse_experiment
from fedsieve.experiment import run
from fedsieve.model.backbone import load_backbone
from fedsieve.model.vit import ViT, initialize

PENALTIES = (0.01, 0.1, 1, 10, 100, 1000)


def random_twin(path: Path) -> Path:
    """A checkpoint of pico's shape with weights as for training from scratch."""
    pico = load_backbone("pico", 32)
    assert isinstance(pico, ViT)
    network = ViT(pico.shape)
    initialize(network, torch.Generator().manual_seed(0))
    save_file({name: tensor.clone() for name, tensor in network.state_dict().items()}, path)
    return path


def probe(backbone: str, data: str, work: Path) -> tuple[float, float]:
    """(test accuracy, penalty) of the probe that is best on the validation set."""
    results = []
    for penalty in PENALTIES:
        experiment = parse_experiment(
            f"data: {data}\nmodel: {{backbone: {backbone}, head: {{ridge: {{penalty: {penalty}}}}}}}\n"
        )
        result = run(experiment, Path(tempfile.mkdtemp(dir=work)) / "run")
        results.append((result["val_accuracy"], result["test_accuracy"], penalty))
    _, accuracy, penalty = max(results)
    return accuracy, penalty


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, required=True)
    cifar = parser.parse_args().cifar
    table = Table("data", "pretrained", "random weights", "difference")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        twin = random_twin(work / "random.safetensors")
        for label, data in (
            ("CIFAR-100", f"{{name: cifar100, path: {cifar}, image_size: 32}}"),
            ("digits", "{name: digits, image_size: 32}"),
        ):
            (learnt, chosen), (random, other) = (probe(str(one), data, work) for one in ("pico", twin))
            cells = f"{100 * learnt:.1f}% (penalty {chosen:g})", f"{100 * random:.1f}% (penalty {other:g})"
            table.add_row(label, *cells, f"{100 * (learnt - random):+.1f} points")
    Console().print(table)


if __name__ == "__main__":
    main()
