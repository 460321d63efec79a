"""A linear head in closed form: ridge regression on the features, exact whatever the split.

Each client sends sums over its samples, once, and the server solves for the head. The sums add up
to those of the pooled data, so clients, their number and their classes do not change the result
(as in Fed3R, Fani et al., ICML 2024).
"""

import torch
from torch import Tensor

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
        weight = torch.linalg.solve(gram + penalty, cross).T
        bias = mean_y - weight @ mean_x
        return torch.cat((weight.flatten(), bias)).float()
