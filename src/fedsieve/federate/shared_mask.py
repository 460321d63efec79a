"""A mask that all clients share: calibrated at the server, or by all clients together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedsieve.federate.checks import check_reply, check_scores
from fedsieve.federate.mask_source import Address, MaskFiles, MaskSource
from fedsieve.federate.traffic import Traffic
from fedsieve.federate.transport import ACTIVE, Transport
from fedsieve.federate.types import Broadcast, ClientData, Engine, Job
from fedsieve.files.atomic import write_text
from fedsieve.observe.profile import section
from fedsieve.sieve.mask import Mask

SHARED, BYTES = "shared", "bytes.json"  # names of files: the mask, and the bytes sent to make it


@dataclass
class SharedMasks:
    """Makes the mask that all clients of a phase share: once, or in every round."""

    source: MaskSource
    phase: int  # its index among the phases
    engine: Engine
    transport: Transport
    sizes: np.ndarray  # samples of each client
    server_data: Callable[[], ClientData]  # images that the server has, for `scope: server`
    progress: Callable[[int, int], None] = lambda done, total: None
    traffic: Traffic = field(default_factory=Traffic, init=False)  # of making the newest mask

    @property
    def needs_everybody(self) -> bool:
        """Whether all clients, chosen or not, take part in making the mask."""
        return self.source.settings.scope == "federated" and self.source.settings.looks_at_data

    def begin_phase(self, is_new: bool) -> None:
        """Make the mask that all clients share in all rounds, if there is one, or load it from the run's folder."""
        source, settings = self.source, self.source.settings
        if settings.file is not None:
            file = settings.file  # the run keeps a copy, so the original may change
            source.share(source.kept(SHARED, lambda: Mask.load(file)))
        elif settings.is_shared and settings.refresh == "once":
            make = lambda: self._made(source.start, counted=is_new)  # noqa: E731
            is_counted = is_new and self.needs_everybody and source.files is not None
            source.share(self._counted(make) if is_counted else source.kept(SHARED, make))
        if is_new and self.needs_everybody and settings.refresh == "once":
            self.transport.versions.saw_all()  # even if that was before an interruption

    def begin_round(self, broadcast: Broadcast) -> None:
        """Make the mask that all clients share in this round, if it is a new one."""
        settings = self.source.settings
        if settings.is_shared and settings.refresh == "round":
            self.traffic, self.source.shared = Traffic(), None
            self.source.share(self._made(broadcast.weights, broadcast.round))

    def traffic_of(self, round: int) -> Traffic:
        """The traffic of making masks, counted in the round that begins with it."""
        return self.traffic if round == 1 or self.source.settings.refresh == "round" else Traffic()

    def lacking(self, clients: list[int], newcomers: list[int]) -> list[int]:
        """Those of a round's clients that must be sent the mask; `newcomers` are in their first round of the phase."""
        if self.source.shared is None or not self.source.settings.has_one_for_all:
            return []
        if self.source.settings.refresh == "round":  # a new one: either all clients made it, or none of these has it
            return [] if self.needs_everybody else clients
        return newcomers

    def _made(self, weights: Tensor | None, *where: int, counted: bool = True) -> Mask:
        source = self.source
        if self.needs_everybody:
            return self._federated(weights, *where, counted=counted)
        sources = [self.server_data()] if source.settings.looks_at_data else []
        return source.calibrated(sources, weights, *where)

    def _federated(self, weights: Tensor | None, *where: int, counted: bool) -> Mask:
        """A mask from the scores of all clients; each sends the sum over its own samples."""
        source, transport, clients = self.source, self.transport, len(self.sizes)
        settings, traffic = source.settings, self.traffic if counted else Traffic()
        address = source.address(0 if clients == 1 else "all", *where)
        samples = np.minimum(self.sizes, settings.fisher.samples).tolist()
        total_samples, done = settings.calibration_rounds * sum(samples), 0

        def scores(round: int, active: Mask) -> Tensor:
            nonlocal done
            total, count = None, 0
            if round > 1:
                transport.send_mask(range(clients), active, traffic, topic=ACTIVE)
            for client, part in enumerate(self._answers(address, round, active)):
                part = transport.scores(client, part, traffic) if counted else part
                total = part.clone() if total is None else total.add_(part)
                count += self._gradients_of(samples[client])
                done += samples[client]
                self.progress(done, total_samples)
            assert total is not None
            return total / count

        with section("calibrate"):
            assert weights is not None
            self.engine.publish({"weights": weights})
            source.scope.write(weights)
            if counted:
                transport.bring_up_to_date(range(clients), weights, traffic)
            mask = source.chosen(scores, address)
            transport.send_mask(range(clients), mask, traffic)
            return mask

    def _answers(self, address: Address, round: int, active: Mask) -> Iterator[Tensor]:
        """Each client's sum of its samples' sensitivities or gradients."""
        clients, bits = len(self.sizes), active.bits.numpy()
        about = {"phase": self.phase, "address": address, "round": round}
        jobs = (Job("scores", {**about, "client": client}, bits) for client in range(clients))
        device = self.source.scope.model.vector.device
        for client, answer in enumerate(self.engine.map(jobs)):
            check_reply(answer, client)
            scores = answer.numbers(torch.float32)
            check_scores(scores, active.size, client, clients, self.source.settings.looks_at or "sensitivity")
            yield scores.to(device)

    def _gradients_of(self, samples: int) -> int:
        """How many gradients, squared or not, a client sums for this many samples; the server can compute it."""
        fisher = self.source.settings.fisher
        if self.source.settings.looks_at == "gradients":
            return samples
        counts = {"exact": samples * fisher.draws, "empirical": samples, "batch": -(-samples // self.source.batch_size)}
        return counts[fisher.kind]

    def _counted(self, make: Callable[[], Mask]) -> Mask:
        """The mask; the traffic of making it, not yet counted, is kept in a file next to it."""
        files = self.source.files
        assert isinstance(files, MaskFiles)
        path = files.folder / BYTES
        try:
            self.traffic = Traffic.from_json(path.read_text(encoding="utf-8"), files.origin)
        except (OSError, ValueError):
            path.with_name(f"{SHARED}.safetensors").unlink(missing_ok=True)  # else the mask is not made again

        def made() -> Mask:
            self.traffic = Traffic()
            mask = make()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, self.traffic.to_json(files.origin) + "\n")  # before the mask, for the same reason
            return mask

        return files.kept(SHARED, made)
