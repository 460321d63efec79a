"""A round of secure aggregation: federated averaging in which the server sees only the sum of the updates.

Each client sends the change of its weights times its weight in averages, then the other vectors of its method as they
are, then the few numbers that the server needs sums of: its weight, its samples, its loss times its samples, its drift,
and what else the method reports times its weight. All are hidden by noise that cancels in the sum
(`privacy/zero_sum.py`). So the server learns sum_k a_k delta_k and sum_k a_k, whose ratio is the average, but no
client's own update. Of the other vectors it learns the unweighted mean.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.config.client_settings import ClientSettings
from fedsieve.errors import RunError
from fedsieve.federate.traffic import Traffic
from fedsieve.federate.transport import ALL, Transport
from fedsieve.federate.types import Broadcast, Update
from fedsieve.federate.weighting import WEIGHTINGS
from fedsieve.privacy.zero_sum import (
    FixedPointError,
    Participant,
    Roster,
    ZeroSum,
    from_fixed_point,
    to_fixed_point,
)
from fedsieve.sieve.mask import Mask
from fedsieve.wire import Extent, Layout, Message, Vector, decode, encode

SUMS = ("weight", "samples", "loss", "drift")  # sent after the update
KEYS = "keys"  # the topic of the message with all clients' public keys


class SecureUpdates:
    """What a client of a secure round needs to know: who takes part, and the layout of a message."""

    def __init__(self, roster: Roster, broadcast: Broadcast, clients: ClientSettings, transport: Transport) -> None:
        assert clients.zero_sum is not None
        self.roster, self.broadcast, self.count = roster, broadcast, len(roster.keys)
        self.bits, self.weight_of = clients.zero_sum.bits, WEIGHTINGS[clients.weighting]
        self.mask: Mask | None = transport.masks.shared if transport.masks is not None else None
        self.lengths = {name: transport.entries(name, self.mask) for name in transport.replies}
        self.sums = (*SUMS, *transport.reports)
        self.size = sum(self.lengths.values()) + len(self.sums)
        sizes = {"secure": self.size, "key": 4, "keys": 5 * self.count}  # a key is four numbers, five with its client
        vectors = {name: Extent(size, size) for name, size in sizes.items()}
        self.layout = Layout(transport.layout.fingerprint, vectors)

    def encode(self, update: Update, participant: Participant) -> bytearray:
        """A client's message; it reveals nothing without those of all others."""
        if update.mask is not self.mask:
            raise RunError("its mask is not the one that all share")
        weight, metrics = self.weight_of(update.samples), update.metrics
        sums = [weight, update.samples, update.samples * metrics["train_loss"], metrics["drift"]]
        sums += [weight * metrics[name] for name in self.sums[len(SUMS) :]]
        vectors = {name: vector.cpu().double() for name, vector in update.vectors.items()}
        vectors["delta"] *= weight
        ordered = [vectors[name] for name in self.lengths]
        values = torch.cat((*ordered, torch.tensor(sums, dtype=torch.float64)))
        try:
            fixed = to_fixed_point(values, self.bits, self.count)
        except FixedPointError as error:
            raise RunError(f"{error}; set clients.secure={{zero_sum: {{bits: N}}}} with a smaller N") from None
        secured = participant.masked(fixed, self.roster)
        return self._encoded("secure", secured, {"client": update.client, "roster": self.roster.digest})

    def _encoded(self, name: str, values: Tensor, numbers: dict[str, float]) -> bytearray:
        kind = "update" if name == "secure" else "keys"
        numbers = {key: float(value) for key, value in numbers.items()}
        return encode(Message(kind, numbers, {name: Vector(values)}), self.layout).data


def secure_message(
    update: Update, broadcast: Broadcast, clients: ClientSettings, transport: Transport, secret: dict[str, Any]
) -> bytearray:
    """A client's message: `secret` are the place, all public keys, and this client's private key."""
    keys = {int(client): bytes.fromhex(key) for client, key in secret["keys"].items()}
    secure = SecureUpdates(Roster(secret["place"], keys), broadcast, clients, transport)
    return secure.encode(update, Participant(update.client, bytes.fromhex(secret["private"])))


class DepartedError(RunError):
    """Clients of a secure round left, or sent what cannot be used: its sum is noise."""

    def __init__(self, place: str, reasons: Mapping[int, str]) -> None:
        super().__init__(f"{place}: clients {', '.join(map(str, reasons))} left")
        self.reasons = reasons


class SecureRound(SecureUpdates):
    """The server's side: `add` each message as it arrives, then `finish`."""

    def __init__(
        self,
        roster: Roster,
        samples: int,
        broadcast: Broadcast,
        clients: ClientSettings,
        transport: Transport,
    ) -> None:
        """`samples` is the total over all clients of the roster."""
        self.samples = samples
        super().__init__(roster, broadcast, clients, transport)
        self.sum = ZeroSum(roster, self.size)
        self.traffic = Traffic()
        self._exchange_keys(transport)

    @property
    def public(self) -> dict[str, str]:
        """All clients' public keys, for JSON."""
        return {str(one): key.hex() for one, key in self.roster.keys.items()}

    def _exchange_keys(self, transport: Transport) -> None:
        """Every client has sent its public key, and receives those of all."""
        keys = {client: _numbers(key) for client, key in self.roster.keys.items()}
        listed = torch.cat([torch.cat((torch.tensor([client]), key)) for client, key in keys.items()])
        message = self._encoded("keys", listed, {})
        for client, key in keys.items():
            self.traffic.up += len(self._encoded("key", key, {"client": client}))
            self.traffic.down += len(message)
            if transport.courier is not None:
                transport.courier.post(client, KEYS, message)

    def add(self, client: int, data: Any) -> None:
        message = decode(data, self.layout, "update")
        if message.numbers.get("client") != client:
            raise RunError("its message is of another client")
        self.sum.add(client, int(message.numbers["roster"]), message.vectors["secure"].values)

    def finish(self) -> Update:
        """One update instead of all: their average, with metrics averaged over the clients."""
        total = from_fixed_point(self.sum.finish(), self.bits)
        *parts, last = total.split([*self.lengths.values(), len(self.sums)])
        sums = dict(zip(self.sums, last.tolist(), strict=True))
        self._check(sums)
        metrics = {"train_loss": sums["loss"] / sums["samples"], "drift": sums["drift"] / self.count}
        metrics |= {name: sums[name] / sums["weight"] for name in self.sums[len(SUMS) :]}
        if self.mask is not None:
            metrics["density"] = self.mask.density
        device = self.broadcast.weights.device
        vectors = {
            name: (part / (sums["weight"] if name == "delta" else self.count)).to(device)
            for name, part in zip(self.lengths, parts, strict=True)
        }
        return Update(ALL, 1, vectors, metrics, self.mask, clients=self.count)

    def _check(self, sums: dict[str, float]) -> None:
        """RunError if the clients' sums are impossible; the server cannot see which client sent a wrong number."""
        if sums["samples"] != self.samples:
            what = f"the clients report {sums['samples']:g} samples in total but have {self.samples}"
        elif not sums["weight"] > 0 or min(sums["loss"], sums["drift"]) < 0:
            what = "the clients' weights, losses or drifts do not add up to a positive number"
        else:
            return
        raise RunError(f"{self.roster.context}: {what}; nothing was aggregated")


def _numbers(key: bytes) -> Tensor:
    """A key as four int64 numbers."""
    return torch.from_numpy(np.frombuffer(key, dtype="<i8").copy())


def keys_in(data: Any, clients: int, transport: Transport) -> dict[int, bytes]:
    """All clients' public keys, from the message that `SecureRound` sends."""
    layout = Layout(transport.layout.fingerprint, {"keys": Extent(5 * clients, 5 * clients)})
    rows = decode(data, layout, "keys").vectors["keys"].values.view(clients, 5)
    return {int(row[0]): row[1:].numpy().tobytes() for row in rows}
