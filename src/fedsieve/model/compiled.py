"""`compile: true`: the blocks of a ViT run as machine code that torch.compile makes for them.

Blocks are compiled, not the whole network: they are alike, so one piece of code serves all of them, and making it takes
half of the time or less. The last block is left as it is: it computes the class token alone, would need code of its own
for that, and is a fraction of the others' work. Sizes are left open, so that a smaller last batch needs no code of its
own, and so that the bits of a result do not depend on which size came first (a run may be resumed anywhere). Only a
batch of one image has its own.
"""

import torch
from torch import nn

from fedsieve.errors import InputError
from fedsieve.model.vit import Block

BACKEND = "inductor"  # torch's own: C++ on the CPU, Triton on CUDA
VARIANTS = 64  # of the code: with and without gradients, for each set of trained tensors; torch would give up after 8


def compile_blocks(network: nn.Module, device: str) -> None:
    """In place: the modules, their names and their parameters stay what they are."""
    blocks = [module for module in network.modules() if isinstance(module, Block)]
    if not blocks:
        raise InputError("compile: true works for ViT, DINO and DINOv2 backbones, and this is another; use false")
    _must_work(device)
    from torch.fx.experimental import _config as symbolic_shapes

    torch._dynamo.config.cache_size_limit = VARIANTS
    symbolic_shapes.use_duck_shape = False  # else code for as many images as tokens would be good for nothing else
    for block in blocks[:-1]:
        block.compile(dynamic=True, backend=BACKEND)


def _must_work(device: str) -> None:
    """InputError if torch.compile cannot make code for this device, which takes a compiler and Python's headers."""
    try:
        torch.compile(lambda numbers: numbers.sin() + 1, dynamic=True, backend=BACKEND)(torch.ones(4, device=device))
    except Exception as error:  # whatever is missing
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        need = "a C++ compiler" if device == "cpu" else "Triton"
        raise InputError(f"compile: true does not work here ({reason}); install {need}, or use false") from None
