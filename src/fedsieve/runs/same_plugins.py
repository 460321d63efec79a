"""The plugins that a finished run was made with, when it is used again."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedsieve.config.runnable import with_plugins
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError
from fedsieve.runs.read import PLUGINS, digests_in, sha256_of


class PluginsNeededError(InputError):
    """Plugins that were not given; `copies` are in the run's folder."""

    def __init__(self, run: Path, names: Sequence[str]) -> None:
        self.what = f"{run} was made with plugins, which are executed only if you name them"
        self.copies = [str(run / PLUGINS / name) for name in names]
        super().__init__(f"{self.what}; add {' '.join(f'--plugin {copy}' for copy in self.copies)}")


@contextmanager
def with_same_plugins(
    run: Path, experiment: Experiment, recorded: Mapping[str, Any], plugins: Sequence[str | Path]
) -> Iterator[Experiment]:
    """The run's experiment with these plugins loaded within this context; InputError if they are not the run's own."""
    named = {Path(one).name: Path(one) for one in plugins}
    if missing := [name for one in experiment.plugins if (name := Path(one).name) not in named]:
        raise PluginsNeededError(run, missing)
    for name, file in named.items():
        digest = digests_in(recorded).get(f"{PLUGINS}/{name}")
        if digest is not None and file.is_file() and sha256_of(file) != digest:
            raise InputError(f"plugin {file} was changed since the run in {run} began; give it as it was")
    with with_plugins(experiment.model_copy(update={"plugins": ()}), plugins) as known:
        yield known
