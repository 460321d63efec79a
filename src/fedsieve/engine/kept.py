"""Where a client runtime finds what clients keep from round to round: their states and their own masks.

On the machine of the main process these are files in the run's folder. To other machines they travel with the job,
and back with its answer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fedsieve.context import RunContext
from fedsieve.federate.mask_source import KeptMasks, MaskFiles
from fedsieve.federate.types import State
from fedsieve.phase import Phase, mask_files
from fedsieve.runs.client_memory import StateFiles
from fedsieve.sieve.mask import Mask


class States(Protocol):
    def read(self, client: int, round: int) -> State: ...
    def put(self, client: int, round: int, state: State) -> str: ...


class Kept(Protocol):
    """What clients of a phase keep."""

    def states(self, phase: Phase) -> States: ...
    def masks(self, context: RunContext, phase: Phase, start: Tensor | None) -> KeptMasks: ...


@dataclass(frozen=True)
class KeptInFolder:
    """In a run's folder."""

    folder: Path

    def states(self, phase: Phase) -> StateFiles:
        return StateFiles(self.folder / "clients" / phase.settings.name)

    def masks(self, context: RunContext, phase: Phase, start: Tensor | None) -> MaskFiles:
        return mask_files(context, phase, start, self.folder)


@dataclass
class Enclosure:
    """What a client keeps, on its way to another machine or back: its state, and its own mask; empty if nothing."""

    state: State = field(default_factory=dict)
    mask: Mask | None = None


class KeptInJob:
    """Enclosed with the job under way (`received`), and to be enclosed with its answer (`returned`)."""

    def __init__(self) -> None:
        self.received, self.returned = Enclosure(), Enclosure()

    def begin(self, received: Enclosure) -> None:
        self.received, self.returned = received, Enclosure()

    def states(self, phase: Phase) -> "KeptInJob":
        return self

    def masks(self, context: RunContext, phase: Phase, start: Tensor | None) -> "KeptInJob":
        return self

    def read(self, client: int, round: int) -> State:
        return self.received.state

    def put(self, client: int, round: int, state: State) -> str:
        """The digest is known once the state is on disk."""
        self.returned.state = state
        return ""

    def kept(self, name: str, make: Callable[[], Mask]) -> Mask:
        if self.received.mask is None:
            self.received.mask = self.returned.mask = make()
        return self.received.mask
