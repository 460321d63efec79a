"""Where the time of a run goes.

Code says what it is doing with `with section("forward"):`. Sections nest, and a second belongs to the innermost
only, so the seconds of all sections add up to the time that passed.
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
    """Where the seconds of a run went; what `main` lists adds up to `wall`, and so does what `each_worker` does."""

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
        self.synchronize: Callable[[], None] | None = None  # on a GPU: wait until what was asked for is done
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
        """The seconds by section up to now, which are counted no longer."""
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
    """Within it, time belongs to `name`."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        stopwatch.enter(self.name)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        stopwatch.leave()


stopwatch = Stopwatch()  # of this process
