"""A linear head in closed form: ridge regression on the features, exact for any split.

Each client sends sums over its samples, once, and the server solves for the head. The sums add up
to those of the pooled data, so the number of clients and their classes do not change the result
(as in Fed3R, Fani et al., ICML 2024).
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fedsieve.config.model_settings import RidgeSettings
from fedsieve.errors import RunError
from fedsieve.federate.checks import check_report
from fedsieve.federate.methods.fedavg import FedAvg
from fedsieve.federate.norm_limit import norm_of
from fedsieve.federate.types import Broadcast, LocalSetup, State, Task, Update


class Ridge(FedAvg):
    """min over W, b of sum |W x + b - y|^2 + penalty |W|^2, from the clients' sums; b is not penalised.

    A client's sums are X'X, X'Y and the sums of X and Y, all flattened; X are its features, Y its one-hot labels.
    """

    Settings = RidgeSettings  # model.head: ridge
    settings: RidgeSettings
    augments: ClassVar[bool] = False

    @property
    def replies(self) -> Mapping[str, int]:
        classes, width = self.scope.entries[0].shape
        return {"gram": width * width, "cross": width * classes, "features": width, "targets": classes}

    def train(self, task: Task, mine: State) -> tuple[Update, State]:
        data = task.data
        everything = torch.arange(len(data))
        features = data.inputs(everything, torch.Generator()).double()
        classes = self.scope.entries[-1].shape[0]  # the head's bias
        targets = torch.nn.functional.one_hot(data.labels[everything], classes).double()
        vectors = {
            "gram": (features.T @ features).flatten(),
            "cross": (features.T @ targets).flatten(),
            "features": features.sum(dim=0),
            "targets": targets.sum(dim=0),
        }
        return Update(data.client, len(data), vectors), mine

    def check(self, update: Update, broadcast: Broadcast, samples: int, setup: LocalSetup) -> float:
        """Sums grow with the number of samples, so the norm is per sample."""
        check_report(update, samples, set())
        check_sums(update)
        return norm_of(*update.vectors.values()) / samples

    def fold(self, weights: Tensor, updates: Iterator[Update], server: State) -> tuple[Tensor, State]:
        samples, sums = 0, dict[str, Tensor]()
        for update in updates:
            samples += update.samples
            for name, vector in update.vectors.items():
                sums[name] = sums[name].add_(vector) if name in sums else vector.clone()
        return solve(sums, samples, self.settings.penalty), server


def check_sums(update: Update) -> None:
    """RunError unless samples can have these sums: labels add up, and the Cauchy-Schwarz inequality holds."""
    gram, cross, features, targets = (update.vectors[name] for name in ("gram", "cross", "features", "targets"))
    if (targets < 0).any() or (targets != targets.round()).any() or float(targets.sum()) != update.samples:
        raise RunError(f"its labels are not those of {update.samples} samples")
    gram, cross = gram.view(len(features), -1), cross.view(len(features), -1)
    squares, more = gram.diagonal(), 1 + 1e-6  # for rounding
    largest = update.samples * torch.finfo(torch.float32).max ** 2
    is_possible = (
        bool((squares >= 0).all() and (squares <= largest).all())
        and bool((gram.square() <= more * torch.outer(squares, squares)).all())
        and bool(((gram - gram.T).square() <= 1e-12 * torch.outer(squares, squares)).all())
        and bool((features.square() <= more * update.samples * squares).all())
        and bool((cross.square() <= more * torch.outer(squares, targets)).all())
    )
    if not is_possible:
        raise RunError("no features have the sums that it sent")


def solve(sums: Mapping[str, Tensor], samples: int, penalty: float) -> Tensor:
    """The head: its weights, then its bias."""
    mean_x, mean_y = sums["features"] / samples, sums["targets"] / samples
    gram = sums["gram"].view(len(mean_x), -1) - samples * torch.outer(mean_x, mean_x)
    cross = sums["cross"].view(len(mean_x), -1) - samples * torch.outer(mean_x, mean_y)
    ridge = penalty * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    solution, is_singular = torch.linalg.solve_ex(gram + ridge, cross)
    if is_singular:
        raise RunError("the clients' sums have no solution; raise model.head.ridge.penalty")
    weight = solution.T
    bias = mean_y - weight @ mean_x
    return torch.cat((weight.flatten(), bias)).float()
