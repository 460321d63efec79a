"""Which images an experiment uses, and how they are prepared."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from fedsieve.config.settings import Count, FromList, Settings, Share, Side, option, with_defaults


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
    Discriminator(option),
    with_defaults("random_resized_crop"),
]
EvaluateCrop = Annotated[
    Annotated[Literal["resize"], Tag("resize")] | Annotated[ResizeCenterCrop, Tag("resize_center_crop")],
    Discriminator(option),
    with_defaults("resize_center_crop"),
]


class DataSettings(Settings):
    name: Literal["cifar100", "digits", "folder", "npz", "given"] = "digits"  # given: an object, from Python
    path: str | None = None
    image_size: Side | None = None  # None: 32 for pico, 64 for any other backbone
    limit: Count | None = None  # at most this many training images
    validation: float = Field(0.2, ge=0, lt=1)
    augment: Annotated[tuple[Augmentation, ...], FromList] = ()
    evaluate_crop: EvaluateCrop = "resize"
    normalize: Literal["dataset", "imagenet", "cifar100"] = "dataset"
