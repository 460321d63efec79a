"""What a process can be asked to do for a run: small enough to be sent, and complete, so that any process can do it."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Job:
    """`do` names what to do, `about` says for whom, in numbers and words, and `data` are bytes that go with it."""

    do: str
    about: dict[str, Any] = field(default_factory=dict)
    data: Any = b""
    is_light: bool = False  # whether it is likely to be done sooner than sent


@dataclass(frozen=True)
class Answer:
    """`data` is valid until the next answer is asked for."""

    about: dict[str, Any] = field(default_factory=dict)
    data: Any = b""


Handler = Callable[[Job], Answer]
Ask = Callable[[Iterable[Job]], Generator[Answer]]  # the answers in the order of the jobs, whoever does them


class Desk:
    """Who does which kind of job in this process."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}

    def ask(self, jobs: Iterable[Job]) -> Generator[Answer]:
        """Do the jobs here, one after the other."""
        return (self.handlers[job.do](job) for job in jobs)
