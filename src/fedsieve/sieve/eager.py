"""Networks that somebody has compiled, run as they are written."""

import sys
from contextlib import AbstractContextManager, nullcontext

import torch


def eagerly() -> AbstractContextManager[object]:
    """Within this context, `torch.compile` changes nothing: for what compiled code would not notice, or compile again.

    Where nothing is compiled, torch's compiler is not even imported, which takes seconds.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
