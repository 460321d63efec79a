"""What all settings have in common: immutable, strict about types, each number with its limits."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


class Settings(BaseModel):
    """A part of an experiment: immutable, strict about types, and helpful about misspelt keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, value: Any) -> Any:
        if isinstance(value, dict) and cls.model_config.get("extra") == "forbid":
            for key in value:
                if key not in cls.model_fields:
                    raise PydanticCustomError("unknown_key", "", {"key": str(key), "valid": list(cls.model_fields)})
        return value


FromList = Field(strict=False)  # YAML has lists, frozen models have tuples

# Every number has an upper limit far above those of real experiments, so that a typo is reported at once.
Count = Annotated[int, Field(ge=1, le=10**8)]  # of clients, samples, steps, …
Repeats = Annotated[int, Field(ge=1, le=10**6)]  # of something long, such as a round
Side = Annotated[int, Field(ge=1, le=4096)]  # of an image, in pixels
Real = Annotated[float, Field(ge=0, le=1e38)]  # float32 can still hold it
Share = Annotated[float, Field(ge=0, le=1)]
Processes = Annotated[int, Field(ge=1, le=1024)]


def with_defaults(*names: str) -> BeforeValidator:
    """`mlp` alone means `{mlp: {}}`."""
    return BeforeValidator(lambda value: {value: {}} if isinstance(value, str) and value in names else value)


def option(value: Any) -> str:
    """The name of the variant in `linear`, `{mlp: {hidden: 512}}` or a model made from it."""
    if isinstance(value, dict):
        return str(next(iter(value), ""))
    return next(iter(type(value).model_fields)) if isinstance(value, BaseModel) else str(value)
