"""Fisher-weighted mixing: a client keeps the more of its own weights, the more they matter to its own data.

On receiving the server's weights, client i goes on from

    theta = beta * old + (1 - beta) * weights    with    beta = F_i / sum over all clients j of F_j,

weight by weight, where `old` are its own weights after its last local training and F_i are its own Fisher scores
(`sieve.sensitivity`). Where no client has a score, beta = 0.

Between rounds a client remembers `old` and F_i in a small type. The scores are divided by a power of two, which
costs no precision, so that they fit. The weights are rounded, and rounding must not move what nobody trained:
where `old` is the server's weight rounded alike, the client takes the server's weight itself, to the bit.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedsieve.config import FisherMixingSettings
from fedsieve.errors import RunError
from fedsieve.federate.checks import check_scores
from fedsieve.federate.client import ClientData, ClientState, Context
from fedsieve.federate.exchange import Exchange
from fedsieve.federate.jobs import Answer, Ask, Job
from fedsieve.federate.masks import Holders, drawn_samples
from fedsieve.federate.traffic import Traffic
from fedsieve.profile import section
from fedsieve.randomness import torch_generator
from fedsieve.runs.clients import ClientStore, States, first_damaged
from fedsieve.runs.folder import TOTAL
from fedsieve.runs.sealed import digest_of_tensors, load_sealed, save_sealed
from fedsieve.sieve.mask import Mask, shapes_of
from fedsieve.sieve.sensitivity import sensitivity

FLOAT16_TOP = 15  # scores are brought below 2^15: float16 ends just below 2^16, and rounding up must not reach that
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
    `old` is in the type that the client remembers it in. `total` is the sum of all clients' scores as unpacked
    from their states, so that the betas of all clients sum to 1.
    """
    parameters, old = weights[: len(own)], old[: len(own)]
    mixed = (old != parameters.to(old.dtype)) & (own > 0) & (total > 0)
    beta = (own / total).clamp_(0, 1).to(weights.dtype)
    theta = weights.clone()
    theta[: len(own)] = torch.where(mixed, parameters.lerp(old.to(weights.dtype), beta), parameters)
    return theta


def state_bytes(size: int, weights: int, dtype: torch.dtype) -> int:
    """What a client remembers: `size` scores, their exponent, and `weights` old weights."""
    return (size + weights) * dtype.itemsize + EXPONENT.itemsize


class Mixing:
    """The scores of all clients, made from the weights at the phase's start, and their sum; kept in `folder`."""

    def __init__(
        self,
        settings: FisherMixingSettings,
        context: Context,
        phase: str,
        folder: Path,
        holders: Holders,
        exchange: Exchange,
        ask: Ask,
        note: Callable[[str], None] = lambda _: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        run: str = "",
    ) -> None:
        self.settings, self.context, self.phase, self.folder = settings, context, phase, folder
        self.run = run  # the run's fingerprint
        self.holders, self.exchange, self.ask = holders, exchange, ask
        self.note, self.progress = note, progress
        self.dtype = getattr(torch, settings.dtype)
        self.shapes = shapes_of(context.scope.sieved.items())
        self.scores = ClientStore(folder)
        self.traffic = Traffic()
        self.total = torch.empty(0)

    def begin_phase(self, clients: int, is_new: bool) -> None:
        """Every client scores its weights and sends the scores; the server sends everybody the sum.

        If that was done before an interruption, its outcome is taken from `folder`.
        """
        kept, scope = self.folder / TOTAL, self.context.scope
        start = digest_of_tensors([scope.read()]) if is_new else ""
        of = f"mixing, phase {self.phase}, run {self.run}, start {start}" if is_new else None
        try:
            self._load(kept, of)
        except (ValueError, KeyError):
            if not is_new:
                raise RunError(f"{kept} is damaged, so this run cannot go on; start it anew") from None
        else:
            if is_new:
                self.exchange.versions.saw_all()
            return
        self.scores.clear()
        masks = self.context.masks
        if masks is not None and masks.shared is not None and not masks.needs_everybody:
            self.traffic.down += clients * self.exchange.shared_mask(round=1)
        self.exchange.bring_up_to_date(range(clients), scope.read(), self.traffic)
        total = torch.zeros(scope.weights)
        jobs = (Job("fisher", {"client": client}) for client in range(clients))
        for client, answer in enumerate(self.ask(jobs)):
            if abs(exponent := answer.about["exponent"]) > LARGEST_SCALE:
                raise RunError(f"phase {self.phase}: client {client} scales its sensitivity scores by 2^{exponent}")
            scores = torch.frombuffer(answer.data, dtype=torch.uint8).view(self.dtype)
            packed = {"fisher": scores, "fisher_exponent": torch.tensor(exponent, dtype=EXPONENT)}
            sent = unpack_scores(packed)
            check_scores(sent, scope.weights, client, clients)
            self.scores.write(client, 0, packed)
            total += self.exchange.scores(client, sent, self.traffic, "fisher")
            self.progress(client + 1, clients)
        self.traffic.down += clients * self.exchange.total_scores(total)
        self.scores.flush()
        self.folder.mkdir(parents=True, exist_ok=True)
        about = json.dumps({"of": of, "traffic": self.traffic.to_json(of or "")})
        save_sealed(kept, about, {"vector": total, **self.scores.states().pack()})
        self.total = total

    def _load(self, path: Path, of: str | None) -> None:
        """What was made before; with `of`, only if it was made of that and is whole. ValueError or KeyError if not."""
        text, tensors = load_sealed(path)
        about, states = json.loads(text), States.unpack(tensors)
        if of is not None and (about["of"] != of or first_damaged(self.folder, states) is not None):
            raise ValueError(f"{path} was made of other weights, or the scores beside it are damaged")
        self.traffic = Traffic.from_json(about["traffic"], about["of"])
        self.scores, self.total = ClientStore(self.folder, [states]), tensors["vector"]

    def fisher(self, job: Job) -> Answer:
        """A client's scores as it remembers them."""
        with section("calibrate"):
            packed = pack_scores(self._scored(self.holders.client(job.about["client"])), self.dtype)
        return Answer({"exponent": int(packed["fisher_exponent"])}, packed["fisher"].view(torch.uint8).numpy())

    def _scored(self, data: ClientData) -> Tensor:
        address = ("mixing", self.phase, data.client)
        samples, labels = (torch_generator(self.context.seed, *address, what) for what in ("samples", "labels"))
        fisher, batch_size = self.settings.fisher, self.context.local.batch_size
        batches = drawn_samples(data, fisher.samples, batch_size, samples)
        total, count = sensitivity(
            self.context.network, self.context.scope.named, batches, fisher.kind, fisher.draws, labels, self.note
        )
        return (total / count).cpu()

    # What a client does with them.

    def receive(self, client: int, weights: Tensor, state: ClientState) -> Tensor:
        """The weights that a client starts from, which are those it receives unless it remembers its own."""
        if "old" not in state:
            return weights
        own = unpack_scores(self.scores.read(client)).to(weights.device)
        return mix(weights, state["old"].to(weights.device), own, self.total.to(weights.device))

    def remember(self, trained: Tensor) -> ClientState:
        return {"old": trained[: len(self.total)].to(self.dtype).cpu()}

    def moved(self, weights: Tensor, start: Tensor) -> Mask:
        """Where, of what masks cover, mixing made the client start from another weight than it received."""
        return Mask.pack(self.shapes, (weights != start)[: self.context.scope.sieved_weights])
