"""Fisher-weighted mixing: the more a weight matters to a client's data, the more the client keeps of its own value.

When client i receives the server's weights, it starts from

    theta = beta * old + (1 - beta) * weights    with    beta = F_i / sum over all clients j of F_j,

weight by weight, where `old` are its own weights after its last local training and F_i are its own Fisher scores
(`sieve.sensitivity`). Where no client has a score, beta = 0.

Between rounds a client keeps `old` and F_i in a small type. The scores are divided by a power of two, which costs
no precision, so that they fit. The weights are rounded, and rounding must not move weights that were not trained:
where `old` is the server's weight rounded the same way, the client takes the server's weight itself, to the bit.
"""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsieve.config.mask_settings import FisherSettings
from fedsieve.config.settings import Settings as AnySettings
from fedsieve.errors import RunError
from fedsieve.federate.checks import check_reply, check_scores
from fedsieve.federate.local import sgd, update_of
from fedsieve.federate.mask_source import drawn_samples
from fedsieve.federate.methods.fedavg import FedAvg
from fedsieve.federate.preparation import Preparation
from fedsieve.federate.types import ClientData, Job, LocalSetup, State, Task, Update
from fedsieve.model.flat import Scope
from fedsieve.randomness import torch_generator
from fedsieve.sieve.mask import Mask, shapes_of
from fedsieve.sieve.sensitivity import sensitivity

FLOAT16_TOP = 15  # scores are scaled below 2^15: float16 ends just below 2^16, and rounding up must not reach that
LARGEST_SCALE = 126  # 2^126 and 2^-126 are both ordinary float32 numbers
EXPONENT = torch.int32


def pack_scores(scores: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Scores >= 0 in a small type: fisher = scores * 2^-fisher_exponent, rounded.

    The exponent brings the largest score into [2^14, 2^15). In float16, scores down to 2^-28 (4e-9) of the largest
    then have a relative error of at most 2^-11, smaller ones an absolute one, and those below 2^-40 of it become
    zero. The other types have a wider range than scores need.
    """
    largest = float(scores.max())
    if not math.isfinite(largest):
        raise RunError("the Fisher scores are not finite; the model's scores or gradients overflow")
    exponent = max(math.frexp(largest)[1] - FLOAT16_TOP, -LARGEST_SCALE)
    return {
        "fisher": (scores.float() * 2.0**-exponent).to(dtype),
        "fisher_exponent": torch.tensor(exponent, dtype=EXPONENT),
    }


def unpack_scores(state: Mapping[str, Tensor]) -> Tensor:
    """The scores that `pack_scores` put into a client's state, as float32: fisher * 2^fisher_exponent."""
    return state["fisher"].float() * 2.0 ** int(state["fisher_exponent"])


def mix(weights: Tensor, old: Tensor, own: Tensor, total: Tensor) -> Tensor:
    """theta = beta * old + (1 - beta) * weights with beta = own / total, wherever `old` is not `weights` rounded.

    `weights` are the server's, of which the first len(own) are parameters; buffers behind them are never mixed.
    `old` is in the type in which the client keeps it. `total` is the sum of all clients' scores as unpacked
    from their states, so that the betas of all clients sum to 1.
    """
    parameters, old = weights[: len(own)], old[: len(own)]
    mixed = (old != parameters.to(old.dtype)) & (own > 0) & (total > 0)
    beta = (own / total).clamp_(0, 1).to(weights.dtype)
    theta = weights.clone()
    theta[: len(own)] = torch.where(mixed, parameters.lerp(old.to(weights.dtype), beta), parameters)
    return theta


class FisherMixing(FedAvg):
    """Federated averaging where clients start from a mix of the server's weights and their own (report 001, eq. 5).

    Before the first round every client scores its weights and sends the scores; the server sends all clients the sum.
    """

    class Settings(AnySettings):
        dtype: Literal["float16", "bfloat16", "float32"] = "float16"
        fisher: FisherSettings = FisherSettings()

    settings: Settings
    sends_once: ClassVar[frozenset[str]] = frozenset({"fisher"})
    changes_frozen: ClassVar[bool] = True
    is_hidden_by_sums: ClassVar[bool] = False  # the scores are sent as they are

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.settings.dtype)

    # At the server.

    @property
    def extras(self) -> Mapping[str, int]:
        return {"fisher": self.scope.weights}

    def start(self, weights: Tensor, preparation: Preparation) -> State:
        clients, size = len(preparation.sizes), self.scope.weights
        transport, traffic = preparation.transport, preparation.traffic
        preparation.send_to_all(weights)
        total = torch.zeros(size)
        about = {"phase": preparation.phase, "version": preparation.version}
        jobs = (Job("contribute", {**about, "client": client}) for client in range(clients))
        for client, answer in enumerate(preparation.engine.map(jobs)):
            check_reply(answer, client)
            scores = answer.numbers(torch.float32)
            check_scores(scores, size, client, clients)
            preparation.keep(client, answer.about["remembers"])
            total += transport.scores(client, scores, traffic, "fisher")
            preparation.progress(client + 1, clients)
        transport.send_extra(range(clients), "fisher", total, traffic)
        return super().start(weights, preparation) | {"fisher": total}

    def send(self, server: State) -> dict[str, Tensor]:
        return {"fisher": server["fisher"]}

    # At a client.

    def contribute(self, data: ClientData, setup: LocalSetup, phase: str) -> tuple[Tensor, State]:
        """A client's scores, as it unpacks them from the state in which it keeps them."""
        address = ("mixing", phase, data.client)
        samples, labels = (torch_generator(setup.seed, *address, what) for what in ("samples", "labels"))
        fisher = self.settings.fisher
        batches = drawn_samples(data, fisher.samples, setup.local.batch_size, samples)
        total, count = sensitivity(
            setup.network, setup.scope.named, batches, fisher.kind, fisher.draws, labels, setup.note
        )
        packed = pack_scores((total / count).cpu(), self.dtype)
        return unpack_scores(packed), packed

    def train(self, task: Task, mine: State) -> tuple[Update, State]:
        weights, total = task.broadcast.weights, task.broadcast.extras["fisher"]
        own = {name: mine[name] for name in ("fisher", "fisher_exponent")}
        start = weights
        if "old" in mine:
            old, scores = mine["old"].to(weights.device), unpack_scores(own).to(weights.device)
            start = mix(weights, old, scores, total.to(weights.device))
        trained = sgd(task, start, mine)
        old = trained.weights[: len(total)].to("cpu", self.dtype, copy=True)  # `update_of` changes them
        return update_of(task, trained, also=_moved(task, start)), {**trained.momentum, **own, "old": old}

    def remembers(self, scope: Scope) -> int:
        return 2 * scope.weights * self.dtype.itemsize + EXPONENT.itemsize


def _moved(task: Task, start: Tensor) -> Mask:
    """The weights under masks where mixing made the client start from another value than it received."""
    scope, weights = task.setup.scope, task.broadcast.weights
    return Mask.pack(shapes_of(scope.sieved.items()), (weights != start)[: scope.sieved_weights])
