"""The masks of a phase: which weights each client may change, and when that changes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from fedsieve.config.mask_settings import MaskSettings
from fedsieve.errors import InputError, MachineError, RunError, WorkerError
from fedsieve.federate.types import Broadcast, ClientData
from fedsieve.files.sealed import digest_of_tensors
from fedsieve.model.flat import Scope
from fedsieve.observe.profile import section
from fedsieve.randomness import seed_at, torch_generator
from fedsieve.sieve.calibrate import calibrate_mask, damped_gradients, damped_sensitivity
from fedsieve.sieve.choose import active_range
from fedsieve.sieve.mask import Mask, Shapes, shapes_of

Address = tuple[int | str, ...]  # of a mask's randomness
Scores = Callable[[int, Mask], Tensor]  # a calibration round's sensitivities or gradients, inactive weights damped


class KeptMasks(Protocol):
    """Where masks that are drawn once are kept."""

    def kept(self, name: str, make: Callable[[], Mask]) -> Mask: ...


@dataclass
class MaskSource:
    """One mask for all clients, or each client's own; drawn once from the weights at the phase's start, or repeatedly.

    Every draw has an address, so the order of calls does not matter. A mask that all clients share is made by the
    server (`shared_mask.py`) and given to `share`; a client's own mask is made by the process that trains the client.
    """

    settings: MaskSettings
    scope: Scope
    network: nn.Module
    batch_size: int
    phase: str
    seed: int
    start: Tensor | None = None  # the weights in scope at the phase's start, if masks that are drawn once need them
    files: KeptMasks | None = None  # where masks that are drawn once are kept; None: nowhere
    note: Callable[[str], None] = lambda _: None
    shared: Mask | None = field(default=None, init=False)  # the current round's mask, if all clients share one

    @cached_property
    def shapes(self) -> Shapes:
        return shapes_of(self.scope.sieved.items())

    def share(self, mask: Mask) -> None:
        """Give all clients this mask. If it equals the last one, that object stays: messages compare by identity."""
        if self.shared is None or not torch.equal(self.shared.bits, mask.bits):
            self.shared = mask

    def mask(self, data: ClientData, broadcast: Broadcast, epoch: int = 0) -> Mask:
        """A client's mask in a local epoch; the same in all of them unless masks are drawn for each (`refresh`)."""
        settings, own = self.settings, [data]
        if settings.refresh == "epoch":
            now = broadcast.weights if epoch == 0 else None  # later: as this client has trained them
            return self.calibrated([] if settings.is_shared else own, now, broadcast.round, epoch)
        if settings.is_shared:
            assert self.shared is not None
            return self.shared
        if settings.refresh == "round":
            return self.calibrated(own, broadcast.weights, broadcast.round)
        return self.kept(name_of_own(data.client), lambda: self.calibrated(own, self.start))

    @property
    def keeps_own(self) -> bool:
        """Whether each client has a mask of its own that is kept."""
        return self.files is not None and not self.settings.is_shared and self.settings.refresh == "once"

    def kept(self, name: str, make: Callable[[], Mask]) -> Mask:
        """The mask kept under this name, or a new one from `make`."""
        return make() if self.files is None else self.files.kept(name, make)

    # What the server knows of clients' masks.

    def known(self, client: int, round: int) -> Mask | None:
        """A client's mask in the current round, if the server knows it: all share it, or it follows from a seed."""
        seed = self.seed_of(client, round)
        return self.shared if self.shared is not None else None if seed is None else self.drawn(seed)

    @property
    def leaks(self) -> bool:
        """Whether momentum keeps moving weights that a newer mask freezes."""
        return self.settings.momentum_policy == "leak"

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

    # A random mask follows from its seed.

    def seed_of(self, client: int, round: int) -> int | None:
        """The seed of a client's mask in a round; None unless it follows from a seed alone."""
        settings = self.settings
        if settings.rule != "random" or settings.file is not None or settings.refresh == "epoch":
            return None
        address = (round,) if settings.refresh == "round" else ()
        return seed_at(self.seed, *self.address("all" if settings.is_shared else client, *address))

    def drawn(self, seed: int) -> Mask:
        """The random mask of a seed."""
        if seed not in self._drawn:
            generator = torch.Generator().manual_seed(seed)
            self._drawn.clear()  # only the last one is needed again
            self._drawn[seed] = calibrate_mask(self.shapes, torch.empty(0), _no_scores, self.settings, generator)
        return self._drawn[seed]

    @cached_property
    def _drawn(self) -> dict[int, Mask]:
        return {}

    # How a mask is made.

    def calibrated(self, sources: list[ClientData], weights: Tensor | None, *where: int) -> Mask:
        """A mask from the data of `sources`, at `weights` (None: those in the network)."""
        with section("calibrate"):
            if weights is not None:
                self.scope.write(weights)
            who = sources[0].client if sources else "all"
            address = self.address(who, *where)

            def scores(round: int, active: Mask) -> Tensor:
                total, count = self.scored(sources[0], address, round, active)
                return total / count

            return self.chosen(scores, address)

    def chosen(self, scores: Scores, address: Address) -> Mask:
        """The mask that the settings describe, for the weights in the network."""
        weights = torch.cat([one.detach().flatten() for one in self.scope.sieved.values()])
        client = None if self.settings.is_shared or not isinstance(address[2], int) else address[2]
        generator = torch_generator(self.seed, *address)
        try:
            return calibrate_mask(self.shapes, weights, scores, self.settings, generator, client)
        except (MachineError, WorkerError):
            raise
        except RunError as error:
            whose = "all clients" if self.settings.is_shared else f"client {address[2]}"
            raise type(error)(f"phase {self.phase}, mask of {whose}: {error}") from None

    def scored(self, data: ClientData, address: Address, round: int, active: Mask) -> tuple[Tensor, int]:
        """The sum of sensitivities (or gradients, if the rule looks at them) of fresh samples of a client."""
        settings, generator = self.settings, torch_generator(self.seed, *address, round, "labels", data.client)
        asked = settings.fisher.samples
        if asked > len(data):
            self.note(f"phase {self.phase}: who has fewer than fisher.samples ({asked}) scores with all of them")
        samples = torch_generator(self.seed, *address, round, "samples", data.client)
        batches = drawn_samples(data, asked, self.batch_size, samples)
        if settings.looks_at == "gradients":
            return damped_gradients(self.network, self.scope.sieved, batches, active, settings.damping)
        return damped_sensitivity(
            self.network, self.scope.sieved, batches, settings.fisher, active, settings.damping, generator, self.note
        )

    def address(self, who: int | str, *where: int) -> Address:
        return ("mask", self.phase, who, *where)


@dataclass
class MaskFiles:
    """Masks in a folder, as bits, each marked with what it was made from."""

    folder: Path
    origin: str  # of all masks here: the run, the phase, the weights at its start
    note: Callable[[str], None] = lambda _: None

    def kept(self, name: str, make: Callable[[], Mask]) -> Mask:
        """The mask in a file; a new one if there is none, or if it is damaged or made from something else."""
        if (mask := self.found(name)) is None:
            mask = make()
            self.keep(name, mask)
        return mask

    def found(self, name: str) -> Mask | None:
        path = self._path(name)
        if path.exists():
            try:
                return Mask.load(path, self._of(name))
            except InputError:
                self.note(f"{path} is damaged, or was made from other data or weights; calibrating the mask again")
        return None

    def keep(self, name: str, mask: Mask) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        mask.save(path, self._of(name))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _of(self, name: str) -> str:
        return f"{name}, {self.origin}"


def name_of_own(client: int) -> str:
    """The name of a client's own mask."""
    return f"client-{client:06d}"


def origin_of(phase: str, seed: int, run: str, start: Tensor | None) -> str:
    """What determines masks that are drawn once in a phase, besides the settings; `run` is the run's fingerprint."""
    return f"phase {phase}, seed {seed}, run {run}, start {digest_of_tensors([start]) if start is not None else ''}"


def drawn_samples(
    data: ClientData, asked: int, batch_size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """A fresh draw of a client's samples, in batches; all of them if it has no more than `asked`."""
    order = torch.randperm(len(data), generator=generator)[:asked]
    for positions in order.split(batch_size):
        yield data.inputs(positions, generator), data.labels[positions]


def _no_scores(round: int, active: Mask) -> Tensor:
    raise AssertionError("a random mask looks at no sensitivity")
