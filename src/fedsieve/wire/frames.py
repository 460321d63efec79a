"""zstd frames that do not unpack to more than is expected of them."""

import numpy as np
import zstandard

from fedsieve.wire.message import WireError

LEVEL = 1  # on masks and shuffled floats level 3 takes twice as long or more and finds nothing else


def compress(data: np.ndarray) -> np.ndarray:
    return np.frombuffer(zstandard.ZstdCompressor(level=LEVEL).compress(data.data), dtype=np.uint8)


def decompress(frame: np.ndarray, size: int) -> np.ndarray:
    """The `size` bytes in a frame; what it claims to hold is looked at before memory is taken."""
    try:
        if zstandard.frame_content_size(frame.data) == size:
            data = zstandard.ZstdDecompressor().decompress(frame.data, max_output_size=size, allow_extra_data=False)
            return np.frombuffer(data, dtype=np.uint8)
    except zstandard.ZstdError:
        pass
    raise WireError(f"a zstd frame does not hold the {size} bytes expected of it")
