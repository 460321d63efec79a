"""Users' callbacks (`@fedsieve.callback`) beside the one that a run is given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedsieve.config.decorators import CALLBACKS
from fedsieve.config.schema import Experiment
from fedsieve.errors import RunError
from fedsieve.observe.callbacks import Callback

EVENTS = [name for name in vars(Callback) if not name.startswith("_")]


def with_users_callbacks(experiment: Experiment, out: Path, callback: Callback) -> Callback:
    """The callback, and one of each of the users' callbacks; they are made for this run."""
    if not CALLBACKS:
        return callback
    everybody = Everybody(callback)
    for name, kind in CALLBACKS.items():
        made = everybody.users[name] = kind()
        everybody.tell(name, made.attached, experiment, out)
    return everybody


class Everybody(Callback):
    """Passes every event on to the run's own callback, then to the users'. One that fails is left out from then on."""

    def __init__(self, first: Callback) -> None:
        self.first, self.users = first, dict[str, Callback]()

    def tell(self, name: str, event: Callable[..., None], *values: Any) -> None:
        """Tell one of the users' callbacks; a RunError ends the run, and any other error only its listening."""
        try:
            event(*values)
        except RunError:
            raise
        except Exception as error:
            del self.users[name]
            reason = f"{type(error).__name__}: {error}"
            self.first.warning(f"callback {name} failed ({reason}); the run goes on without it")


def _heard(event: str) -> Callable[..., None]:
    def tell_everybody(self: Everybody, *values: Any) -> None:
        getattr(self.first, event)(*values)
        for name, one in list(self.users.items()):
            self.tell(name, getattr(one, event), *values)

    return tell_everybody


for _event in EVENTS:
    setattr(Everybody, _event, _heard(_event))
