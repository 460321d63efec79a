"""What `fedsieve` offers to Python: an experiment is run, and a run's folder read, in one call each.

Every mistake is an InputError of one sentence, and a run that cannot go on ends with a RunError.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path, PurePath
from typing import Any

from torch import nn

from fedsieve.config.experiment_file import experiment_name, experiment_of, validated
from fedsieve.config.model_settings import GIVEN
from fedsieve.config.resolve import absolute
from fedsieve.config.schema import Experiment
from fedsieve.context import Given
from fedsieve.engine.torch_setup import torch_as_before
from fedsieve.errors import InputError, RunError, machine_error
from fedsieve.experiment import execute
from fedsieve.model.given_module import GivenBackbone, Model, whole_module
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.export import export_run
from fedsieve.runs.model_file import load_classifier
from fedsieve.runs.read import read_experiment, read_metrics, read_result
from fedsieve.runs.same_plugins import PluginsNeededError

Folder = str | os.PathLike[str]


def run(
    experiment: str | PurePath | dict[str, Any] | Experiment,
    out: Folder,
    resume: bool = False,
    callback: Callback | None = None,
    *,
    data: Any = None,
    model: nn.Module | Model | None = None,
    plugins: Sequence[Folder] | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Run an experiment into the folder `out`, or resume it there; returns the content of result.json.

    `experiment` is a preset's name, a YAML file, a dict or an Experiment. `data` takes the place of its `data.name`:
    a torch data set of (image, label), a Hugging Face data set, or a (train, test) pair of them. `model` takes the
    place of its backbone and head: any nn.Module, with `Model(module, head="fc")` if its head is not its last Linear
    layer. Both stay as they are. `plugins` are files with parts of one's own (docs/extend.md), besides those that the
    experiment names. A run that was interrupted goes on with the same call and `resume=True`.

    A progress bar is shown in a terminal and in a notebook; `progress` False or True: never, or as lines elsewhere,
    too. With a `callback` there is none.
    """
    for name, value in {"resume": resume, "progress": False if progress is None else progress}.items():
        if not isinstance(value, bool):
            raise InputError(f"{name} is {value!r}; give True or False")
    given = Given(data, as_model(model))
    settings, folder = with_given(experiment_of(experiment, as_files(plugins)), given), as_folder(out)
    if callback is not None and not isinstance(callback, Callback):
        raise InputError(f"callback is of type {type(callback).__name__}; derive yours from fedsieve.Callback")
    if callback is not None and progress:
        raise InputError("progress and callback are both given; a callback takes the place of the progress bar")
    name = experiment_name(str(experiment)) if isinstance(experiment, str | PurePath) else "experiment"
    bar = callback_for(f"{name} into {folder}", progress) if callback is None else nullcontext(callback)
    with python_errors(), torch_as_before(), bar as events:
        return execute.run(settings, folder, resume, events, given=given)


class LoadedRun:
    """A run's folder: `experiment`, `metrics` (a dict a round) and, once it is finished, `result` and `model()`."""

    def __init__(self, path: Path) -> None:
        self.path, self.experiment = path, read_experiment(path)

    def __repr__(self) -> str:
        return f"load_run({str(self.path)!r})"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)

    @property
    def result(self) -> dict[str, Any]:
        return read_result(self.path)

    def model(self, module: nn.Module | Model | None = None) -> nn.Module:
        """The trained model, in evaluation mode; a copy of `module`, if that is what the run was given."""
        read_result(self.path)  # only a finished run has a model
        classifier = load_classifier(self.path, as_model(module))
        if isinstance(classifier.backbone, GivenBackbone):
            return whole_module(classifier.backbone, classifier.head).eval()
        return classifier

    def evaluate(
        self, data: Any = None, model: nn.Module | Model | None = None, plugins: Sequence[Folder] | None = None
    ) -> dict[str, dict[str, float | None]]:
        """Score the model again; returns each figure with the one that the run recorded.

        `data`, `model` and `plugins` are those that the run was given.
        """
        with python_errors(), torch_as_before():
            files, given = as_files(plugins), Given(data, as_model(model))
            return execute.evaluate_run(self.path, plugins=files, given=given)

    def export(
        self,
        to: Folder,
        data: Any = None,
        model: nn.Module | Model | None = None,
        plugins: Sequence[Folder] | None = None,
    ) -> str:
        """Write the model to a new folder, as `fedsieve export` does; returns a line on how to load it.

        A module that the run was given keeps its own names of tensors.
        """
        with python_errors():
            return export_run(self.path, as_folder(to), (), as_model(model), Given(data).dataset, as_files(plugins))


def load_run(path: Folder) -> LoadedRun:
    """Open the folder of a run, finished or not."""
    return LoadedRun(as_folder(path))


# ------------------------------------------------------------------------------------------------------- arguments


def as_folder(path: Folder) -> Path:
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise InputError(f"a folder is expected, as text or a Path, and not {str(path)!r} ({type(path).__name__})")
    return as_path(path)


def as_files(paths: Sequence[Folder] | None) -> list[Path]:
    if paths is None:
        return []
    if isinstance(paths, str | os.PathLike):
        raise InputError(f"plugins is one path, {str(paths)!r}; give a list of them")
    if not isinstance(paths, Iterable):
        raise InputError(f"plugins is of type {type(paths).__name__}; give a list of paths")
    return [as_path(path) for path in paths]


def as_path(path: Folder) -> Path:
    """The path, with its ~ resolved; InputError if there can be none of this name."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise InputError(f"a path is expected, as text or a Path, and not {path!r} ({type(path).__name__})")
    absolute(os.fspath(path))
    return Path(path).expanduser()


def as_model(model: nn.Module | Model | None) -> Model | None:
    return model if model is None or isinstance(model, Model) else Model(model)


def with_given(experiment: Experiment, given: Given) -> Experiment:
    """The experiment, which says what was given; what a publication measured for it (`expect`) holds no longer."""
    settings = experiment.model_dump(mode="json")
    if given.data is not None:
        settings["data"] |= {"name": "given", "path": None}
    if given.model is not None:
        settings["model"]["backbone"] = f"{GIVEN} {type(given.model.module).__name__}, head {given.model.head}"
    if given.data is not None or given.model is not None:
        settings["expect"] = None
    return validated(Experiment, settings)


@contextmanager
def callback_for(title: str, progress: bool | None) -> Iterator[Callback]:
    """The progress bar, where it can be seen or is asked for."""
    from rich.console import Console

    from fedsieve.observe.progress import ProgressBar

    console = Console(highlight=False, markup=False)  # paths and class names may hold brackets
    if progress or (progress is None and (console.is_terminal or console.is_jupyter)):
        with ProgressBar(console, title) as bar:
            yield bar
    else:
        yield Callback()


@contextmanager
def python_errors() -> Iterator[None]:
    """Errors as Python's users meet them: no names of options, and RunError for a machine's errors."""
    try:
        yield
    except PluginsNeededError as error:
        error.args = (f"{error.what}; add plugins={error.copies}",)
        raise
    except (InputError, RunError) as error:
        error.args = (str(error).replace("--resume", "resume=True").replace("--out ", "").replace("--to ", ""),)
        raise
    except Exception as error:
        if (known := machine_error(error)) is not None:
            raise known from error
        if isinstance(error, OSError):
            raise RunError(str(error)) from error
        raise
