"""The one evaluator: accuracy and mean cross-entropy of a network on labelled samples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BATCH = 500


@dataclass(frozen=True)
class Score:
    accuracy: float
    loss: float


@torch.no_grad()
def evaluate(network: Callable[[Tensor], Tensor], inputs: Callable[[Tensor], Tensor], labels: Tensor) -> Score:
    """Score `network` on samples with these labels; `inputs(numbers)` gives what the network takes for some of them."""
    correct, loss = 0, 0.0
    for batch in torch.arange(len(labels)).split(BATCH):
        scores = network(inputs(batch)).float()
        truth = labels[batch].to(scores.device)
        correct += int((scores.argmax(dim=1) == truth).sum())
        loss += float(nn.functional.cross_entropy(scores, truth, reduction="sum").double())
    return Score(correct / len(labels), loss / len(labels))
