"""The backbone, and the head on top of it."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from fedsieve.config.settings import Real, Settings, option, with_defaults

FLAGSHIP = "facebook/dino-vits16"  # the backbone of the reports
GIVEN = "given"  # the first word of `model.backbone` if the model is an object that was given from Python


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
    Discriminator(option),
    with_defaults("mlp", "ridge"),
]


Positions = Literal["hugging_face", "authors"]  # whose interpolation of position embeddings


class ModelSettings(Settings):
    backbone: str = "pico"
    positions: Positions = "hugging_face"
    head: Head = "linear"
    init: str | None = None

    @property
    def is_given(self) -> bool:
        return is_given(self.backbone)


def is_given(backbone: str) -> bool:
    """Whether `model.backbone` stands for a model that was given from Python: `given`, `given ResNet, head fc`."""
    return backbone.partition(" ")[0] == GIVEN
