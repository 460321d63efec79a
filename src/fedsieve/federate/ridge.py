"""A linear head in closed form: ridge regression on the features, exact whatever the split.

Each client sends sums over its samples, once, and the server solves for the head. The sums add up
to those of the pooled data, so clients, their number and their classes do not change the result
(as in Fed3R, Fani et al., ICML 2024).
"""

import torch
from torch import Tensor

from fedsieve.errors import RunError
from fedsieve.federate.client import Broadcast, ClientData, ClientState, Context, Update
from fedsieve.model.flat import Scope


def ridge_statistics(
    broadcast: Broadcast, data: ClientData, state: ClientState, context: Context
) -> tuple[Update, ClientState]:
    """A client's sums: X'X, X'Y, the sums of X and Y, with X its features and Y its labels, one-hot; all flat."""
    everything = torch.arange(len(data))
    features = data.inputs(everything, torch.Generator()).double()
    classes = context.scope.entries[-1].shape[0]  # the head's bias
    targets = torch.nn.functional.one_hot(data.labels[everything], classes).double()
    vectors = {
        "gram": (features.T @ features).flatten(),
        "cross": (features.T @ targets).flatten(),
        "features": features.sum(dim=0),
        "targets": targets.sum(dim=0),
    }
    return Update(data.client, len(data), vectors), state


def ridge_sizes(scope: Scope) -> dict[str, int]:
    """The lengths of these sums for the head in scope."""
    classes, width = scope.entries[0].shape
    return {"gram": width * width, "cross": width * classes, "features": width, "targets": classes}


def check_sums(update: Update) -> None:
    """RunError unless samples can have these sums: labels are counted, and the Cauchy-Schwarz inequality holds."""
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


class RidgeRegression:
    """min over W, b of sum |W x + b - y|^2 + penalty |W|^2, from the clients' sums; b is not penalised."""

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty
        self.samples = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, update: Update) -> None:
        self.samples += update.samples
        for name, vector in update.vectors.items():
            self.sums[name] = self.sums[name].add_(vector) if name in self.sums else vector.clone()

    def finish(self) -> Tensor:
        mean_x, mean_y = self.sums["features"] / self.samples, self.sums["targets"] / self.samples
        gram = self.sums["gram"].view(len(mean_x), -1) - self.samples * torch.outer(mean_x, mean_x)
        cross = self.sums["cross"].view(len(mean_x), -1) - self.samples * torch.outer(mean_x, mean_y)
        penalty = self.penalty * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        solution, is_singular = torch.linalg.solve_ex(gram + penalty, cross)
        if is_singular:
            raise RunError("the clients' sums have no solution; raise model.head.ridge.penalty")
        weight = solution.T
        bias = mean_y - weight @ mean_x
        return torch.cat((weight.flatten(), bias)).float()
