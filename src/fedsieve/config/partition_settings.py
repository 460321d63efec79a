"""How the training images are divided among the clients."""

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SerializeAsAny, WrapValidator, create_model, model_validator
from pydantic_core import PydanticCustomError

from fedsieve.config.registry import settings_class
from fedsieve.config.settings import Count, Settings
from fedsieve.data import SPLITS


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


class UnknownSplit(Settings):
    """The split of a plugin that is not loaded; its settings are kept as they are."""

    model_config = ConfigDict(extra="allow")
    kind: str


@cache
def users_split(kind: str, settings: type[Settings]) -> type[Settings]:
    """The group of a user's split: its own settings, and its kind."""
    fields: Any = {"kind": (Literal[kind], ...)}
    return create_model(f"{kind} split", __base__=settings, **fields)


def _checked(value: Any, check_own: Callable[[Any], Any]) -> Any:
    """A split that comes with fedsieve (`check_own`), or a user's; `iid` alone means `{kind: iid}`."""
    value = {"kind": value} if isinstance(value, str) else value
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    if not isinstance(kind, str) or SPLITS.is_own(kind):
        return check_own(value)
    if isinstance(value, Settings):
        return value
    if kind in SPLITS:
        return users_split(kind, settings_class(SPLITS[kind])).model_validate(value)
    if SPLITS.accepts(kind):
        return UnknownSplit.model_validate(value)
    raise PydanticCustomError("union_tag_invalid", "unknown kind", {"tag": kind, "expected_tags": SPLITS.names})


SplitSettings = Annotated[
    SerializeAsAny[Annotated[IidSplit | ClassesSplit | DirichletSplit | FlwrSplit, Field(discriminator="kind")]],
    WrapValidator(_checked),
]
