"""Which weights a phase trains, by the part of the network or the kind of layer that they belong to."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from fedsieve.config.settings import FromList, Settings


class BlocksScope(Settings):
    blocks: Annotated[tuple[Annotated[int, Field(le=10**4)], ...], FromList] = Field(min_length=1)
    head: bool = False


Train = Annotated[
    Annotated[Literal["head", "backbone", "all"], Tag("part")] | Annotated[BlocksScope, Tag("scope")],
    Discriminator(lambda value: "scope" if isinstance(value, dict | BlocksScope) else "part"),
]


LayerKind = Literal["attention", "mlp", "norm", "scale", "patch", "tokens", "head"]
