"""Users' callbacks (`@fedsieve.callback`) beside the one that a run is given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedsieve.config.decorators import CALLBACKS
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError, RunError
from fedsieve.federate.blame import reason_of
from fedsieve.observe.callbacks import Callback

EVENTS = [name for name in vars(Callback) if not name.startswith("_")]


class Everybody(Callback):
    """Passes every event on to the run's own callback, then to the users', which are made for this run.

    Users' callbacks hear nothing before `attach`, and then what they missed. One that fails is left out from then on.
    """

    def __init__(self, first: Callback) -> None:
        self.first, self.users = first, dict[str, Callback]()
        self._missed: list[tuple[str, tuple[Any, ...]]] | None = []
        for name, kind in CALLBACKS.items():
            try:
                self.users[name] = kind()
            except (InputError, RunError):
                raise
            except Exception as error:
                raise InputError(f"callback {name} cannot be made ({reason_of(error)}); repair its __init__") from error

    def attach(self, experiment: Experiment, folder: Path) -> None:
        """From now on, when the folder is the run's own, users' callbacks hear what happens."""
        missed, self._missed = self._missed or [], None
        for event, values in [("attached", (experiment, folder)), *missed]:
            self._tell_users(event, values)

    def hear(self, event: str, values: tuple[Any, ...]) -> None:
        getattr(self.first, event)(*values)
        if self._missed is None:
            self._tell_users(event, values)
        elif self.users:
            self._missed.append((event, values))

    def _tell_users(self, event: str, values: tuple[Any, ...]) -> None:
        """A RunError of a user's callback ends the run, and any other error only its listening."""
        for name, one in list(self.users.items()):
            try:
                getattr(one, event)(*values)
            except RunError:
                raise
            except Exception as error:
                del self.users[name]
                self.first.warning(f"callback {name} failed ({reason_of(error)}); the run goes on without it")


def _heard(event: str) -> Callable[..., None]:
    return lambda self, *values: self.hear(event, values)


for _event in EVENTS:
    setattr(Everybody, _event, _heard(_event))
