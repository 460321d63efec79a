"""The app that bench/federation.py runs on Flower: FedAvg as it comes, and clients that do not train.

It is copied into a folder of its own, next to a pyproject.toml with its settings, and started by `flwr run`. The
ServerApp writes a line of JSON for each round: the seconds from the moment when it prepares the messages to the moment
when it has the average.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """No training. Other numbers for each client and round, as after training, or with `echo` the same."""
    arrays, node = message.content["arrays"], int(context.node_config["partition-id"])
    if not context.run_config["echo"]:
        factor = np.float32(1 + 1e-3 * (1 + node / 7))
        arrays = ArrayRecord({name: Array(one.numpy() * factor) for name, one in arrays.items()})
    metrics = MetricRecord({"num-examples": 8})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class Timed(FedAvg):
    """Flower's FedAvg, which notes when a round begins and ends."""

    def __init__(self, log: Path, nodes: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
        self.log, self.began = log, 0.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.began = time.time()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        found = super().aggregate_train(server_round, replies)
        line = {
            "round": server_round,
            "clients": sum(not one.has_error() for one in replies),
            "seconds": time.time() - self.began,
        }
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return found


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Rounds of all nodes, with random weights in arrays of these lengths."""
    settings, generator = context.run_config, np.random.default_rng(0)
    lengths = map(int, settings["lengths"].split(","))
    arrays = {
        str(number): Array(0.02 * generator.standard_normal(length, np.float32))
        for number, length in enumerate(lengths)
    }
    log = Path(settings["log"])
    Timed(log, settings["nodes"]).start(grid, ArrayRecord(arrays), num_rounds=settings["rounds"])
    with log.open("a") as file:
        file.write('{"done": true}\n')
