"""A plugin for bench/federation.py: a method whose clients do not train, which is FedAvg in all else."""

import fedsieve
from fedsieve.federate.local import Trained, update_of
from fedsieve.federate.methods.fedavg import FedAvg


@fedsieve.method
class NoOp(FedAvg):
    """Clients send other numbers for each client and round, as after training: w_k = (1 + f_k) w."""

    def train(self, task, mine):
        factor = 1 + 1e-3 * (1 + task.data.client / 7)
        return update_of(task, Trained(task.broadcast.weights * factor, loss=1.0)), {}
