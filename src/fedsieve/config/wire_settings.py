"""How messages between clients and server are encoded."""

from typing import Literal

from fedsieve.config.settings import Settings


class WireSettings(Settings):
    """How messages between clients and server are encoded."""

    values: Literal["float32", "float16", "bfloat16", "int8"] = "float32"
    compress: bool = False
    broadcast: Literal["full", "delta"] = "delta"
