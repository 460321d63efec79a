"""The one evaluator: accuracy and mean cross-entropy of a network on labelled samples, and how clients fare."""

import math
from collections.abc import Callable, Iterable, Sequence
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
def score_batch(
    network: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor, at_once: int
) -> tuple[Tensor, float]:
    """Whether `network`, given so many samples at once, is right about each, and the sum of its cross-entropies."""
    scores = torch.cat([network(part) for part in inputs.split(at_once)]).float()
    truth = labels.to(scores.device)
    loss = nn.functional.cross_entropy(scores, truth, reduction="sum").double()
    return (scores.argmax(dim=1) == truth).cpu(), float(loss)


def joined(batches: Iterable[tuple[np.ndarray, float]]) -> Score:
    """The score of all samples from those of their batches, added in order."""
    correct, loss = [], 0.0
    for right, batch_loss in batches:
        correct.append(right.copy())
        loss += batch_loss
    everything = np.concatenate(correct)
    return Score(int(everything.sum()) / len(everything), loss / len(everything), torch.from_numpy(everything))


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
