"""pfl-research: its federated averaging in its simulated backend, in one process or in two by torch.distributed."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from contenders import Options, Outcome, Stopwatch, load
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F
from workload import EVALUATION_BATCH, Epochs, trained_tensors


class WithLoss(nn.Module):
    """The network as pfl wants it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(inputs), labels)

    @torch.no_grad()
    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Weighted]:
        scores, count = self.network(inputs), len(labels)
        correct = int((scores.argmax(dim=1) == labels).sum())
        loss = float(F.cross_entropy(scores, labels, reduction="sum"))
        return {"accuracy": Weighted(correct, count), "loss": Weighted(loss, count)}


class GivenBatches(Dataset):
    """One client in one round, whose epochs come in the order that everybody else has."""

    def __init__(self, data: tuple[Tensor, Tensor], epochs: Epochs) -> None:
        super().__init__(data)
        self.epochs = iter(epochs)

    def iter(self, batch_size: int | None) -> Iterator[list[Tensor]]:
        return ([part[batch] for part in self.raw_data] for batch in next(self.epochs))


class NoLocalEvaluation(FederatedAveraging):
    """pfl evaluates clients before and after their training in the first round at least; nobody else does."""

    def get_next_central_contexts(self, *args: Any) -> Any:
        contexts, model, metrics = super().get_next_central_contexts(*args)
        return contexts and tuple(replace(one, do_evaluation=False) for one in contexts), model, metrics


def pfl(file: Path, options: Options) -> Outcome:
    if options.processes > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        launcher = ("-m", "torch.distributed.run", "--nproc-per-node", str(options.processes), "--standalone")
        os.execv(sys.executable, [sys.executable, *launcher, *sys.argv[:4], *options.as_arguments()])
    work, watch = load(file, options), Stopwatch()
    taking_part = [(number, client) for number, chosen in enumerate(work.rounds) for client in chosen]
    per_round, epochs = len(work.rounds[0]), len(next(iter(work.rounds[0].values())))
    model = PyTorchModel(
        WithLoss(work.network),
        lambda parameters, lr: torch.optim.SGD(parameters, **{**work.optimizer, "lr": lr}),
        torch.optim.SGD([one for one in work.network.parameters() if one.requires_grad], lr=1.0),
    )
    users = FederatedDataset(
        lambda user: GivenBatches(work.data_of(user[1]), work.rounds[user[0]][user[1]]),
        get_user_sampler("minimize_reuse", taking_part),
    )
    backend = SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()])
    training = NNTrainHyperParams(
        local_num_epochs=epochs, local_learning_rate=work.optimizer["lr"], local_batch_size=None
    )
    rounds = NNAlgorithmParams(
        central_num_iterations=len(work.rounds),
        evaluation_frequency=len(work.rounds) + 1,
        train_cohort_size=per_round,
        val_cohort_size=None,
    )
    callbacks = []
    if len(work.validation):  # before the first round and after all others: as many evaluations as there are rounds
        held = Dataset((work.inputs[work.validation], work.labels[work.validation]))
        callbacks = [CentralEvaluationCallback(held, NNEvalHyperParams(local_batch_size=EVALUATION_BATCH))]
    watch.go()
    NoLocalEvaluation().run(rounds, backend, model, training, callbacks=callbacks, send_metrics_to_platform=False)
    watch.stop()
    if os.environ.get("RANK", "0") != "0":
        sys.exit()  # the first process speaks for all
    return watch.outcome(trained_tensors(work.network))
