"""What an experiment may say: frozen models, strict about types, each key with its default and its limits.

`experiment_file.py` reads them from YAML, and docs/experiments.md explains them.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedsieve.errors import InputError
from fedsieve.sieve.rules import BY_SENSITIVITY, RULES

FLAGSHIP = "facebook/dino-vits16"  # the backbone that all of this is about


class Settings(BaseModel):
    """A part of an experiment: unchangeable, strict about types, and helpful about misspelt keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, value: Any) -> Any:
        if isinstance(value, dict) and cls.model_config.get("extra") == "forbid":
            for key in value:
                if key not in cls.model_fields:
                    raise PydanticCustomError("unknown_key", "", {"key": str(key), "valid": list(cls.model_fields)})
        return value


FromList = Field(strict=False)  # YAML knows lists, frozen models hold tuples

# Every number has an upper limit far above those of real experiments, so that a slip is told at once, in one line.
Count = Annotated[int, Field(ge=1, le=10**8)]  # of clients, samples, steps, …
Repeats = Annotated[int, Field(ge=1, le=10**6)]  # of something long, such as a round
Side = Annotated[int, Field(ge=1, le=4096)]  # of an image, in pixels
Real = Annotated[float, Field(ge=0, le=1e38)]  # float32 can still hold it
Share = Annotated[float, Field(ge=0, le=1)]
Processes = Annotated[int, Field(ge=1, le=1024)]


def _with_defaults(*names: str) -> BeforeValidator:
    """`mlp` alone means `{mlp: {}}`."""
    return BeforeValidator(lambda value: {value: {}} if isinstance(value, str) and value in names else value)


def _alias(name: str, meant: str) -> BeforeValidator:
    return BeforeValidator(lambda value: meant if value == name else value)


_one_is_a_list = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


def _option(value: Any) -> str:
    """Which variant is meant by `linear`, `{mlp: {hidden: 512}}` or a model made from it."""
    if isinstance(value, dict):
        return str(next(iter(value), ""))
    return next(iter(type(value).model_fields)) if isinstance(value, BaseModel) else str(value)


# ---------------------------------------------------------------------------------------------- data


class CropSettings(Settings):
    scale: Annotated[tuple[Share, Share], FromList] = (0.5, 1.0)

    @field_validator("scale")
    @classmethod
    def _is_a_range(cls, scale: tuple[float, float]) -> tuple[float, float]:
        if not 0 < scale[0] <= scale[1]:
            raise ValueError("use two shares of the image's area, such as [0.5, 1.0]")
        return scale


class RandomResizedCrop(Settings):
    random_resized_crop: CropSettings


class CenterCropSettings(Settings):
    resize: Side = 256


class ResizeCenterCrop(Settings):
    resize_center_crop: CenterCropSettings


Augmentation = Annotated[
    Annotated[Literal["horizontal_flip"], Tag("horizontal_flip")]
    | Annotated[RandomResizedCrop, Tag("random_resized_crop")],
    Discriminator(_option),
    _with_defaults("random_resized_crop"),
]
EvaluateCrop = Annotated[
    Annotated[Literal["resize"], Tag("resize")] | Annotated[ResizeCenterCrop, Tag("resize_center_crop")],
    Discriminator(_option),
    _with_defaults("resize_center_crop"),
]


class DataSettings(Settings):
    name: Literal["cifar100", "digits", "folder", "npz"] = "digits"
    path: str | None = None
    image_size: Side | None = None  # None: 32 for pico, 64 for any other backbone
    limit: Count | None = None  # at most so many training images
    validation: float = Field(0.2, ge=0, lt=1)
    augment: Annotated[tuple[Augmentation, ...], FromList] = ()
    evaluate_crop: EvaluateCrop = "resize"
    normalize: Literal["dataset", "imagenet", "cifar100"] = "dataset"


# --------------------------------------------------------------------------------------------- model


class MlpSettings(Settings):
    hidden: int = Field(512, ge=1, le=10**5)


class MlpHead(Settings):
    mlp: MlpSettings


class RidgeSettings(Settings):
    penalty: Real = Field(1000.0, gt=0)


class RidgeHead(Settings):
    ridge: RidgeSettings


Head = Annotated[
    Annotated[Literal["linear"], Tag("linear")] | Annotated[MlpHead, Tag("mlp")] | Annotated[RidgeHead, Tag("ridge")],
    Discriminator(_option),
    _with_defaults("mlp", "ridge"),
]


Positions = Literal["hugging_face", "authors"]  # whose way to interpolate position embeddings


class ModelSettings(Settings):
    backbone: str = "pico"
    positions: Positions = "hugging_face"
    head: Head = "linear"
    init: str | None = None


# ------------------------------------------------------------------------------------------- clients


class IidSplit(Settings):
    kind: Literal["iid"] = "iid"


class ClassesSplit(Settings):
    kind: Literal["classes"]
    per_client: Count
    assign: Literal["even", "random"] = "even"
    per_class_limit: Count | None = None


class DirichletSplit(Settings):
    kind: Literal["dirichlet"]
    alpha: float | None = Field(None, gt=0, le=1e12)
    concentration: float | None = Field(None, gt=0, le=1e12)
    balanced: bool = True
    per_client: Count | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> "DirichletSplit":
        if self.concentration is not None and not self.balanced:
            raise ValueError("concentration belongs to balanced splits; with balanced: false give alpha instead")
        if (self.alpha is None) == (self.concentration is None):
            both = "alpha (of each class, such as 0.5) or concentration (of all classes together)"
            raise ValueError(f"give {both}, exactly one of them")
        return self


class FlwrSplit(Settings):
    """Any partitioner of flwr-datasets; the keys that are not listed here are its own arguments."""

    model_config = ConfigDict(extra="allow")
    kind: Literal["flwr"]
    partitioner: str


def _split_by_name(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


SplitSettings = Annotated[
    Annotated[IidSplit | ClassesSplit | DirichletSplit | FlwrSplit, Field(discriminator="kind")],
    BeforeValidator(_split_by_name),
]


class FisherSettings(Settings):
    """How sensitivity is measured."""

    kind: Literal["exact", "empirical", "batch"] = "exact"
    samples: Count = 512
    draws: Repeats = 1


class HighLossSettings(Settings):
    candidates: Count = 20


class HighLoss(Settings):
    high_loss: HighLossSettings


Select = Annotated[
    Annotated[Literal["uniform"], Tag("uniform")]
    | Annotated[Literal["by_size"], Tag("by_size")]
    | Annotated[HighLoss, Tag("high_loss")],
    Discriminator(_option),
    _with_defaults("high_loss"),
]


class FisherMixingSettings(Settings):
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    fisher: FisherSettings = FisherSettings()


class FisherMixing(Settings):
    fisher_mixing: FisherMixingSettings


Combine = Annotated[
    Annotated[Literal["all"], Tag("all")]
    | Annotated[Literal["active"], Tag("active")]
    | Annotated[FisherMixing, Tag("fisher_mixing")],
    Discriminator(_option),
    _with_defaults("fisher_mixing"),
]


class ZeroSumSettings(Settings):
    bits: int = Field(32, ge=8, le=48)  # behind the binary point of the numbers that are summed


class ZeroSum(Settings):
    zero_sum: ZeroSumSettings


Secure = Annotated[
    Annotated[Literal["none"], Tag("none")] | Annotated[ZeroSum, Tag("zero_sum")],
    Discriminator(_option),
    _with_defaults("zero_sum"),
]


FEWEST_HIDDEN = 3  # clients in a round with `secure: zero_sum`: of two, each could take its own update from the sum


class ClientSettings(Settings):
    count: Count = 1
    fraction: float = Field(1.0, gt=0, le=1)
    split: SplitSettings = IidSplit()
    select: Select = "uniform"
    weighting: Literal["samples", "equal"] = "samples"
    combine: Combine = "all"
    secure: Secure = "none"
    minimum: Count = 1
    norm_limit: float | None = Field(1e4, gt=1, le=1e30)  # times the median norm of updates; None: no limit
    fail_rate: float = Field(0.0, ge=0, lt=1)
    holdout: float = Field(0.0, ge=0, lt=1)
    have_backbone: bool = True

    @property
    def per_round(self) -> int:
        return max(1, round(self.fraction * self.count))

    @property
    def mixing(self) -> FisherMixingSettings | None:
        return self.combine.fisher_mixing if isinstance(self.combine, FisherMixing) else None

    @property
    def zero_sum(self) -> ZeroSumSettings | None:
        return self.secure.zero_sum if isinstance(self.secure, ZeroSum) else None

    @model_validator(mode="after")
    def _is_consistent(self) -> "ClientSettings":
        per_round = f"the {self.per_round} clients per round"
        if self.minimum > self.per_round:
            raise ValueError(f"minimum {self.minimum} is more than {per_round}; use 1 to {self.per_round}")
        if isinstance(self.select, HighLoss):
            candidates = self.select.high_loss.candidates
            if not self.per_round <= candidates <= self.count:
                wrong = f"fewer than {per_round}" if candidates < self.per_round else f"more than all {self.count}"
                raise ValueError(
                    f"select.high_loss.candidates {candidates} are {wrong}; use {self.per_round} to {self.count}"
                )
        if self.zero_sum and self.per_round < FEWEST_HIDDEN:
            raise ValueError(
                f"secure: zero_sum needs at least {FEWEST_HIDDEN} clients per round, and there are {self.per_round}; "
                "use more clients, or secure: none"
            )
        if self.zero_sum and self.mixing:
            raise ValueError("combine: fisher_mixing sends scores that secure: zero_sum does not hide; use all or none")
        return self


# -------------------------------------------------------------------------------------------- phases


class LocalSettings(Settings):
    """One client's training in one round: SGD as in torch.optim.SGD."""

    epochs: Repeats | None = None
    steps: Count | None = None
    batch_size: Count = 64
    lr: Real
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: Real = 1e-4
    nesterov: bool = False
    schedule: Literal["cosine", "constant", "linear"] = "cosine"
    clip_norm: Annotated[Real, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> "LocalSettings":
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give epochs or steps, exactly one of them")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class BlocksScope(Settings):
    blocks: Annotated[tuple[Annotated[int, Field(le=10**4)], ...], FromList] = Field(min_length=1)
    head: bool = False


Train = Annotated[
    Annotated[Literal["head", "backbone", "all"], Tag("part")] | Annotated[BlocksScope, Tag("scope")],
    Discriminator(lambda value: "scope" if isinstance(value, dict | BlocksScope) else "part"),
]


LayerKind = Literal["attention", "mlp", "norm", "scale", "patch", "tokens", "head"]


class MaskSettings(Settings):
    """Which of the weights in scope may change."""

    rule: str = "least_sensitive"
    sparsity: float | None = Field(None, ge=0, lt=1)
    file: str | None = None  # instead of rule and sparsity: a mask that `fedsieve mask` saved
    calibration_rounds: Repeats = 4
    damping: Share = 0.1
    fisher: FisherSettings = FisherSettings()
    scope: Literal["client", "federated", "server"] = "client"
    refresh: Literal["once", "round", "epoch"] = "once"
    draw: Literal["exact", "bernoulli"] = "exact"
    unit: Literal["weight", "row", "tensor"] = "weight"
    across: Literal["model", "tensor"] = "model"
    only: Annotated[tuple[LayerKind, ...], FromList] | None = Field(None, min_length=1)
    dense: Annotated[tuple[LayerKind, ...], FromList] = ()  # trained whole, outside the mask
    keep_alive: int = Field(1, ge=0, le=10**8)
    rescale: bool = False
    momentum: Literal["reset", "carry", "leak"] = "reset"

    @field_validator("sparsity", mode="before")
    @classmethod
    def _is_no_percentage(cls, sparsity: Any) -> Any:
        if type(sparsity) in (int, float) and 1 < sparsity < 100:
            raise ValueError(f"{sparsity} is no fraction below 1; did you mean {sparsity / 100:g}?")
        return sparsity

    @field_validator("rule")
    @classmethod
    def _is_known(cls, rule: str) -> str:
        if rule not in RULES:
            raise ValueError(f"there is no rule '{rule}'; use {', '.join(RULES)}")
        return rule

    @model_validator(mode="after")
    def _is_consistent(self) -> "MaskSettings":
        if (self.sparsity is None) == (self.file is None):
            raise ValueError("give sparsity (the fraction frozen, such as 0.9) or a mask's file, exactly one of them")
        if self.file is not None and self.refresh != "once":
            raise ValueError(f"refresh: {self.refresh} draws new masks, and a file holds only one; use refresh: once")
        if both := [kind for kind in self.dense if kind in (self.only or ())]:
            raise ValueError(f"only and dense both name {both[0]}: it is either under the mask or outside it")
        if self.draw == "bernoulli" and self.rule != "random":
            raise ValueError(f"draw: bernoulli goes with rule: random; {self.rule} has nothing to draw")
        if self.unit == "tensor" and self.across == "tensor":
            raise ValueError("unit: tensor takes whole tensors, so there is no share of each; use across: model")
        if self.refresh == "epoch" and self.scope != "client" and self.rule != "random":
            looked_at = "weights and data" if self.rule in BY_SENSITIVITY else "weights"
            raise ValueError(
                f"refresh: epoch with rule: {self.rule} needs scope: client, since in the midst of a client's training "
                f"nobody else has its {looked_at} to make one mask for all; use scope: client or refresh: round"
            )
        return self

    @property
    def is_shared(self) -> bool:
        """Whether all clients have the same mask."""
        return self.scope != "client" or self.file is not None

    @property
    def has_one_for_all(self) -> bool:
        """Whether the weights that a round changes are the same for all its clients, and known to the server."""
        return self.is_shared and self.refresh != "epoch"

    @property
    def by_sensitivity(self) -> bool:
        return self.rule in BY_SENSITIVITY and self.file is None

    @property
    def handover(self) -> Literal["reset", "carry", "leak"]:
        """What becomes of momentum from one mask to the next; a mask that stays keeps it."""
        return "carry" if self.refresh == "once" else self.momentum

    @property
    def needs_start(self) -> bool:
        """Whether masks depend on the weights at the phase's start, whenever they are drawn."""
        return self.refresh == "once" and self.file is None and self.rule != "random"


class PhaseSettings(Settings):
    name: str
    train: Train
    rounds: Repeats
    local: LocalSettings
    mask: MaskSettings | None = None
    optimizer_state: Literal["reset", "carry"] | None = None  # None: carry with one client, else reset

    @field_validator("name")
    @classmethod
    def _is_a_word(cls, name: str) -> str:
        if not name.replace("-", "").replace("_", "").isalnum() or len(name) > 100:  # it is also a folder's name
            raise ValueError("use letters, digits, - and _, at most 100 of them")
        return name

    def resolved(self, optimizer_state: str) -> "PhaseSettings":
        mask = self.mask and self.mask.model_copy(update={"file": _absolute(self.mask.file)})
        return self.model_copy(update={"optimizer_state": self.optimizer_state or optimizer_state, "mask": mask})


# ---------------------------------------------------------------------------------------- experiment


class EvaluateSettings(Settings):
    every: Repeats = 1
    sample: Count | None = None
    test: Literal["end", "each", "never"] = "end"
    keep: Literal["last", "best"] = "last"
    clients: bool = False


class WireSettings(Settings):
    """How what clients and server send each other becomes bytes."""

    values: Literal["float32", "float16", "bfloat16", "int8"] = "float32"
    compress: bool = False
    broadcast: Literal["full", "delta"] = "delta"


class AnalyzeSettings(Settings):
    level: Literal["none", "basic", "blocks"] = "basic"


class ExpectSettings(Settings):
    """What a publication reports for this experiment: `fedsieve reproduce` shows it beside the result."""

    source: str
    metric: Literal["test_accuracy", "val_accuracy"] | None = None  # what it measured, where no figure tells
    test_accuracy: Share | None = None
    val_accuracy: Share | None = None
    assumed: str | None = None  # what the publication leaves open or contradicts, and what was taken


Tracker = Literal["tensorboard", "wandb", "mlflow"]


class Experiment(Settings):
    """The whole file."""

    seed: int = Field(42, ge=0, lt=2**63)
    device: Annotated[Literal["auto", "cpu", "cuda"], _alias("gpu", "cuda")] = "auto"
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
        """What `secure: zero_sum` asks of the rest: all clients' numbers stand at the same places."""
        if self.clients.zero_sum is None:
            return
        for number, phase in enumerate(self.phases):
            if phase.mask is not None and not phase.mask.has_one_for_all:
                way = "refresh: round" if phase.mask.is_shared else "scope: server or federated"
                raise ValueError(
                    f"clients.secure: zero_sum adds up numbers that stand at the same places, and phases.{number}.mask "
                    f"gives clients masks of their own; use {way} there"
                )
            if phase.mask is not None and phase.mask.handover == "leak":
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
        """The same experiment with every `auto` and every open default settled."""
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
        data = self.data.model_copy(update={"image_size": size, "path": _absolute(self.data.path)})
        backbone = self.model.backbone
        if backbone != "pico" and Path(_absolute(backbone) or "").exists():
            backbone = _absolute(backbone) or backbone
        model = self.model.model_copy(update={"backbone": backbone, "init": _absolute(self.model.init)})
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
        """Workers, and threads of each: as many clients at once as there are cores, or GPUs, and clients in a round.

        A client trains faster alone on a core than two after another on both, for threads wait for each other.
        """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        places = cores if self.threads == "auto" else max(1, cores // self.threads)
        if device == "cuda":
            import torch

            places = torch.cuda.device_count()
        in_a_round = self.clients.count if isinstance(self.model.head, RidgeHead) else self.clients.per_round
        workers = min(_workers_allowed(places), in_a_round) if self.workers == "auto" else self.workers
        return workers, max(1, cores // workers) if self.threads == "auto" else self.threads

    def same_outcome(self, other: "Experiment") -> bool:
        """Whether the other experiment ends in the same model, to the bit."""
        return self.outcome() == other.outcome()

    def outcome(self) -> "Experiment":
        """Only what the model depends on: who works at it, who watches and what is expected of it do not matter."""
        return self.model_copy(update={"workers": 1, "track": (), "expect": None})

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=110)


def _workers_allowed(places: int) -> int:
    """What `workers: auto` may use: $FEDSIEVE_WORKERS, or all there is room for."""
    text = os.environ.get("FEDSIEVE_WORKERS") or str(places)
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"FEDSIEVE_WORKERS is '{text}'; give a whole number from 1 on, such as 2")
    return int(text)


def _absolute(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        absolute = Path(path).expanduser().resolve()
        absolute.exists()
        return str(absolute)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"'{path[:60]}' is no possible path ({error})") from None
