"""In which precision networks are computed: float32, or matrix products and convolutions in bfloat16.

Only what a forward pass computes, and the backward pass through it, is rounded. Weights, their gradients, momentum,
the loss, what is averaged and what is sent stay float32, and so does the calibration of masks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["float32", "bfloat16"]
INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, ARM: without them bfloat16 is emulated


def forward(network: Callable[[Tensor], Tensor], inputs: Tensor, precision: Precision) -> Tensor:
    """What `network` makes of `inputs`, as float32.

    The loss and the backward pass belong outside of autocast: there each operation has the type of its forward pass.
    """
    if precision == "float32":
        return network(inputs)
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
        return network(inputs).float()


def notes_on(precision: Precision, device: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """What a person should know about this precision on this machine."""
    if precision == "float32" or device != "cpu" or not cpuinfo.exists():
        return []
    if INSTRUCTIONS & set(cpuinfo.read_text(encoding="utf-8").split()):
        return []
    return ["precision: bfloat16 works, but this CPU has no instructions for it; float32 is likely to be faster"]
