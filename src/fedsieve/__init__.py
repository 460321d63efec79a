"""Federated fine-tuning of pretrained vision models.

from fedsieve import load_experiment, run
run(load_experiment("digits-iid"), Path("runs/mine"))
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsieve.experiment import run
    from fedsieve.experiment_file import load_experiment, parse_experiment

__version__ = "0.1.0"
__all__ = ["load_experiment", "parse_experiment", "run"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `fedsieve --help` need not wait for torch."""
    if name in ("load_experiment", "parse_experiment"):
        from fedsieve import experiment_file

        return getattr(experiment_file, name)
    if name == "run":
        from fedsieve.experiment import run

        return run
    raise AttributeError(f"module 'fedsieve' has no attribute '{name}'")
