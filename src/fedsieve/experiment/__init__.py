"""Running an experiment from beginning to end."""

from fedsieve.experiment.execute import check, check_all, evaluate_run, run

__all__ = ["check", "check_all", "evaluate_run", "run"]
