"""Flower's simulation: a ClientApp and a ServerApp with its FedAvg, on Ray.

Clients keep the model and the data in their process between messages and exchange only the tensors that are trained,
as a careful user would have it.
"""

import logging
import os
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}

from contenders import Options, Outcome, Stopwatch, load
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import Workload, evaluate, set_tensors, train, trained_tensors

SETTINGS = "FEDSIEVE_BENCH"  # what a client's process has to know, in the environment that it inherits

client_app = ClientApp()


@cache
def work_of_this_process() -> Workload:
    file, threads = os.environ[SETTINGS].rsplit(":", 1)
    return load(Path(file), Options(threads=int(threads)))


@client_app.train()
def train_client(message: Message, context: Context) -> Message:
    work, client = work_of_this_process(), int(context.node_config["partition-id"])
    set_tensors(work.network, message.content["arrays"].to_torch_state_dict())
    epochs = work.rounds[message.content["config"]["server-round"] - 1][client]
    train(work.network, work.data_of(client), epochs, work.optimizer)
    reply = {
        "arrays": ArrayRecord(trained_tensors(work.network)),
        "metrics": MetricRecord({"num-examples": len(work.clients[client])}),
    }
    return Message(content=RecordDict(reply), reply_to=message)


@client_app.query()
def tell_partition(message: Message, context: Context) -> Message:
    """Everything that a process needs is made ready here, before the first round."""
    work_of_this_process()
    told = MetricRecord({"partition": int(context.node_config["partition-id"])})
    return Message(content=RecordDict({"metrics": told}), reply_to=message)


class GivenClients(FedAvg):
    """Flower's averaging, among the clients that everybody else has in the round."""

    def __init__(self, work: Workload, nodes: dict[int, int]) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.work, self.nodes = work, nodes

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config["server-round"] = server_round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        chosen = [self.nodes[client] for client in self.work.rounds[server_round - 1]]
        return [Message(content=record, message_type="train", dst_node_id=node) for node in chosen]


def flower(file: Path, options: Options) -> Outcome:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    os.environ[SETTINGS] = f"{file}:{options.threads}"
    work, watch, server = load(file, options), Stopwatch(), ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        nodes = partitions(grid, work.count)

        def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            if number == 0:
                return None  # nobody else looks at the model before the first round
            set_tensors(work.network, arrays.to_torch_state_dict())
            score = evaluate(work.network, work)
            return MetricRecord(dict(zip(("accuracy", "loss"), score, strict=True))) if score else None

        initial = ArrayRecord(trained_tensors(work.network))
        watch.go()
        GivenClients(work, nodes).start(grid, initial, num_rounds=len(work.rounds), evaluate_fn=evaluated)
        watch.stop()

    cores = options.threads * options.processes
    resources = {"client_resources": {"num_cpus": options.threads, "num_gpus": 0.0}}
    own = {"address": "local", "num_cpus": cores}  # not a cluster that happens to run on this machine
    ray = {"init_args": {**own, "log_to_driver": False, "logging_level": "error"}}
    run_simulation(server, client_app, work.count, backend_config={**resources, **ray})
    return watch.outcome(trained_tensors(work.network))


def partitions(grid: Grid, count: int) -> dict[int, int]:
    """The node of each client; asking all of them also starts every process."""
    while len(nodes := list(grid.get_node_ids())) < count:
        time.sleep(0.1)
    asked = [Message(content=RecordDict(), message_type="query", dst_node_id=node) for node in nodes]
    replies = grid.send_and_receive(asked)
    return {reply.content["metrics"]["partition"]: reply.metadata.src_node_id for reply in replies}
