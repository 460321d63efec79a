"""Federated sparse fine-tuning of pretrained vision models.

import fedsieve
fedsieve.run("digits-iid", "runs/mine")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedsieve.errors import InputError, RunError

if TYPE_CHECKING:
    from fedsieve.config.experiment_file import load_experiment, parse_experiment
    from fedsieve.experiment.api import load_run, run
    from fedsieve.model.given_module import Model
    from fedsieve.sieve.calibrate import calibrate
    from fedsieve.sieve.mask import Mask
    from fedsieve.sieve.sgdm import SparseSGDM

__version__ = "0.1.0"
__all__ = [
    "InputError",
    "Mask",
    "Model",
    "RunError",
    "SparseSGDM",
    "calibrate",
    "load_experiment",
    "load_run",
    "parse_experiment",
    "run",
]

PLACES = {
    "Mask": "sieve.mask",
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
