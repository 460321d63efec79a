"""What a Ray actor does: the same as a worker process, on any machine. It writes nothing but the cache.

Its methods return plain data. An error that should be told to the user is returned as `{"failed": …}`.
"""

import hashlib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedsieve.config.experiment_file import parse_experiment
from fedsieve.config.plugins import activate, active, are_active
from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.data.load import Dataset, Samples, load
from fedsieve.engine.client_runtime import ClientRuntime
from fedsieve.engine.kept import Enclosure, KeptInJob
from fedsieve.engine.node_facts import facts, versions
from fedsieve.engine.tensor_bytes import TensorBytes, all_from_bytes, all_to_bytes, from_bytes, to_bytes
from fedsieve.engine.torch_setup import configure_torch
from fedsieve.errors import InputError
from fedsieve.federate.blame import reason_of
from fedsieve.federate.types import Job
from fedsieve.files.memory import keep_freed_memory
from fedsieve.model.given_module import Model
from fedsieve.observe.callbacks import Callback
from fedsieve.observe.profile import stopwatch
from fedsieve.phase import plan
from fedsieve.runs.model_file import classifier_from, parts_of
from fedsieve.sieve.mask import Mask

PARTS = [f"{part} {what}" for part in ("train", "test") for what in ("images", "labels")]


@dataclass(frozen=True)
class Setup:
    """What every actor of a run is told."""

    experiment: str  # YAML
    plugins: dict[str, str]  # their texts, by path


@dataclass(frozen=True)
class Start:
    """What a run starts from. What is large lies in the object store, once for each node."""

    parts: dict[str, Any]  # of the model, from which an equal one is made
    weights: Any  # a reference to the flat vector
    given: Any  # a reference to the module that was given from Python, or None
    classes: list[str]
    data: dict[str, Any] = field(default_factory=dict)  # references to arrays


@dataclass(frozen=True)
class Supply:
    """What the driver has for actors."""

    setup: Any  # a reference
    start: Start  # without data
    data: dict[str, Any]  # references to arrays; empty: each node loads them
    data_facts: dict[str, Any]  # what they must be


def supply(context: RunContext, ray: Any, send_data: bool) -> Supply:
    """Put the model, and data that nodes do not load themselves, into the object store."""
    experiment, data, given = context.experiment, context.data, None
    if context.given is not None:
        try:
            given = ray.put(replace(context.given, module=deepcopy(context.given.module).cpu()))
        except Exception as error:  # of code that is not ours
            what = f"the given model cannot be sent to other nodes ({error})"
            raise InputError(f"{what}; define it in a module that can be pickled, or use engine: local") from None
    start = Start(parts_of(context.classifier), ray.put(to_bytes(context.model.vector)), given, data.classes)
    is_sent = send_data or experiment.data.name == "given"
    arrays = {name: ray.put(array) for name, array in arrays_of(data).items()} if is_sent else {}
    return Supply(ray.put(setup_of(experiment)), start, arrays, facts_of(data))


def setup_of(experiment: Experiment) -> Setup:
    return Setup(experiment.to_yaml(), {plugin.path: plugin.text for plugin in active(experiment.plugins)})


def actor_on(ray: Any, node: str, cpus: int, gpus: float) -> Any:
    """The handle of a new actor on the node with this id. If it dies, Ray does nothing about it."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    made = ray.remote(ClientActor).options(
        num_cpus=cpus,
        num_gpus=gpus,
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    return made.remote()


@dataclass
class Sent:
    """An `Enclosure`, as bytes."""

    state: dict[str, TensorBytes] = field(default_factory=dict)
    mask: TensorBytes | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the mask


def sent(enclosure: Enclosure) -> Sent:
    mask = enclosure.mask
    bits = to_bytes(mask.bits) if mask is not None else None
    return Sent(all_to_bytes(enclosure.state), bits, dict(mask.shapes) if mask is not None else {})


def received(one: Sent) -> Enclosure:
    """With a state of its own, since training may write to it."""
    mask = Mask(one.shapes, from_bytes(one.mask, is_own=True)) if one.mask is not None else None
    return Enclosure(all_from_bytes(one.state, is_own=True), mask)


class ClientActor:
    """Trains clients, one at a time."""

    def __init__(self) -> None:
        self.experiment: Experiment | None = None

    def examine(self, setup: Setup) -> dict[str, Any]:
        """What this machine tells of itself."""
        try:
            return facts(self._set_up(setup))
        except Exception as error:  # a setting that another version does not know, maybe
            return {**versions(), "failed": reason_of(error)}

    def load(self, setup: Setup) -> list[Any]:
        """The data set, as this machine finds it: its classes and fingerprint, then its arrays."""
        try:
            data = load(self._set_up(setup).data)
        except Exception as error:
            return [{"failed": reason_of(error)}, *(None for _ in PARTS)]
        return [facts_of(data), *arrays_of(data).values()]

    def begin(self, setup: Setup, start: Start) -> dict[str, Any]:
        """Make a run context like the driver's."""
        import ray

        try:
            experiment = self._set_up(setup)
            arrays = dict(zip(start.data, ray.get(list(start.data.values())), strict=True))
            given: Model | None = ray.get(start.given) if start.given is not None else None
            classifier = classifier_from(start.parts, given, experiment.data.image_size)
            data = dataset_of(arrays, start.classes)
            context = RunContext(experiment, Callback(), classifier.eval(), data, given)
            context.model.vector.copy_(from_bytes(ray.get(start.weights)).to(context.device))
            self.kept = KeptInJob()
            self.runtime = ClientRuntime(context, plan(experiment, context), self.kept)
            self.said = set(context.noted)  # the driver has these notes, too
        except Exception as error:
            return {"failed": reason_of(error)}
        stopwatch.start()
        return {}

    def do(self, job: Job, published: Mapping[str, Any], enclosed: Sent | None) -> tuple[dict[str, Any], Any, Any]:
        """Do a job, with references to vectors that are new since the last one: what to say, data, and an enclosure."""
        import ray

        stopwatch.take()  # the time since the last job was idle
        answer: dict[str, Any] = {}
        data: Any = b""
        self.kept.begin(received(enclosed) if enclosed is not None else Enclosure())
        try:
            if published:
                found = ray.get(list(published.values()))
                self.runtime.take(all_from_bytes(dict(zip(published, found, strict=True))))
            done = self.runtime.do(job)
            answer, data = {"about": done.about}, np.asarray(memoryview(done.data).cast("B"))
        except Exception as error:
            answer = {"failed": reason_of(error)}
        noted = self.runtime.context.noted
        answer["seconds"] = dict(stopwatch.take())
        answer["notes"] = {topic: text for topic, text in noted.items() if topic not in self.said}
        self.said |= noted.keys()
        back = self.kept.returned
        return answer, data, sent(back) if back.state or back.mask is not None else None

    def receive(self, data: bytes) -> int:
        """How many bytes came, for measurements: they are here when this is called."""
        return len(data)

    def _set_up(self, setup: Setup) -> Experiment:
        """Once for each process."""
        if self.experiment is None:
            for path, text in setup.plugins.items():  # the driver's text, whatever a file here may say
                if not are_active([path]):
                    activate(path, text)
            self.experiment = parse_experiment(setup.experiment, "the experiment")
            configure_torch(self.experiment)
            keep_freed_memory()
        return self.experiment


def facts_of(data: Dataset) -> dict[str, Any]:
    """By which two machines can tell that they have the same data."""
    parts = (data.train, data.test)
    labels = hashlib.sha256(b"".join(part.labels.numpy().tobytes() for part in parts)).hexdigest()
    return {"images": [part.fingerprint for part in parts], "labels": labels, "classes": data.classes}


def arrays_of(data: Dataset) -> dict[str, np.ndarray]:
    parts = {"train": data.train, "test": data.test}
    arrays = [(one.images.numpy(), one.labels.numpy()) for one in parts.values()]
    return dict(zip(PARTS, (array for pair in arrays for array in pair), strict=True))


def dataset_of(arrays: Mapping[str, np.ndarray], classes: list[str]) -> Dataset:
    """From arrays in the object store, which all actors of a node read in place."""
    tensors = all_from_bytes(
        {name: TensorBytes(one.reshape(-1).view(np.uint8), str(one.dtype), one.shape) for name, one in arrays.items()}
    )
    train, test = (Samples(tensors[f"{part} images"], tensors[f"{part} labels"]) for part in ("train", "test"))
    return Dataset(train, test, classes)
