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

from fedsieve.context import RunContext
from fedsieve.engine.torch_setup import configure_torch
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.model_file import load_classifier
from fedsieve.runs.read import read_experiment
from fedsieve.sieve.choose import choose
from fedsieve.sieve.mask import shapes_of
from fedsieve.sieve.sensitivity import sensitivity

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
    context = RunContext(experiment, Callback(), load_classifier(run))
    scope = context.model.scope("backbone")
    shapes = shapes_of(scope.named.items())

    def scored(kind: str, samples: int, seed: int) -> Tensor:
        chosen = np.random.default_rng(seed).permutation(context.training)[:samples]
        batches = [
            (context.transform.evaluation(context.data.train.images[part]), context.data.train.labels[part])
            for part in np.split(chosen, range(BATCH, samples, BATCH))
        ]
        total, count = sensitivity(
            context.classifier, scope.named, batches, kind, 1, torch.Generator().manual_seed(seed)
        )
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
    images = context.transform.evaluation(context.data.train.images[context.training[:BATCH]])
    loss = F.cross_entropy(context.classifier(images), context.data.train.labels[context.training[:BATCH]])
    gradient = torch.cat([one.flatten() for one in torch.autograd.grad(loss, scope.parameters)])
    print(f"gradient of {BATCH} samples: norm {gradient.norm():.2f}, ", end="")
    print(f"of the least sensitive tenth of the weights {gradient[mask.unpack()].norm():.4f}")


if __name__ == "__main__":
    main()
