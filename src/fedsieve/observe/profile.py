"""Where the time of a run goes.

Code names what it is doing using `with section("forward"):`. Sections nest, and time counts for the innermost only,
so the seconds of all sections add up to the time that passed.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

OTHER, IDLE = "everything else", "idle"
SECTIONS = (  # in the order of a round
    "start",
    "features",
    "calibrate",
    "transform",
    "forward",
    "backward",
    "optimizer",
    "encode",
    "decode",
    "aggregate",
    "evaluate",
    "files",
    "tracking",
    OTHER,
    IDLE,
)


@dataclass(frozen=True)
class Times:
    """Where the seconds of a run went; those in `main` add up to `wall`, and so do those in `each_worker`."""

    wall: float
    main: Mapping[str, float]
    of_workers: Mapping[str, float]  # all of them together, without idle time
    workers: int  # 1: there is only the main process

    @property
    def each_worker(self) -> dict[str, float]:
        """The mean over the workers."""
        mean = {name: seconds / self.workers for name, seconds in self.of_workers.items()}
        return mean | {IDLE: self.wall - sum(mean.values())}


class Stopwatch:
    """Seconds by section since it was started."""

    def __init__(self) -> None:
        self.synchronize: Callable[[], None] | None = None  # on a GPU: wait until all queued work is done
        self.start()

    def start(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open = [OTHER]
        self._since = time.perf_counter()

    def enter(self, name: str) -> None:
        self._pass_time()
        self._open.append(name)

    def leave(self) -> None:
        self._pass_time()
        self._open.pop()

    def take(self) -> dict[str, float]:
        """The seconds by section since the start or the last call."""
        self._pass_time()
        taken, self.seconds = self.seconds, defaultdict(float)
        return taken

    def _pass_time(self) -> None:
        if self.synchronize is not None:
            self.synchronize()
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


class section:  # noqa: N801 (reads as a statement; a class is quicker than a generator)
    """Time inside it counts for `name`."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        stopwatch.enter(self.name)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        stopwatch.leave()


stopwatch = Stopwatch()  # of this process
