"""Experiments with their plugins loaded, for what runs them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedsieve.config.experiment_file import all_paths, load_experiment, validated
from fedsieve.config.plugins import used
from fedsieve.config.schema import Experiment


@contextmanager
def with_plugins(experiment: Experiment, plugins: Sequence[str | Path] = ()) -> Iterator[Experiment]:
    """The experiment with its plugins, and more, loaded within this context, checked now that all parts are known."""
    paths = all_paths(experiment.plugins, plugins)
    if not paths:
        yield experiment
        return
    with used(paths):
        yield validated(Experiment, {**experiment.model_dump(mode="json"), "plugins": paths}, {})


@contextmanager
def loaded(
    name_or_file: str, overrides: Sequence[str] = (), plugins: Sequence[str | Path] = ()
) -> Iterator[Experiment]:
    """`load_experiment`, with the plugins loaded within this context; errors name their line in the file."""
    with used(load_experiment(name_or_file, overrides, plugins).plugins):
        yield load_experiment(name_or_file, overrides, plugins)
