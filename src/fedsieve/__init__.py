"""Federated sparse fine-tuning of pretrained vision models.

import fedsieve
fedsieve.run("digits-iid", "runs/mine")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedsieve.errors import InputError, RunError

if TYPE_CHECKING:
    from fedsieve.config.decorators import (
        aggregator,
        callback,
        dataset,
        method,
        rule,
        schedule,
        selection,
        server_optimizer,
        split,
    )
    from fedsieve.config.experiment_file import load_experiment, parse_experiment
    from fedsieve.config.settings import Settings
    from fedsieve.experiment.api import load_run, run
    from fedsieve.model.given_module import Model
    from fedsieve.observe.callbacks import Callback
    from fedsieve.sieve.adamw import SparseAdamW
    from fedsieve.sieve.calibrate import calibrate
    from fedsieve.sieve.mask import Mask
    from fedsieve.sieve.sgdm import SparseSGDM

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "InputError",
    "Mask",
    "Model",
    "RunError",
    "Settings",
    "SparseAdamW",
    "SparseSGDM",
    "aggregator",
    "calibrate",
    "callback",
    "dataset",
    "load_experiment",
    "load_run",
    "method",
    "parse_experiment",
    "rule",
    "run",
    "schedule",
    "selection",
    "server_optimizer",
    "split",
]

DECORATORS = (
    "rule",
    "method",
    "aggregator",
    "server_optimizer",
    "selection",
    "split",
    "schedule",
    "dataset",
    "callback",
)
PLACES = {
    **dict.fromkeys(DECORATORS, "config.decorators"),
    "Callback": "observe.callbacks",
    "Settings": "config.settings",
    "Mask": "sieve.mask",
    "SparseAdamW": "sieve.adamw",
    "Model": "model.given_module",
    "SparseSGDM": "sieve.sgdm",
    "calibrate": "sieve.calibrate",
    "load_experiment": "config.experiment_file",
    "load_run": "experiment.api",
    "parse_experiment": "config.experiment_file",
    "run": "experiment.api",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `fedsieve --help` need not wait for torch."""
    if name not in PLACES:
        raise AttributeError(f"module 'fedsieve' has no attribute '{name}'")
    return getattr(import_module(f"fedsieve.{PLACES[name]}"), name)
