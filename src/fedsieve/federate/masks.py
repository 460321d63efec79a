"""The masks of a phase: who calibrates them, from whose data, and when anew."""

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.config import MaskSettings
from fedsieve.errors import InputError, MachineError, RunError, WorkerError
from fedsieve.federate.checks import check_scores
from fedsieve.federate.client import Broadcast, ClientData
from fedsieve.federate.jobs import Answer, Ask, Job
from fedsieve.federate.traffic import Traffic
from fedsieve.model.flat import Scope
from fedsieve.profile import section
from fedsieve.randomness import seed_at, torch_generator
from fedsieve.runs.atomic import write_text
from fedsieve.runs.sealed import digest_of_tensors
from fedsieve.sieve.calibrate import calibrate_mask, damped_sensitivity
from fedsieve.sieve.choose import active_range
from fedsieve.sieve.mask import Mask, shapes_of

if TYPE_CHECKING:
    from fedsieve.federate.exchange import Exchange

SHARED, BYTES = "shared", "bytes.json"  # names of files: a mask for all clients, and what making it cost
Place = tuple[int | str, ...]  # the beginning of the address of a mask's randomness


class Holders(Protocol):
    """Whose data a mask that all clients share is calibrated from."""

    @property
    def sizes(self) -> np.ndarray: ...  # samples of each client
    def client(self, client: int) -> ClientData: ...
    def server(self) -> ClientData: ...


class Masks:
    """One mask for all clients, or each client's own; drawn once from the weights at the phase's start, or anew.

    A mask drawn once is kept in `folder` as bits and found again, whoever asks and whenever. Nothing depends on
    the order of asking: every draw has an address.
    """

    def __init__(
        self,
        settings: MaskSettings,
        scope: Scope,
        network: nn.Module,
        batch_size: int,
        phase: str,
        seed: int,
        start: Tensor,
        holders: Holders,
        folder: Path | None = None,
        ask: Ask | None = None,
        note: Callable[[str], None] = lambda _: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        run: str = "",
    ) -> None:
        self.settings, self.scope, self.network = settings, scope, network
        self.batch_size, self.phase, self.seed = batch_size, phase, seed
        self.start, self.run = start, run  # the weights in scope at the phase's start; the run's fingerprint
        self.holders, self.folder, self.note, self.progress = holders, folder, note, progress
        self.ask: Ask = ask or (lambda jobs: (self.scores(job) for job in jobs))  # who lets clients score their weights
        self.shapes = shapes_of(scope.sieved.items())
        self.exchange: Exchange | None = None  # how clients send their scores; None: nobody counts bytes
        self.traffic = Traffic()  # of making the mask that all clients share: once, or in the round under way
        self._shared: Mask | None = None  # of the round under way
        self._last_drawn: tuple[int, Mask] | None = None
        if settings.calibration_rounds > 1 and not settings.by_sensitivity and settings.file is None:
            self.note(f"calibration_rounds changes nothing for rule {settings.rule}; one is enough")

    def begin_phase(self) -> Mask | None:
        """The mask that all clients have in all rounds, if there is one."""
        if self.settings.file is not None:
            file = self.settings.file  # its copy stays with the run, whatever becomes of it
            self._shared = self._kept(SHARED, lambda: Mask.load(file))
        elif self.settings.is_shared and self.settings.refresh == "once":
            make = lambda: self._calibrated(self._sources(), self.start)  # noqa: E731
            counted = self.folder / BYTES if self.folder and self.exchange and self.needs_everybody else None
            self._shared = self._kept(SHARED, make) if counted is None else self._counted(counted, make)
        return self._shared

    def begin_round(self, broadcast: Broadcast) -> None:
        """Before any client of a round: the mask that all of them share in it, if they do."""
        if self.settings.is_shared and self.settings.refresh == "round":
            self.traffic, self._shared = Traffic(), None
            self._shared = self._calibrated(self._sources(), broadcast.weights, broadcast.round)

    def mask(self, data: ClientData, broadcast: Broadcast, epoch: int = 0) -> Mask:
        """The mask of a client for one of its local epochs (the first unless masks are drawn for each)."""
        if self.settings.refresh == "epoch":
            sources = [data] if not self.settings.is_shared else []
            now = broadcast.weights if epoch == 0 else None  # later on, as this client has trained them
            return self._calibrated(sources, now, broadcast.round, epoch)
        if self.settings.is_shared:
            assert self._shared is not None
            return self._shared
        if self.settings.refresh == "round":
            return self._calibrated([data], broadcast.weights, broadcast.round)
        return self._kept(f"client-{data.client:06d}", lambda: self._calibrated([data], self.start))

    def take_shared(self, mask: Mask) -> None:
        """The mask that all clients share in the round under way, made by another process."""
        if self._shared is None or not torch.equal(self._shared.bits, mask.bits):
            self._shared = mask

    @property
    def shared(self) -> Mask | None:
        """The mask of the round under way that all clients have and the server knows, if there is one."""
        return self._shared if self.settings.has_one_for_all else None

    def known(self, client: int, round: int) -> Mask | None:
        """A client's mask in the round under way, if the server can tell: all share it, or it follows from a seed."""
        seed = self.seed_of(client, round)
        return self.shared if self.shared is not None else None if seed is None else self.drawn(seed)

    @property
    def leaks(self) -> bool:
        """Whether momentum goes on moving weights that a newer mask freezes."""
        return self.settings.handover == "leak"

    @cached_property
    def active_range(self) -> tuple[int, int]:
        """The fewest and the most weights that a mask of the phase leaves active when it is drawn."""
        settings = self.settings
        assert settings.sparsity is not None  # a mask from a file is known
        return active_range(
            1 - settings.sparsity,
            self.shapes,
            unit=settings.unit,
            across=settings.across,
            keep_alive=settings.keep_alive,
            draw=settings.draw,
        )

    # A random mask is as good as the seed that it is drawn from.

    def seed_of(self, client: int, round: int) -> int | None:
        """The seed of a client's mask in a round; None unless it follows from a seed alone."""
        settings = self.settings
        if settings.rule != "random" or settings.file is not None or settings.refresh == "epoch":
            return None
        address = (round,) if settings.refresh == "round" else ()
        return seed_at(self.seed, *self._place("all" if settings.is_shared else client, *address))

    def drawn(self, seed: int) -> Mask:
        """The random mask of a seed."""
        if self._last_drawn is None or self._last_drawn[0] != seed:
            generator = torch.Generator().manual_seed(seed)
            mask = calibrate_mask(self.shapes, torch.empty(0), _no_scores, self.settings, generator)
            self._last_drawn = seed, mask
        return self._last_drawn[1]

    # How a mask comes about.

    def _sources(self) -> list[ClientData] | None:
        """Whose data a mask for all is made from; None: that of all clients."""
        if not self.settings.by_sensitivity:
            return []
        return None if self.settings.scope == "federated" else [self.holders.server()]

    def _calibrated(self, sources: list[ClientData] | None, weights: Tensor | None, *address: int) -> Mask:
        """From the data of `sources` (None: of all clients), at `weights` (None: as the network stands)."""
        with section("calibrate"):
            if weights is not None:
                self.scope.write(weights)
            return self._calibrated_here(sources, *address)

    def _calibrated_here(self, sources: list[ClientData] | None, *address: int) -> Mask:
        settings = self.settings
        sizes = self.holders.sizes if sources is None else np.array([len(data) for data in sources], dtype=np.int64)
        exchange = self.exchange if sources is None else None  # else nobody sends anything
        if exchange is not None:
            exchange.bring_up_to_date(range(len(sizes)), self.scope.read(), self.traffic)
        counted = np.minimum(sizes, settings.fisher.samples).tolist()
        total_samples, done = settings.calibration_rounds * sum(counted), 0
        alone = 0 if sources is None else sources[0].client if sources else None
        who = alone if len(sizes) == 1 and alone is not None else "all"
        place = self._place(who, *address)

        def scored(round: int, active: Mask) -> Tensor:
            nonlocal done
            total, count = None, 0
            if exchange is not None and round > 1:
                self.traffic.down += len(sizes) * exchange.mask(active)
            for samples, (client, part, number) in zip(
                counted, self._scores(sources, place, round, active), strict=True
            ):
                if exchange is not None:
                    part = exchange.scores(client, part, self.traffic)
                total, count = part.clone() if total is None else total.add_(part), count + number
                done += samples
                if settings.is_shared:  # a bar for each client's own would only flicker
                    self.progress(done, total_samples)
            assert total is not None
            return total / count

        vector = torch.cat([one.detach().flatten() for one in self.scope.sieved.values()])
        try:
            mask = calibrate_mask(self.shapes, vector, scored, settings, torch_generator(self.seed, *place))
        except (MachineError, WorkerError):
            raise
        except RunError as error:
            whose = "all clients" if settings.is_shared else f"client {who}"
            raise RunError(f"phase {self.phase}, mask of {whose}: {error}") from None
        if exchange is not None:
            self.traffic.down += len(sizes) * exchange.mask(mask)
        return mask

    def _scores(
        self, sources: list[ClientData] | None, place: Place, round: int, active: Mask
    ) -> Iterator[tuple[int, Tensor, int]]:
        """Each client's number, the sum of its samples' sensitivities, and how many samples these were."""
        if sources is not None:
            for data in sources:
                yield data.client, *self._scored(data, place, round, active)
            return
        everybody, bits = range(len(self.holders.sizes)), active.bits.numpy()
        jobs = (Job("scores", {"client": client, "place": place, "round": round}, bits) for client in everybody)
        device = self.scope.model.vector.device
        for client, answer in zip(everybody, self.ask(jobs), strict=True):
            scores = torch.frombuffer(answer.data, dtype=torch.float32)
            check_scores(scores, active.size, client, len(everybody))
            yield client, scores.to(device), self._gradients_of(int(self.holders.sizes[client]))

    def _gradients_of(self, samples: int) -> int:
        """How many squared gradients a client with so many samples adds up: the server need not ask."""
        fisher, counted = self.settings.fisher, min(samples, self.settings.fisher.samples)
        counts = {"exact": counted * fisher.draws, "empirical": counted, "batch": -(-counted // self.batch_size)}
        return counts[fisher.kind]

    def scores(self, job: Job) -> Answer:
        """What one client contributes to a mask that all share."""
        client, place, round = job.about["client"], tuple(job.about["place"]), job.about["round"]
        active = Mask(self.shapes, torch.frombuffer(bytearray(job.data), dtype=torch.uint8))
        total, _ = self._scored(self.holders.client(client), place, round, active)
        return Answer({}, total.cpu().numpy())

    def _scored(self, data: ClientData, place: Place, round: int, active: Mask) -> tuple[Tensor, int]:
        """`damped_sensitivity` from fresh samples of a client."""
        settings, generator = self.settings, torch_generator(self.seed, *place, round, "labels", data.client)
        batches = self._samples(data, place, round)
        return damped_sensitivity(
            self.network, self.scope.sieved, batches, settings.fisher, active, settings.damping, generator, self.note
        )

    @property
    def needs_everybody(self) -> bool:
        """Whether all clients, chosen or not, take part in making the mask."""
        return self.settings.scope == "federated" and self.settings.by_sensitivity

    def _place(self, who: int | str, *address: int) -> Place:
        return ("mask", self.phase, who, *address)

    def _samples(self, data: ClientData, place: Place, round: int) -> Iterator[tuple[Tensor, Tensor]]:
        asked = self.settings.fisher.samples
        if asked > len(data):
            self.note(f"phase {self.phase}: who has fewer than fisher.samples ({asked}) scores with all of them")
        generator = torch_generator(self.seed, *place, round, "samples", data.client)
        return drawn_samples(data, asked, self.batch_size, generator)

    @cached_property
    def _origin(self) -> str:
        """What all masks that are drawn once follow from, beside the settings."""
        start = digest_of_tensors([self.start]) if self.settings.needs_start else ""
        return f"phase {self.phase}, seed {self.seed}, run {self.run}, start {start}"

    def _kept(self, name: str, make: Callable[[], Mask]) -> Mask:
        """The mask in a file, or a new one: also if the file is damaged, or holds the mask of someone else."""
        if self.folder is None:
            return make()
        path, of = self.folder / f"{name}.safetensors", f"{name}, {self._origin}"
        if path.exists():
            try:
                return Mask.load(path, of)
            except InputError:
                self.note(f"{path} is damaged, or was made from other data or weights; calibrating the mask again")
        mask = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        mask.save(path, of)
        return mask

    def _counted(self, path: Path, make: Callable[[], Mask]) -> Mask:
        """The mask for all clients, while what making it cost is yet to be counted: it is kept in a file beside it."""
        try:
            self.traffic = Traffic.from_json(path.read_text(encoding="utf-8"), self._origin)
        except (OSError, ValueError):
            path.with_name(f"{SHARED}.safetensors").unlink(missing_ok=True)  # a mask that is there is not made again

        def made() -> Mask:
            self.traffic = Traffic()
            mask = make()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, self.traffic.to_json(self._origin) + "\n")  # first, for the same reason
            return mask

        return self._kept(SHARED, made)


def drawn_samples(
    data: ClientData, asked: int, batch_size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """A fresh draw of a client's samples, in batches; all of them if it has no more than `asked`."""
    order = torch.randperm(len(data), generator=generator)[:asked]
    for positions in order.split(batch_size):
        yield data.inputs(positions, generator), data.labels[positions]


def _no_scores(round: int, active: Mask) -> Tensor:
    raise AssertionError("a random mask looks at no sensitivity")
