"""Clients: how many, who takes part, and what the server may see of them."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from fedsieve.config.partition_settings import IidSplit, SplitSettings
from fedsieve.config.registry import choice
from fedsieve.config.settings import Count, Settings, option, with_defaults
from fedsieve.federate.selection import SELECTIONS


class ZeroSumSettings(Settings):
    bits: int = Field(32, ge=8, le=48)  # after the binary point of the numbers that are summed


class ZeroSum(Settings):
    zero_sum: ZeroSumSettings


Secure = Annotated[
    Annotated[Literal["none"], Tag("none")] | Annotated[ZeroSum, Tag("zero_sum")],
    Discriminator(option),
    with_defaults("zero_sum"),
]


FEWEST_SECURE = 3  # clients in a round with `secure: zero_sum`: of two, each could subtract its update from the sum


class ClientSettings(Settings):
    count: Count = 1
    fraction: float = Field(1.0, gt=0, le=1)
    split: SplitSettings = IidSplit()
    select: choice(SELECTIONS) = "uniform"  # type: ignore[valid-type]
    weighting: Literal["samples", "equal"] = "samples"
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
    def zero_sum(self) -> ZeroSumSettings | None:
        return self.secure.zero_sum if isinstance(self.secure, ZeroSum) else None

    @model_validator(mode="after")
    def _is_consistent(self) -> "ClientSettings":
        per_round = f"the {self.per_round} clients per round"
        if self.minimum > self.per_round:
            raise ValueError(f"minimum {self.minimum} is more than {per_round}; use 1 to {self.per_round}")
        if option(self.select) == "high_loss":
            candidates = self.select.high_loss.candidates
            if not self.per_round <= candidates <= self.count:
                wrong = f"fewer than {per_round}" if candidates < self.per_round else f"more than all {self.count}"
                raise ValueError(
                    f"select.high_loss.candidates {candidates} are {wrong}; use {self.per_round} to {self.count}"
                )
        if self.zero_sum and self.per_round < FEWEST_SECURE:
            raise ValueError(
                f"secure: zero_sum needs at least {FEWEST_SECURE} clients per round, and there are {self.per_round}; "
                "use more clients, or secure: none"
            )
        return self
