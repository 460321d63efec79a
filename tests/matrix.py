"""How methods, aggregators, optimizers, masks and secure sums combine: all combinations, and pairwise coverage.

`make matrix` runs every combination that is allowed; the test suite runs a few that together have every allowed pair.
"""

import itertools
from copy import deepcopy
from typing import Any

from pydantic import ValidationError

from fedsieve.config.schema import Experiment

Settings = dict[str, Any]
SENSITIVE = {"sparsity": 0.7, "calibration_rounds": 1, "fisher": {"samples": 4}}
RANDOM = {"sparsity": 0.7, "rule": "random"}

CHOICES: dict[str, dict[str, Settings]] = {  # what each name changes in the phase, or (secure, wire) in the experiment
    "method": {
        "fedavg": {},
        "fedprox": {"method": {"fedprox": {"mu": 0.5}}},
        "scaffold": {"method": "scaffold"},
        "fednova": {"method": "fednova"},
        "fisher_mixing": {"method": {"fisher_mixing": {"fisher": {"samples": 4}}}},
    },
    "aggregate": {
        "mean": {},
        "active": {"aggregate": "active"},
        "median": {"aggregate": "median"},
        "trimmed_mean": {"aggregate": {"trimmed_mean": {"share": 0.3}}},
    },
    "server optimizer": {
        "sgd": {},
        "momentum": {"server_optimizer": {"sgd": {"lr": 0.5, "momentum": 0.9}}},
        "adam": {"server_optimizer": "adam"},
        "yogi": {"server_optimizer": "yogi"},
        "adagrad": {"server_optimizer": "adagrad"},
    },
    "local optimizer": {
        "sgd": {"momentum": 0.0},
        "momentum": {},
        "nesterov": {"nesterov": True},
        "momentum carried": {"optimizer_state": "carry"},
        "adamw": {"optimizer": "adamw"},
        "adamw carried": {"optimizer": "adamw", "optimizer_state": "carry"},
    },
    "mask": {
        "none": {},
        "own, once": {"mask": {**SENSITIVE, "dense": ["head"]}},
        "own, each round": {"mask": {**RANDOM, "refresh": "round"}},
        "own, each epoch": {"mask": {**RANDOM, "refresh": "epoch", "momentum": "carry"}},
        "own, leaking": {"mask": {**RANDOM, "refresh": "round", "momentum": "leak"}},
        "federated": {"mask": {**SENSITIVE, "scope": "federated"}},
        "server, rows": {"mask": {"sparsity": 0.7, "rule": "largest_magnitude", "unit": "row", "scope": "server"}},
        "server, tensors, each round": {"mask": {**RANDOM, "unit": "tensor", "refresh": "round", "scope": "server"}},
    },
    "secure": {"none": {}, "zero_sum": {"secure": "zero_sum"}},
}
LOCAL = ("momentum", "nesterov", "optimizer")  # keys of `local`
Combination = tuple[str, ...]  # a name from each of CHOICES


def all_combinations() -> list[Combination]:
    return list(itertools.product(*CHOICES.values()))


def settings_of(combination: Combination, base: Settings) -> Settings:
    """The experiment `base`, which has one phase, with a combination's changes."""
    settings = deepcopy(base)
    phase = settings["phases"][0]
    for names, name in zip(CHOICES.values(), combination, strict=True):
        for key, value in names[name].items():
            place = settings["clients"] if key == "secure" else phase["local"] if key in LOCAL else phase
            place[key] = value
    return settings


def refusal(settings: Settings) -> str | None:
    """Why an experiment is refused; None if it is allowed."""
    try:
        Experiment.model_validate(settings)
    except ValidationError as error:
        (problem,) = error.errors()
        return str(problem["ctx"]["error"])
    return None


def pairs_of(combination: Combination) -> set[tuple[int, str, int, str]]:
    named = list(enumerate(combination))
    return {(i, one, j, other) for (i, one), (j, other) in itertools.combinations(named, 2)}


def covering(allowed: list[Combination]) -> list[Combination]:
    """A few combinations that together have every pair that some allowed one has, found greedily."""
    numbers: dict[tuple[int, str, int, str], int] = {}
    bits = {one: sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs_of(one)) for one in allowed}
    missing, chosen = (1 << len(numbers)) - 1, list[Combination]()
    while missing:
        chosen.append(max(allowed, key=lambda one: (bits[one] & missing).bit_count()))
        missing &= ~bits[chosen[-1]]
    return chosen
