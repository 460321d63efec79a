"""How the training images are divided among the clients."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from fedsieve.config.settings import Count, Settings


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
    """Any partitioner of flwr-datasets; keys that are not listed here are its arguments."""

    model_config = ConfigDict(extra="allow")
    kind: Literal["flwr"]
    partitioner: str


def _split_by_name(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


SplitSettings = Annotated[
    Annotated[IidSplit | ClassesSplit | DirichletSplit | FlwrSplit, Field(discriminator="kind")],
    BeforeValidator(_split_by_name),
]
