"""The clients' side of a phase: what any of them replies to a broadcast, as the bytes that it sends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedsieve.config import ClientSettings
from fedsieve.errors import InputError, RunError, machine_error
from fedsieve.federate.client import Broadcast, ClientData, ClientState, Context, Update, train_client
from fedsieve.federate.exchange import Exchange
from fedsieve.federate.hidden import HiddenUpdates
from fedsieve.federate.jobs import Answer, Job
from fedsieve.federate.linear import is_linear, train_linear
from fedsieve.privacy.zero_sum import Participant, Roster
from fedsieve.profile import section
from fedsieve.randomness import numpy_generator
from fedsieve.runs.clients import read_state, save_state
from fedsieve.sieve.mask import Mask
from fedsieve.wire import WireError

RAISES, GARBLES, SENDS_NAN = INJECTED = ("raises", "garbles its message", "sends what is not a number")

LocalUpdate = Callable[[Broadcast, ClientData, ClientState, Context], tuple[Update, ClientState]]


@dataclass
class Clients:
    settings: ClientSettings
    seed: int
    update: LocalUpdate
    context: Context
    exchange: Exchange
    data_of: Callable[[int], ClientData]
    broadcast: Broadcast | None = field(default=None, init=False)  # of the round under way

    def job(self, client: int, state: Path | None, keep: Path, secret: dict[str, Any] | None = None) -> Job:
        """To let a client reply in the round under way. It finds its `state` in a file, and leaves a new one in `keep`.

        `secret` is what it needs to hide its reply, where replies are hidden.
        """
        assert self.broadcast is not None
        about = {"client": client, "round": self.broadcast.round, "keep": str(keep), "secret": secret}
        masks = self.context.masks
        is_new_mask = masks is not None and masks.settings.has_one_for_all and masks.settings.refresh == "round"
        bits = masks.shared.bits.numpy() if is_new_mask and masks is not None and masks.shared is not None else b""
        is_light = self._quickest_update is train_linear
        return Job("reply", about | {"state": state and str(state)}, bits, is_light)

    def reply(self, job: Job) -> Answer:
        """A client's message, or why there is none; whatever goes wrong at a client is no more than that."""
        about, broadcast = job.about, self.broadcast
        assert broadcast is not None and broadcast.round == about["round"]
        client = about["client"]
        data, remembered = self.data_of(client), read_state(about["state"]) if about["state"] else {}
        failure = self._injected_failure(client, broadcast)
        try:
            update, state = self._updated(broadcast, data, remembered, failure)
            with section("encode"):
                message, encodings, late = self._encoded(update, broadcast, remembered, about["secret"])
        except Exception as error:
            raise_if_ours(error)
            return Answer({"failed": reason_of(error)})
        if failure == GARBLES:
            message[len(message) // 2] ^= 1
        state = {**state, **late}
        digest = save_state(Path(about["keep"]), state) if state else None
        return Answer({"encodings": encodings, "remembers": digest}, message)

    def _updated(
        self, broadcast: Broadcast, data: ClientData, remembered: ClientState, failure: str | None
    ) -> tuple[Update, ClientState]:
        """What a client does by itself: its update, and what it remembers."""
        if failure == RAISES:
            raise RunError("it raised, as clients.fail_rate asks")
        update, state = self._quickest_update(broadcast, data, remembered, self.context)
        if failure == SENDS_NAN:
            next(iter(update.vectors.values()))[0] = torch.nan
        return update, state

    @cached_property
    def _quickest_update(self) -> LocalUpdate:
        return train_linear if self.update is train_client and is_linear(self.context) else self.update

    def _encoded(
        self, update: Update, broadcast: Broadcast, remembered: ClientState, secret: dict[str, Any] | None
    ) -> tuple[bytearray, list[str], ClientState]:
        if secret is None:
            encoded, late = self.exchange.encode_update(update, broadcast.round, remembered)
            return encoded.data, list(encoded.encodings.values()), late
        keys = {int(client): bytes.fromhex(key) for client, key in secret["keys"].items()}
        hidden = HiddenUpdates(Roster(secret["place"], keys), broadcast, self.settings, self.exchange)
        participant = Participant(update.client, bytes.fromhex(secret["private"]))
        return hidden.encode(update, participant), [], {}

    def _injected_failure(self, client: int, broadcast: Broadcast) -> str | None:
        """One of three failures, for a share `clients.fail_rate` of all replies."""
        if not self.settings.fail_rate:
            return None
        generator = numpy_generator(self.seed, "fail", broadcast.phase, broadcast.round, client)
        return INJECTED[generator.integers(3)] if generator.random() < self.settings.fail_rate else None

    def take_mask(self, bits: Any) -> None:
        """The mask that all clients have in this round, in a process that did not make it."""
        masks = self.context.masks
        assert masks is not None
        masks.take_shared(Mask(masks.shapes, torch.frombuffer(bytearray(bits), dtype=torch.uint8)))


def raise_if_ours(error: Exception) -> None:
    """Raise what is no client's fault: a full disk, or too little memory."""
    if (known := machine_error(error)) is not None:
        raise known from error
    if isinstance(error, OSError):
        raise error


def reason_of(error: Exception) -> str:
    is_ours = isinstance(error, RunError | InputError | WireError)
    return str(error) if is_ours else f"{type(error).__name__}: {error}"
