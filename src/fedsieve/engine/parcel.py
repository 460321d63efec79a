"""Objects that a caller from Python gave to a run, on their way to its worker processes.

Images and labels lie in anonymous shared memory, so that all processes use the same. A module is pickled, into that
memory: nobody but the processes of this run can have written it, and nothing of it is ever on a disk.
"""

import io
import pickle
from copy import deepcopy
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from fedsieve.context import RunContext
from fedsieve.data.load import Dataset, Samples
from fedsieve.engine.channel import SharedBuffer
from fedsieve.engine.published import PublishedVectors, VectorReader
from fedsieve.model.given_module import Model, first_line


class CannotTravelError(Exception):
    """An object that other processes cannot be given; the message says why."""


@dataclass
class Parcel:
    """What workers are given: shared memory, and what lies where in it."""

    buffer: SharedBuffer
    about: dict[str, Any]


def packed(context: RunContext) -> Parcel:
    """The data set and the module of a run, if they were given from Python: what others can load is not sent."""
    tensors, about = {}, dict[str, Any]()
    if context.given is not None:
        pickled = np.frombuffer(_pickled(context.given.module), np.uint8)
        tensors["module"], about["head"] = torch.from_numpy(pickled.copy()), context.given.head
    if context.experiment.data.name == "given":
        about["classes"] = context.data.classes
        for part in ("train", "test"):
            samples = context.samples(part)
            tensors |= {f"{part} images": samples.images, f"{part} labels": samples.labels}
    published = PublishedVectors(SharedBuffer())
    published.write(tensors)
    return Parcel(published.buffer, about | {"places": published.places})


def unpacked(buffer: SharedBuffer, about: dict[str, Any]) -> tuple[Dataset | None, Model | None]:
    """In another process: the data set and the model, if they were given."""
    tensors = VectorReader(buffer).new(about["places"])
    data = model = None
    if "classes" in about:
        train, test = (Samples(tensors[f"{part} images"], tensors[f"{part} labels"]) for part in ("train", "test"))
        data = Dataset(train, test, about["classes"])
    if "module" in tensors:
        model = Model(pickle.loads(tensors["module"].numpy().tobytes()), about["head"])
    return data, model


class _Pickler(pickle.Pickler):
    """Refuses what was defined in the script or notebook itself, since no other process could import it."""

    def reducer_override(self, one: Any) -> Any:
        if isinstance(one, type | FunctionType) and one.__module__ == "__main__":
            raise CannotTravelError(
                f"{one.__qualname__} is defined in the script or notebook itself, where worker processes cannot "
                "import it (a module of its own would be better)"
            )
        return NotImplemented


def _pickled(module: nn.Module) -> bytes:
    target = io.BytesIO()
    try:
        if any(one.device.type != "cpu" for one in module.parameters()):
            module = deepcopy(module).cpu()  # a process that has used CUDA cannot be forked
        _Pickler(target, protocol=pickle.HIGHEST_PROTOCOL).dump(module)
    except CannotTravelError:
        raise
    except Exception as error:  # of code that is not ours
        raise CannotTravelError(f"the given model cannot be pickled for workers ({first_line(error)})") from error
    return target.getvalue()
