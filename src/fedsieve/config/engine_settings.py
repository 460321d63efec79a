"""Where clients run: worker processes on this machine, actors on a Ray cluster, or nodes of a federation.

No result depends on it.
"""

import re
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from fedsieve.config.settings import Settings, option, with_defaults


def is_a_place(text: str) -> bool:
    """Whether it is HOST:PORT."""
    return re.fullmatch(r"[^\s/@:]+:\d{1,5}|\[[0-9a-fA-F:.]+\]:\d{1,5}", text) is not None


class RaySettings(Settings):
    address: str | None = None  # None: a private cluster on this machine; auto: the one that it is a node of
    gpus_per_client: float = Field(0.0, ge=0, le=64)
    same_bits: bool = True  # leave out nodes whose last bits differ
    send_data: bool = False  # from the driver; otherwise each node loads them

    @field_validator("address")
    @classmethod
    def _is_a_place(cls, address: str | None) -> str | None:
        if address in (None, "auto") or is_a_place(address or ""):
            return address
        raise ValueError("use null (a private cluster), auto (the one that this machine is a node of) or HOST:PORT")

    @field_validator("gpus_per_client")
    @classmethod
    def _is_a_part_or_whole(cls, gpus: float) -> float:
        if gpus > 1 and not gpus.is_integer():
            raise ValueError("use a whole number, or a part of one such as 0.25 (four clients share a GPU)")
        return gpus


class OnRay(Settings):
    ray: RaySettings


class FederationSettings(Settings):
    """What all federations have: nodes that hold their own data."""

    manifest: str | None = None  # the file federation.json; None: nodes get numbers in the order in which they come
    wait: float = Field(300.0, ge=0, le=1e6)  # seconds at the start, for nodes that are not there yet
    timeout: float = Field(3600.0, gt=0, le=1e6)  # seconds that a node has for a job


class SocketSettings(FederationSettings):
    folder: str  # that holds the folders of nodes on this machine


class AtSockets(Settings):
    sockets: SocketSettings


class FlowerSettings(FederationSettings):
    folder: str = "superlink"  # of `fedsieve superlink make`
    superlink: str = "127.0.0.1:9091"  # where it listens for the server

    @field_validator("superlink")
    @classmethod
    def _is_a_place(cls, address: str) -> str:
        if is_a_place(address):
            return address
        raise ValueError("use HOST:PORT")


class OnFlower(Settings):
    flower: FlowerSettings


EngineSettings = Annotated[
    Annotated[Literal["local"], Tag("local")]
    | Annotated[OnRay, Tag("ray")]
    | Annotated[OnFlower, Tag("flower")]
    | Annotated[AtSockets, Tag("sockets")],
    Discriminator(option),
    with_defaults("ray", "flower"),
]
