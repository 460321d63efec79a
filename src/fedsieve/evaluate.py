"""The one evaluator: accuracy and mean cross-entropy of a network on labelled samples, and how clients fare."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

BATCH = 500


@dataclass(frozen=True)
class Score:
    accuracy: float
    loss: float
    correct: Tensor = field(repr=False, compare=False)  # one bool per sample


@torch.no_grad()
def evaluate(network: Callable[[Tensor], Tensor], inputs: Callable[[Tensor], Tensor], labels: Tensor) -> Score:
    """Score `network` on samples with these labels; `inputs(numbers)` gives what the network takes for some of them."""
    correct, loss = [], 0.0
    for batch in torch.arange(len(labels)).split(BATCH):
        scores = network(inputs(batch)).float()
        truth = labels[batch].to(scores.device)
        correct.append((scores.argmax(dim=1) == truth).cpu())
        loss += float(nn.functional.cross_entropy(scores, truth, reduction="sum").double())
    right = torch.cat(correct)
    return Score(int(right.sum()) / len(labels), loss / len(labels), right)


def by_class_shares(correct: np.ndarray, labels: np.ndarray, held: np.ndarray) -> list[float | None]:
    """What accuracy clients may expect: sum over classes of (share of the client's samples) x (accuracy on the class).

    `correct` and `labels` are those of common test samples, `held` counts samples by (client, class). A class without
    test samples does not count; a client that has no other has no figure.
    """
    tested = np.bincount(labels, minlength=held.shape[1])
    accuracy = np.bincount(labels, weights=correct, minlength=held.shape[1]) / np.maximum(tested, 1)
    counted = held * (tested > 0)
    return [float(row @ accuracy / row.sum()) if row.sum() else None for row in counted]


def fairness(accuracies: Sequence[float | None]) -> dict[str, Any]:
    """How clients' accuracies spread: the mean, the mean of the worst tenth (at least one), the standard deviation."""
    known = sorted(one for one in accuracies if one is not None)
    if not known:
        return {"mean": None, "worst_tenth": None, "deviation": None, "accuracies": list(accuracies)}
    worst = known[: math.ceil(len(known) / 10)]
    return {
        "mean": float(np.mean(known)),
        "worst_tenth": float(np.mean(worst)),
        "deviation": float(np.std(known)),
        "accuracies": list(accuracies),
    }
