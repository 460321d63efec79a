"""FedProx: clients are pulled back towards the server's weights."""

from fedsieve.config.settings import Real
from fedsieve.config.settings import Settings as AnySettings
from fedsieve.federate.local import sgd, update_of
from fedsieve.federate.methods.fedavg import FedAvg
from fedsieve.federate.types import State, Task, Update


class FedProx(FedAvg):
    """Clients minimise their loss + mu / 2 |w - w_server|^2 over the active weights (Li et al., MLSys 2020).

    The term's gradient, mu (w - w_server), is part of the gradient that is clipped.
    """

    class Settings(AnySettings):
        mu: Real = 0.01

    settings: Settings

    def train(self, task: Task, mine: State) -> tuple[Update, State]:
        mu, server = self.settings.mu, self.scope.split(task.broadcast.weights)
        pull = lambda name, own, select: mu * (own - select(server[name]))  # noqa: E731
        trained = sgd(task, task.broadcast.weights, mine, penalty=pull if mu else None)
        return update_of(task, trained), trained.momentum
