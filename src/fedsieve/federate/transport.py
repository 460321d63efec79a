"""Both ends of the wire in one phase: encodes and decodes the messages between clients and server."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedsieve.config.wire_settings import WireSettings
from fedsieve.federate.mask_source import MaskSource
from fedsieve.federate.norm_limit import all_finite
from fedsieve.federate.traffic import Traffic
from fedsieve.federate.types import EXTRA, Courier, Payload, State, Update, touched_positions
from fedsieve.federate.versions import NOTHING, Versions
from fedsieve.model.flat import Scope
from fedsieve.randomness import torch_generator
from fedsieve.sieve.mask import Mask, packed, unpacked
from fedsieve.wire import (
    Encoded,
    Extent,
    Layout,
    Message,
    Vector,
    WireError,
    decode,
    encode,
    encoded_length,
    layout_fingerprint,
)

WEIGHTS, MASK, ACTIVE, START = "weights", "mask", "active", "start"  # what messages to clients are about
ALL = -1  # instead of a client's number
EVERYTHING = -2  # instead of a version: for clients to whom all weights in scope are new
ALMOST_ALL = 0.95  # if more of the weights changed, their positions may take more bytes than the unchanged values


@dataclass(frozen=True)
class Sent:
    """The length of a message in bytes, and the message itself where there is a courier."""

    length: int
    data: bytes | bytearray


class Transport:
    """The messages of a phase. Both sides know its scope and, once it was sent, the mask that all clients share."""

    def __init__(
        self,
        scope: Scope,
        phase: str,
        settings: WireSettings,
        versions: Versions,
        seed: int,
        masks: MaskSource | None = None,
        payload: Payload | None = None,
        rounds_before: int = 0,
        courier: Courier | None = None,
    ) -> None:
        """`payload` says what a method sends besides the weights; without it, updates are the change of the weights.

        `courier` takes messages to clients that are elsewhere; None: only their lengths matter.
        """
        self.scope, self.phase, self.settings, self.seed = scope, phase, settings, seed
        self.courier = courier
        self.masks = masks  # of the phase, if it has any
        self._widened: tuple[Mask, Tensor] | None = None  # the shared mask, and its bits with those it does not cover
        self.versions, self.started = versions, versions.now - rounds_before  # each round makes a version
        replies, extras = (payload.replies, payload.extras) if payload is not None else ({"delta": scope.size}, {})
        self.replies = sorted(replies, key=lambda name: name != "delta")  # it first: its mask is that of all
        self.reports = sorted(payload.reports) if payload is not None else []
        self.masked = payload.masked if payload is not None else frozenset({"delta"})
        weights, sieved = scope.weights, scope.sieved_weights
        self.rest = scope.outside
        rest = sum(stop - start for start, stop in self.rest)
        vectors = {
            **{
                name: Extent(sieved, size, rounded=weights) if name in self.masked else Extent(size, size)
                for name, size in {**extras, **replies}.items()
            },
            "mask": Extent(sieved, sieved),
            "scores": Extent(sieved, sieved),
            "weights": Extent(scope.size, scope.size),
            "start": Extent(scope.size, scope.size),
            "rest": Extent(rest, rest),
        }
        fingerprint = layout_fingerprint(((entry.name, entry.shape) for entry in scope.entries), phase)
        self.layout = Layout(fingerprint, vectors)

    @cached_property
    def rest_newest(self) -> int:
        """The version that last changed a weight out of scope; these weights are frozen in this phase."""
        return self.versions.newest(self.rest)

    @property
    def longest(self) -> int:
        """Bytes that no message of a client exceeds: values of 8 bytes and positions, for every vector there is."""
        return sum(9 * extent.size for extent in self.layout.vectors.values()) + 2**16

    # Up: a client's update.

    def encode_update(self, update: Update, round: int, state: State) -> tuple[Encoded, State]:
        """The message of an update, and the residual that the client keeps.

        If values are rounded to 8 bits, the rounding error (residual) is added to the client's next update (error
        feedback; Seide et al., Interspeech 2014), so it is sent later and not lost.
        """
        vectors = {name: Vector(update.vectors[name].flatten().cpu()) for name in self.replies}
        numbers = {"client": update.client, "round": round, "samples": update.samples, **update.metrics}
        if update.mask is not None:
            is_known = self._shared is not None and update.mask is self._shared
            seed = None if is_known else update.mask_seed
            for name in self.masked & vectors.keys():  # "delta" says where the values of all of them belong
                how = (is_known, seed) if name == "delta" else (True, None)
                vectors[name] = Vector(vectors[name].values, update.mask.bits, *how)
        if self.settings.values != "int8" or "delta" not in vectors:
            return self._encoded("update", numbers, vectors, self.settings.values), {}
        residuals, wheres = {}, {}
        for name, vector in vectors.items():
            size = self.layout.vectors[name].size
            residual = state.get(_residual(name))
            residuals[name] = torch.zeros(size) if residual is None else residual.clone()
            wheres[name] = slice(None) if vector.bits is None or update.mask is None else update.positions(size)
            vectors[name] = replace(vector, values=vector.values + residuals[name][wheres[name]])
        generator = torch_generator(self.seed, "rounding", self.phase, round, update.client)
        encoded = self._encoded("update", numbers, vectors, "int8", generator)
        arrived = self._decoded(encoded, "update").vectors
        for name, where in wheres.items():
            residuals[name][where] = vectors[name].values - arrived[name].values
        return encoded, {_residual(name): one for name, one in residuals.items()}

    def decode_update(self, data: Any, client: int, round: int, weight: float = 1.0) -> Update:
        """The update in a message; WireError unless it is this client's of this round and all numbers are finite."""
        message = decode(data, self.layout, "update", self.known(), self.redraw)
        numbers = dict(message.numbers)
        if (numbers.pop("client", None), numbers.pop("round", None)) != (client, round):
            raise WireError("the message is of another client or another round")
        samples = numbers.pop("samples", math.nan)
        if not (samples >= 1 and samples.is_integer()) or not all(map(math.isfinite, numbers.values())):
            raise WireError("the message's numbers are not finite, or its samples no whole number")
        if message.vectors.keys() != set(self.replies):
            raise WireError(f"the message has other vectors than {', '.join(sorted(self.replies))}")
        vectors, mask = {}, None
        for name in self.replies:
            vector = message.vectors[name]
            expected = self.settings.values if "delta" in self.replies else "float64"  # sums are exact
            if vector.type != expected:
                raise WireError(f"the message's {name} has values of type {vector.type} instead of {expected}")
            if not all_finite(vector.values):
                raise WireError(f"the message's {name} has values that are not finite")
            vectors[name] = vector.values.to(self.scope.model.vector.device, copy=True)  # no view: it may be kept
            if name == "delta" and vector.bits is not None:
                if self.masks is None:
                    raise WireError("the message is under a mask, and this phase has none")
                mask = self._shared if vector.known else Mask(self.masks.shapes, vector.bits.clone())  # no view
            own = mask.bits if mask is not None and name in self.masked else None
            if vector.bits is not own and (vector.bits is None or own is None or not torch.equal(vector.bits, own)):
                raise WireError(f"the message's {name} is at other positions than its mask says")
        return Update(client, int(samples), vectors, numbers, mask, weight=weight)

    # Down: the weights, masks, and a method's broadcast extras.

    def bring_up_to_date(self, clients: Iterable[int], weights: Tensor, traffic: Traffic) -> None:
        """Send clients the weights that they lack; `weights` are those in scope.

        With `broadcast: delta` each client first sends the version it saw last. Clients that saw the same version
        get the same message.
        """
        made: dict[int, Sent] = {}
        oldest = self.versions.oldest(self.scope.ranges)
        for client in clients:
            seen = self.versions.last_seen(client)
            lacks_all = self.rest_newest <= seen < oldest  # then the message is the same for any such version
            if (key := EVERYTHING if lacks_all else seen) not in made:
                made[key] = self._sent(min(self._broadcasts(seen, weights), key=self._length))
            traffic.down += made[key].length
            if self.settings.broadcast == "delta":
                traffic.up += self._length(_message("request", {"client": client, "seen": seen}))
            if self.courier is not None:
                self.courier.post(client, WEIGHTS, made[key].data, seen)
            self.versions.saw(client)

    def send_mask(
        self, clients: Collection[int], mask: Mask, traffic: Traffic, seed: int | None = None, topic: str = MASK
    ) -> None:
        """Send clients a mask, or only its seed if it follows from one."""
        self._send(clients, topic, _message("mask", {}, {"mask": Vector(bits=mask.bits, seed=seed)}), traffic)

    def mask_message(self, bits: Tensor) -> bytearray:
        return self._encode(_message("mask", {}, {"mask": Vector(bits=bits)}))

    def send_shared_mask(self, clients: Collection[int], round: int, traffic: Traffic) -> None:
        """Send clients the mask that all share in this round."""
        assert self.masks is not None and self.masks.shared is not None
        self.send_mask(clients, self.masks.shared, traffic, self.masks.seed_of(ALL, round))

    def send_start(self, clients: Collection[int], start: Tensor, traffic: Traffic) -> None:
        """Send clients that have the current weights those in scope at the phase's start, as far as they differ.

        A client's own mask that is drawn once is calibrated from these, also if the client takes part later.
        """
        if clients:
            differ = self.versions.of(self.scope.ranges) > self.started
            way = Vector(start.cpu()) if differ.all() else Vector(start.cpu()[differ], packed(differ))
            self._send(clients, START, _message("broadcast", {}, {"start": way}), traffic)

    def send_extra(self, clients: Collection[int], name: str, values: Tensor, traffic: Traffic) -> None:
        """Send clients one of the broadcast extras."""
        if clients:
            ways = [_message("scores", {}, {name: way}) for way in self._ways_of_extra(name, values.cpu())]
            self._send(clients, f"{EXTRA}{name}", min(ways, key=self._length), traffic)

    def _ways_of_extra(self, name: str, values: Tensor) -> list[Vector]:
        ways = [Vector(values)]
        shared, size = self._shared, len(values)
        if shared is not None and name in self.masked:
            ways = [Vector(values[touched_positions(shared, size)], shared.bits, known=True)]
        elif self.masks is not None and name in self.masked:  # nobody needs the others, but whose are which?
            kept = values[: self.scope.sieved_weights] != 0
            tail = torch.ones(size - len(kept), dtype=torch.bool)
            ways.append(Vector(values[torch.cat((kept, tail))], packed(kept)))
        return ways

    def everything(self, published: Mapping[str, Tensor]) -> list[tuple[str, bytes | bytearray]]:
        """All that a client needs that holds only what the run starts from, by topic: what the engine has published."""
        messages = []
        if self._shared is not None:
            messages.append((MASK, _message("mask", {}, {"mask": Vector(bits=self._shared.bits)})))
        for topic, values in published.items():
            if topic.startswith(EXTRA):
                name = topic.removeprefix(EXTRA)
                messages.append((topic, _message("scores", {}, {name: self._ways_of_extra(name, values.cpu())[0]})))
        if self.masks is not None and self.masks.keeps_own and START in published:
            messages.append((START, _message("broadcast", {}, {"start": Vector(published[START].cpu())})))
        encoded = [(topic, self._encode(message)) for topic, message in messages]
        return [*encoded, (WEIGHTS, self.broadcast(NOTHING, published[WEIGHTS]).data)]

    def _send(self, clients: Collection[int], topic: str, message: Message, traffic: Traffic) -> None:
        """Send clients the same message."""
        traffic.down += len(clients) * self._length(message)
        if self.courier is not None:
            data = self._encode(message)
            for client in clients:
                self.courier.post(client, topic, data)

    def _sent(self, message: Message) -> "Sent":
        if self.courier is None:
            return Sent(self._length(message), b"")
        data = self._encode(message)
        return Sent(len(data), data)

    def _encode(self, message: Message) -> bytearray:
        return encode(message, self.layout, compress=self.settings.compress).data

    def broadcast(self, seen: int, weights: Tensor) -> Encoded:
        """The weights in scope that changed after version `seen` (or all of them), and others that changed since."""
        shortest = min(self._broadcasts(seen, weights), key=self._length)
        return encode(shortest, self.layout, compress=self.settings.compress)

    def _broadcasts(self, seen: int, weights: Tensor) -> list[Message]:
        """Equivalent messages, of which the shortest is sent."""
        rest, numbers = {}, {"version": self.versions.now, "since": seen}
        if self.rest_newest > seen:
            vector, lacks = self.scope.model.vector, self.versions.of(self.rest) > seen
            values = torch.cat([vector[start:stop].cpu() for start, stop in self.rest])
            rest["rest"] = Vector(values) if lacks.all() else Vector(values[lacks], packed(lacks))
        ways = self._ways(seen, weights.cpu())
        return [_message("broadcast", numbers, {"weights": way, **rest}) for way in ways]

    def _ways(self, seen: int, weights: Tensor) -> list[Vector]:
        """Ways to send what changed after version `seen`: with its positions, as part of a known mask, or all."""
        if self.settings.broadcast == "full" or self.versions.oldest(self.scope.ranges) > seen:
            return [Vector(weights)]
        lacks = self.versions.of(self.scope.ranges) > seen
        bits, may_change = packed(lacks), self._may_change
        ways = [Vector(weights[lacks], bits)]
        if may_change is not None and not (bits & ~may_change).any():
            ways.append(Vector(weights[unpacked(may_change, len(weights))], may_change, known=True))
        elif int(lacks.count_nonzero()) > ALMOST_ALL * len(lacks):
            ways.append(Vector(weights))
        return ways

    # Up: what clients report besides updates.

    def loss(self, client: int, loss: float) -> int:
        """The length in bytes of the message with a candidate's loss."""
        return self._length(_message("loss", {"client": client, "loss": loss}))

    def encode_loss(self, client: int, loss: float) -> bytearray:
        return self._encode(_message("loss", {"client": client, "loss": loss}))

    def decode_loss(self, data: Any, client: int) -> float:
        """The loss in a message; WireError unless it is this client's."""
        return self._of(decode(data, self.layout, "loss"), client).numbers.get("loss", math.nan)

    def scores(self, client: int, scores: Tensor, traffic: Traffic, name: str = "scores") -> Tensor:
        """A client's sensitivity scores as they arrive at the server: of the weights under masks, or ("fisher") of all.

        They span too many powers of ten for float16 and for blocks of int8, so if values are rounded, scores become
        bfloat16.
        """
        data = self.encode_scores(client, scores, name)
        traffic.up += len(data)
        return self.decode_scores(data, client, name).to(scores.device)

    def encode_scores(self, client: int, scores: Tensor, name: str = "scores") -> bytearray:
        kind = "float32" if self.settings.values == "float32" else "bfloat16"
        return self._encoded("scores", {"client": client}, {name: Vector(scores.cpu())}, kind).data

    def decode_scores(self, data: Any, client: int, name: str = "scores") -> Tensor:
        """The scores in a message; WireError unless they are this client's."""
        message = self._of(decode(data, self.layout, "scores", self.known(), self.redraw), client)
        vector = message.vectors.get(name)
        if vector is None or vector.bits is not None:
            raise WireError(f"the message has not all {name} of the client")
        return vector.values

    def _of(self, message: Message, client: int) -> Message:
        if message.numbers.get("client") != client:
            raise WireError("the message is of another client")
        return message

    def entries(self, name: str, mask: Mask | None) -> int:
        """How many values of a vector a client under this mask sends."""
        extent = self.layout.vectors[name]
        return extent.size if mask is None or name not in self.masked else mask.active + extent.tail

    # What both sides know.

    @property
    def _shared(self) -> Mask | None:
        """The current round's mask that all clients share and the server knows, if there is one."""
        return self.masks.shared if self.masks is not None else None

    @property
    def _may_change(self) -> Tensor | None:
        """The packed bits of all weights that clients may change in this round, if they share a mask."""
        shared = self._shared
        if shared is None or self.scope.size == shared.size:
            return shared.bits if shared is not None else None
        if self._widened is None or self._widened[0] is not shared:
            outside = torch.ones(self.scope.size - shared.size, dtype=torch.bool)
            self._widened = shared, packed(torch.cat((shared.unpack(), outside)))
        return self._widened[1]

    def known(self) -> dict[str, Tensor]:
        """The packed bits of vectors whose positions need not be sent."""
        shared, may_change = self._shared, self._may_change
        if shared is None or may_change is None:
            return {}
        return {**dict.fromkeys(self.masked, shared.bits), "weights": may_change}

    def redraw(self, seed: int) -> Tensor:
        """The packed bits of the mask that follows from a seed."""
        if self.masks is None or self.masks.seed_of(ALL, 1) is None:
            raise WireError("the message draws a mask from a seed, and masks of this phase have none")
        return self.masks.drawn(seed).bits

    def _encoded(
        self,
        kind: str,
        numbers: Mapping[str, float],
        vectors: Mapping[str, Vector],
        values: str = "float32",
        generator: torch.Generator | None = None,
    ) -> Encoded:
        return encode(_message(kind, numbers, vectors), self.layout, values, self.settings.compress, generator)

    def _length(self, message: Message) -> int:
        return encoded_length(message, self.layout, compress=self.settings.compress)

    def _decoded(self, encoded: Encoded, kind: str) -> Message:
        return decode(encoded.data, self.layout, kind, self.known(), self.redraw)


def _residual(name: str) -> str:
    return "residual" if name == "delta" else f"residual_{name}"


def _message(kind: str, numbers: Mapping[str, float], vectors: Mapping[str, Vector] | None = None) -> Message:
    return Message(kind, {name: float(number) for name, number in numbers.items()}, vectors or {})
