"""What a network's forward pass gives: class scores, or an object that holds them, as models of transformers do."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def scores_of(output: Any) -> Tensor:
    """The class scores in an output: a tensor, the first of a tuple, or what is called `logits`."""
    if isinstance(output, Tensor):
        return output
    scores = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if scores is None and isinstance(output, tuple) and output:
        scores = output[0]
    if not isinstance(scores, Tensor):
        raise TypeError(f"the model gives a {type(output).__name__}, expected a tensor of class scores or `logits`")
    return scores
