"""The settings of an experiment: frozen models, strict about types, each key with its default and its limits.

The parts are next to this file; methods, aggregators and selections have theirs in their own files.
`experiment_file.py` reads them from YAML, and docs/experiments.md explains them.
"""

import os
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, field_validator, model_validator

from fedsieve.config.client_settings import ClientSettings
from fedsieve.config.data_settings import DataSettings
from fedsieve.config.engine_settings import (
    AtSockets,
    EngineSettings,
    FederationSettings,
    OnFlower,
    OnRay,
    RaySettings,
)
from fedsieve.config.model_settings import ModelSettings, RidgeHead
from fedsieve.config.phase_settings import PhaseSettings
from fedsieve.config.refusals import ZERO_SUM_REFUSES, refusals_of
from fedsieve.config.registry import Registry
from fedsieve.config.resolve import absolute, workers_allowed
from fedsieve.config.settings import Count, FromList, Processes, Repeats, Settings, Share, option
from fedsieve.config.wire_settings import WireSettings
from fedsieve.errors import InputError
from fedsieve.federate.aggregators import AGGREGATORS
from fedsieve.federate.local_optimizers import LOCAL_OPTIMIZERS
from fedsieve.federate.methods import METHODS
from fedsieve.federate.server_optimizers import SERVER_OPTIMIZERS

_cuda_by_another_name = BeforeValidator(lambda value: "cuda" if value == "gpu" else value)
_one_is_a_list = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


class EvaluateSettings(Settings):
    every: Repeats = 1
    sample: Count | None = None
    test: Literal["end", "each", "never"] = "end"
    keep: Literal["last", "best"] = "last"
    clients: bool = False


class AnalyzeSettings(Settings):
    level: Literal["none", "basic", "blocks"] = "basic"


class ExpectSettings(Settings):
    """What a publication reports for this experiment: `fedsieve reproduce` shows it beside the result."""

    source: str
    metric: Literal["test_accuracy", "val_accuracy"] | None = None  # what it measured, if it gives no figure
    test_accuracy: Share | None = None
    val_accuracy: Share | None = None
    assumed: str | None = None  # what the publication leaves open or contradicts, and what was assumed


SLOTS: dict[str, Registry] = {  # of a phase, by key
    "method": METHODS,
    "aggregate": AGGREGATORS,
    "server_optimizer": SERVER_OPTIMIZERS,
    "local.optimizer": LOCAL_OPTIMIZERS,
}

Tracker = Literal["tensorboard", "wandb", "mlflow"]


class Experiment(Settings):
    """The whole file."""

    seed: int = Field(42, ge=0, lt=2**63)
    device: Annotated[Literal["auto", "cpu", "cuda"], _cuda_by_another_name] = "auto"
    workers: Processes | Literal["auto"] = "auto"  # processes that run clients; changes no result
    threads: Processes | Literal["auto"] = "auto"  # of each of them; the last bits of results depend on it
    engine: EngineSettings = "local"  # where these processes are; changes no result
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    clients: ClientSettings = ClientSettings()
    phases: Annotated[tuple[PhaseSettings, ...], FromList] = ()
    wire: WireSettings = WireSettings()
    analyze: AnalyzeSettings = AnalyzeSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    track: Annotated[tuple[Tracker, ...], FromList, _one_is_a_list] = ()
    plugins: Annotated[tuple[str, ...], FromList, _one_is_a_list] = ()  # users' Python files with parts of their own
    expect: ExpectSettings | None = None

    @field_validator("workers", "threads", mode="before")
    @classmethod
    def _is_a_number_of_them(cls, number: Any) -> Any:
        if number != "auto" and (isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 1024):
            raise ValueError("use auto or a whole number from 1 to 1024")
        return number

    @model_validator(mode="after")
    def _is_consistent(self) -> "Experiment":
        names = [phase.name for phase in self.phases]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two phases are called '{repeated[0]}'; give each its own name")
        if not self.phases and not isinstance(self.model.head, RidgeHead):
            raise ValueError("there is nothing to do: give at least one phase, or a ridge head")
        if "ridge" in names and isinstance(self.model.head, RidgeHead):
            raise ValueError("a ridge head is solved in a phase called 'ridge'; give yours another name")
        is_validated = self.data.validation or self.clients.holdout
        if self.evaluate.keep == "best" and not is_validated:
            raise ValueError(
                "evaluate.keep: best needs validation data; set data.validation or clients.holdout above 0"
            )
        if self.data.name in ("folder", "npz") and self.data.path is None and self.federation is None:
            raise ValueError(f"data.name: {self.data.name} needs data.path, the place where the images lie")
        if any(phase.stop for phase in self.phases) and not is_validated:
            raise ValueError(
                "phases.*.stop goes by validation accuracy; set data.validation or clients.holdout above 0"
            )
        if self.device == "cuda" and self.on_ray is not None and not self.on_ray.gpus_per_client:
            raise ValueError(
                "device: cuda on Ray needs to know how much of a GPU a client takes; set engine.ray.gpus_per_client to "
                "1, or to a part of one such as 0.25"
            )
        if self.device == "cpu" and self.on_ray is not None and self.on_ray.gpus_per_client:
            raise ValueError("engine.ray.gpus_per_client is for GPUs, and device is cpu; use device: cuda, or 0 GPUs")
        self._parts_combine()
        self._can_be_summed_in_secret()
        return self

    @property
    def on_ray(self) -> RaySettings | None:
        """How clients run on Ray; None: they run on this machine."""
        return self.engine.ray if isinstance(self.engine, OnRay) else None

    @property
    def federation(self) -> FederationSettings | None:
        """How clients are reached that have their own data; None: all data are here."""
        engine = self.engine
        return (
            engine.flower if isinstance(engine, OnFlower) else engine.sockets if isinstance(engine, AtSockets) else None
        )

    def _parts_combine(self) -> None:
        """Check that the parts of each phase go with each other and with its settings. Default parts go with all."""
        for number, phase in enumerate(self.phases):
            for key, registry in SLOTS.items():
                chosen = attrgetter(key)(phase)
                if (name := option(chosen)) == registry.default:
                    continue
                for refusal in refusals_of(registry[name]):
                    if refusal.applies(phase, self.clients):
                        what = f"phases.{number}.{key}: {name} does not go with {refusal.what}"
                        raise ValueError(f"{what}: {refusal.why}")

    def _can_be_summed_in_secret(self) -> None:
        """Check what `secure: zero_sum` needs of the other settings."""
        if self.clients.zero_sum is None:
            return
        for refusal in ZERO_SUM_REFUSES:
            for number, phase in enumerate(self.phases):
                if refusal.applies(phase, self.clients):
                    what = f"clients.secure: zero_sum does not go with phases.{number}.{refusal.what}"
                    raise ValueError(f"{what}: {refusal.why}")
        if isinstance(self.model.head, RidgeHead):
            raise ValueError("clients.secure: zero_sum does not hide the sums of model.head: ridge; use linear or mlp")
        if self.wire.values != "float32" or self.wire.compress:
            raise ValueError(
                "clients.secure: zero_sum sends noise in 64 bits that nothing makes smaller; use wire.values: float32 "
                "and wire.compress: false"
            )

    def resolved(self) -> "Experiment":
        """The same experiment with every `auto` and every open default replaced by a value."""
        device = self.device
        if self.on_ray is not None:  # GPUs are found at the nodes
            device = "cuda" if self.on_ray.gpus_per_client else "cpu"
        elif device != "cpu":
            import torch

            found = torch.cuda.is_available()
            if device == "cuda" and not found:
                raise InputError("device: cuda is asked for, but torch finds no CUDA device; use cpu or auto")
            device = "cuda" if found else "cpu"
            if found and self.precision == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
                raise InputError("precision: bfloat16 is asked for, but this CUDA device does not have it; use float32")
        size = self.data.image_size or (32 if self.model.backbone == "pico" else 64)
        data = self.data.model_copy(update={"image_size": size, "path": absolute(self.data.path)})
        backbone = self.model.backbone
        if backbone != "pico" and not self.model.is_given and Path(absolute(backbone) or "").exists():
            backbone = absolute(backbone) or backbone
        model = self.model.model_copy(update={"backbone": backbone, "init": absolute(self.model.init)})
        phases = tuple(phase.resolved(self._optimizer_state(phase)) for phase in self.phases)
        workers, threads = self._processes(device)
        return self.model_copy(
            update={
                "device": device,
                "workers": workers,
                "threads": threads,
                "data": data,
                "model": model,
                "phases": phases,
                "plugins": tuple(absolute(path) or path for path in self.plugins),
            }
        )

    def _optimizer_state(self, phase: PhaseSettings) -> str:
        """Whether momentum is carried, where a phase leaves it open."""
        name = option(phase.method)
        is_unknown = name not in METHODS  # a plugin's that is not loaded
        may_carry = name == METHODS.default or is_unknown or METHODS[name].carries
        return "carry" if self.clients.count == 1 and may_carry else "reset"

    def _processes(self, device: str) -> tuple[int | Literal["auto"], int]:
        """Workers, and threads of each: as many workers as there are cores, or GPUs, at most one per client of a round.

        Each of several clients trains on one thread, however many cores there are: the last bits of results depend on
        the number of threads, and clients in parallel are faster than one after another on all cores.
        """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        in_a_round = self.clients.count if isinstance(self.model.head, RidgeHead) else self.clients.per_round
        threads = (1 if in_a_round > 1 else cores) if self.threads == "auto" else self.threads
        if self.on_ray is not None:  # the cluster has them, and may grow
            return self.workers, threads
        places = max(1, cores // threads)
        if device == "cuda":
            import torch

            places = torch.cuda.device_count()
        workers = min(workers_allowed(places), in_a_round) if self.workers == "auto" else self.workers
        return workers, threads

    def same_outcome(self, other: "Experiment") -> bool:
        """Whether the other experiment ends in the same model, to the bit, if plugins of the same name are the same."""
        mine, others = (one.outcome().model_dump(mode="json") for one in (self, other))  # parts may not be loaded
        return mine == others

    def outcome(self) -> "Experiment":
        """Only what the model depends on, so no engine, workers, trackers, expected figures, or folders of plugins."""
        names = tuple(sorted(Path(path).name for path in self.plugins))
        return self.model_copy(update={"workers": 1, "engine": "local", "track": (), "expect": None, "plugins": names})

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=110)
