"""How much data there is, without loading it where that is known."""

from functools import cache

from fedsieve.config.data_settings import DataSettings

KNOWN_SIZES = {"cifar100": (50_000, 10_000, 100), "digits": (1_438, 359, 10)}  # training and test images, classes


def data_sizes(data: DataSettings) -> tuple[int, int, int]:
    """Training images, test images and classes; known data sets need not be there for it."""
    train, test, classes = KNOWN_SIZES.get(data.name) or _counted(data.name, data.path, data.image_size)
    return train if data.limit is None else min(train, data.limit), test, classes


@cache
def _counted(name: str, path: str | None, image_size: int | None) -> tuple[int, int, int]:
    from fedsieve.data.load import load

    data = load(DataSettings.model_validate({"name": name, "path": path, "image_size": image_size}))
    return len(data.train), len(data.test), len(data.classes)
