"""The settings of an experiment: frozen models, strict about types, each key with its default and its limits.

The parts are next to this file; methods, aggregators and selections have theirs in their own files.
`experiment_file.py` reads them from YAML, and docs/experiments.md explains them.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, field_validator, model_validator

from fedsieve.config.client_settings import ClientSettings
from fedsieve.config.data_settings import DataSettings
from fedsieve.config.model_settings import ModelSettings, RidgeHead
from fedsieve.config.phase_settings import PhaseSettings
from fedsieve.config.resolve import absolute, workers_allowed
from fedsieve.config.settings import Count, FromList, Processes, Repeats, Settings, Share, option
from fedsieve.config.wire_settings import WireSettings
from fedsieve.errors import InputError
from fedsieve.federate.methods import METHODS

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


Tracker = Literal["tensorboard", "wandb", "mlflow"]


class Experiment(Settings):
    """The whole file."""

    seed: int = Field(42, ge=0, lt=2**63)
    device: Annotated[Literal["auto", "cpu", "cuda"], _cuda_by_another_name] = "auto"
    workers: Processes | Literal["auto"] = "auto"  # processes that run clients; changes no result
    threads: Processes | Literal["auto"] = "auto"  # of each of them; the last bits of results depend on it
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
        if self.evaluate.keep == "best" and self.data.validation == 0:
            raise ValueError("evaluate.keep: best needs validation data; set data.validation above 0")
        if self.data.name in ("folder", "npz") and self.data.path is None:
            raise ValueError(f"data.name: {self.data.name} needs data.path, the place where the images lie")
        self._can_be_summed_in_secret()
        return self

    def _can_be_summed_in_secret(self) -> None:
        """Check what `secure: zero_sum` needs of the other settings, so that all clients send the same weights."""
        if self.clients.zero_sum is None:
            return
        for number, phase in enumerate(self.phases):
            if not METHODS[option(phase.method)].is_hidden_by_sums:
                raise ValueError(
                    f"phases.{number}.method: {option(phase.method)} sends more than the updates that clients.secure: "
                    "zero_sum hides; use another method or secure: none"
                )
            if phase.mask is not None and not phase.mask.has_one_for_all:
                way = "refresh: round" if phase.mask.is_shared else "scope: server or federated"
                raise ValueError(
                    f"clients.secure: zero_sum adds up numbers that stand at the same places, and phases.{number}.mask "
                    f"gives clients masks of their own; use {way} there"
                )
            if phase.mask is not None and phase.mask.momentum_policy == "leak":
                raise ValueError(
                    f"clients.secure: zero_sum needs all clients to change the same weights, and with phases.{number}."
                    "mask.momentum: leak they do not; use reset or carry"
                )
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
        if device != "cpu":
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
        state = "carry" if self.clients.count == 1 else "reset"
        phases = tuple(phase.resolved(state) for phase in self.phases)
        workers, threads = self._processes(device)
        return self.model_copy(
            update={
                "device": device,
                "workers": workers,
                "threads": threads,
                "data": data,
                "model": model,
                "phases": phases,
            }
        )

    def _processes(self, device: str) -> tuple[int, int]:
        """Workers, and threads of each: as many workers as there are cores, or GPUs, at most one per client of a round.

        Each of several clients trains on one thread, however many cores there are: the last bits of results depend on
        the number of threads, and clients in parallel are faster than one after another on all cores.
        """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        in_a_round = self.clients.count if isinstance(self.model.head, RidgeHead) else self.clients.per_round
        threads = (1 if in_a_round > 1 else cores) if self.threads == "auto" else self.threads
        places = max(1, cores // threads)
        if device == "cuda":
            import torch

            places = torch.cuda.device_count()
        workers = min(workers_allowed(places), in_a_round) if self.workers == "auto" else self.workers
        return workers, threads

    def same_outcome(self, other: "Experiment") -> bool:
        """Whether the other experiment ends in the same model, to the bit."""
        return self.outcome() == other.outcome()

    def outcome(self) -> "Experiment":
        """Only what the model depends on: workers, trackers and expected figures do not matter."""
        return self.model_copy(update={"workers": 1, "track": (), "expect": None})

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=110)
