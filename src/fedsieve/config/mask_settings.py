"""Which of the weights in scope may change, and how sensitivity is measured to choose them."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fedsieve.config.registry import named
from fedsieve.config.scope_settings import LayerKind
from fedsieve.config.settings import Count, FromList, Repeats, Settings, Share
from fedsieve.sieve.rules import RULES, LooksAt, looked_at


class FisherSettings(Settings):
    """How sensitivity is measured."""

    kind: Literal["exact", "empirical", "batch"] = "exact"
    samples: Count = 512
    draws: Repeats = 1


class MaskSettings(Settings):
    """Which of the weights in scope may change."""

    rule: named(RULES) = "least_sensitive"  # type: ignore[valid-type]
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
            needed = "weights and data" if looked_at(self.rule) else "weights"
            raise ValueError(
                f"refresh: epoch with rule: {self.rule} needs scope: client, since in the midst of a client's training "
                f"nobody else has its {needed} to make one mask for all; use scope: client or refresh: round"
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
    def looks_at(self) -> LooksAt | None:
        """What is measured of samples to make a mask; None: nothing."""
        return looked_at(self.rule) if self.file is None else None

    @property
    def looks_at_data(self) -> bool:
        return self.looks_at is not None

    @property
    def momentum_policy(self) -> Literal["reset", "carry", "leak"]:
        """What happens to momentum when the mask changes; if it never does, momentum is carried."""
        return "carry" if self.refresh == "once" else self.momentum

    @property
    def needs_start(self) -> bool:
        """Whether masks depend on the weights at the phase's start, whenever they are drawn."""
        return self.refresh == "once" and self.file is None and self.rule != "random"
