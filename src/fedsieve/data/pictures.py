"""Images of any size and kind to the squares in colour that a data set is stored as."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedsieve.config.data_settings import DataSettings, ResizeCenterCrop
from fedsieve.errors import InputError

if TYPE_CHECKING:
    from PIL import Image

Shape = tuple[int, int, int]  # of an image: channels, height, width


def shown(name: str) -> str:
    """A name that can be printed and written: bytes that are not UTF-8 and control characters are escaped."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", lambda found: f"\\x{ord(found[0]) % 256:02x}", name)


def stored_side(settings: DataSettings) -> int:
    """Of the square that an image is stored as."""
    crop = settings.evaluate_crop
    return crop.resize_center_crop.resize if isinstance(crop, ResizeCenterCrop) else settings.image_size or 64


def read_image(path: Path, settings: DataSettings, shape: Shape | None = None) -> np.ndarray:
    """An image file as (3, side, side), uint8; where it has the `shape` (channels, height, width), as it is."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            picture = in_colour(image)
    except Exception as error:  # Pillow raises many kinds for a damaged file
        reason = type(error).__name__
        raise InputError(f"{shown(str(path))} is no readable image ({reason}); mend or remove it") from None
    if shape is None or (picture.height, picture.width) != shape[1:]:
        picture = as_square(picture, settings)
    channels = np.asarray(picture).transpose(2, 0, 1)
    return channels[:1] if shape is not None and shape[0] == 1 else channels  # three equal ones, if the file is grey


def in_colour(image: "Image.Image") -> "Image.Image":
    """Upright, with three channels of 8 bits."""
    from PIL import Image, ImageOps

    if image.mode.startswith("I"):  # 16 bits a pixel, which Pillow would cut off instead of scaling
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    return ImageOps.exif_transpose(image).convert("RGB")


def as_square(picture: "Image.Image", settings: DataSettings) -> "Image.Image":
    """An image of any size as the square that it is stored as."""
    from PIL import Image, ImageOps

    side = stored_side(settings)
    if isinstance(settings.evaluate_crop, ResizeCenterCrop):
        return ImageOps.fit(picture, (side, side), Image.Resampling.BILINEAR)
    return picture.resize((side, side), Image.Resampling.BILINEAR)
