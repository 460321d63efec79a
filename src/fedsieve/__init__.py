"""Federated sparse fine-tuning of pretrained vision models.

from fedsieve import load_experiment, run
run(load_experiment("digits-iid"), Path("runs/mine"))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsieve.config.experiment_file import load_experiment, parse_experiment
    from fedsieve.experiment import run
    from fedsieve.sieve.adamw import SparseAdamW
    from fedsieve.sieve.calibrate import calibrate
    from fedsieve.sieve.mask import Mask
    from fedsieve.sieve.sgdm import SparseSGDM

__version__ = "0.1.0"
__all__ = ["Mask", "SparseAdamW", "SparseSGDM", "calibrate", "load_experiment", "parse_experiment", "run"]

PLACES = {
    "Mask": "sieve.mask",
    "SparseAdamW": "sieve.adamw",
    "SparseSGDM": "sieve.sgdm",
    "calibrate": "sieve.calibrate",
    "load_experiment": "config.experiment_file",
    "parse_experiment": "config.experiment_file",
    "run": "experiment",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `fedsieve --help` need not wait for torch."""
    if name not in PLACES:
        raise AttributeError(f"module 'fedsieve' has no attribute '{name}'")
    return getattr(import_module(f"fedsieve.{PLACES[name]}"), name)
