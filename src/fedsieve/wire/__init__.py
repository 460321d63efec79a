"""Messages between server and clients as bytes, and back; docs/wire.md describes every one of the bytes."""

from fedsieve.wire.codec import decode, encode, encoded_length
from fedsieve.wire.message import (
    KINDS,
    NO_VALUES,
    Encoded,
    Extent,
    Layout,
    Message,
    Vector,
    WireError,
    layout_fingerprint,
)

__all__ = [
    "KINDS",
    "NO_VALUES",
    "Encoded",
    "Extent",
    "Layout",
    "Message",
    "Vector",
    "WireError",
    "decode",
    "encode",
    "encoded_length",
    "layout_fingerprint",
]
