"""How much the kinds of sensitivity agree: rank correlation, and overlap of the masks made from them.

python scripts/compare_sensitivity.py RUN

RUN is the folder of a finished run whose head is trained. Everything is compared with exact sensitivity on
1,024 samples, over the weights of the backbone.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn import functional as F

from fedsieve.experiment import configure_torch
from fedsieve.model.classifier import load_classifier
from fedsieve.observer import Observer
from fedsieve.runs.read import read_experiment
from fedsieve.sieve.choose import choose
from fedsieve.sieve.mask import shapes_of
from fedsieve.sieve.sensitivity import sensitivity
from fedsieve.workbench import Workbench

BATCH = 64
KINDS = [
    ("exact", 1024),
    ("exact", 256),
    ("exact", 64),
    ("empirical", 1024),
    ("empirical", 64),
    ("batch", 1024),
    ("batch", 64),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    experiment = read_experiment(run).resolved()
    configure_torch(experiment)
    bench = Workbench(experiment, Observer(), load_classifier(run))
    scope = bench.model.scope("backbone")
    shapes = shapes_of(scope.named.items())

    def scored(kind: str, samples: int, seed: int) -> Tensor:
        chosen = np.random.default_rng(seed).permutation(bench.training)[:samples]
        batches = [
            (bench.transform.evaluation(bench.data.train.images[part]), bench.data.train.labels[part])
            for part in np.split(chosen, range(BATCH, samples, BATCH))
        ]
        total, count = sensitivity(bench.classifier, scope.named, batches, kind, 1, torch.Generator().manual_seed(seed))
        return total / count

    reference = scored("exact", 1024, 0)
    some = torch.randperm(len(reference), generator=torch.Generator().manual_seed(0))[:1_000_000]
    print("| sensitivity | samples | rank correlation | overlap, least sensitive 10% | overlap, most sensitive 10% |")
    print("|---|---|---|---|---|")
    for kind, samples in KINDS:
        found = scored(kind, samples, 1)
        correlation = spearmanr(reference[some], found[some]).statistic
        overlaps = [
            choose(sign * reference, 0.1, shapes).overlap(choose(sign * found, 0.1, shapes)) for sign in (1, -1)
        ]
        print(f"| {kind} | {samples:,} | {correlation:.3f} | {overlaps[0]:.3f} | {overlaps[1]:.3f} |", flush=True)

    mask = choose(reference, 0.1, shapes)
    images = bench.transform.evaluation(bench.data.train.images[bench.training[:BATCH]])
    loss = F.cross_entropy(bench.classifier(images), bench.data.train.labels[bench.training[:BATCH]])
    gradient = torch.cat([one.flatten() for one in torch.autograd.grad(loss, scope.parameters)])
    print(f"gradient of {BATCH} samples: norm {gradient.norm():.2f}, ", end="")
    print(f"of the least sensitive tenth of the weights {gradient[mask.unpack()].norm():.4f}")


if __name__ == "__main__":
    main()
