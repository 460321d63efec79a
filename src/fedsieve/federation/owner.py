"""What a node's owner allows: how much a server may ask for, and what it may be told."""

from dataclasses import dataclass
from typing import Any

from fedsieve.config.client_settings import FEWEST_SECURE
from fedsieve.config.schema import Experiment
from fedsieve.config.settings import option
from fedsieve.errors import InputError, RunError
from fedsieve.federation.socket_frames import LARGEST

TOLD = ("samples", "classes", "losses")


@dataclass
class Owner:
    """Limits; None: none."""

    rounds: int | None = None  # in which the node trains, over all phases of a run
    epochs: int | None = None  # of local training in a round
    message: int = LARGEST  # bytes of a request
    tells: frozenset[str] = frozenset(TOLD)
    participants: int = FEWEST_SECURE  # at least, in a secure sum
    needs_secure: bool = False  # updates are sent in secure sums only

    def refusal(self, experiment: Experiment) -> str | None:
        """Why the node does not take part in an experiment."""
        rounds = sum(phase.rounds for phase in experiment.phases)
        if self.rounds is not None and rounds > self.rounds:
            return f"its owner allows {self.rounds} rounds, and the experiment has {rounds}"
        for phase in experiment.phases:
            epochs = phase.local.epochs
            if self.epochs is not None and (epochs is None or epochs > self.epochs):
                asked = f"{epochs} epochs" if epochs is not None else "a number of steps"
                return f"its owner allows {self.epochs} epochs in a round, and phase {phase.name} asks for {asked}"
        if self.needs_secure and experiment.clients.zero_sum is None:
            return "its owner wants secure sums; set clients.secure: zero_sum"
        if "losses" not in self.tells:
            if option(experiment.clients.select) == "high_loss":
                return "its owner does not tell losses, by which clients.select: high_loss chooses"
            if experiment.clients.zero_sum is None and experiment.phases:
                return "its owner does not tell losses, which updates hold; clients.secure: zero_sum hides them"
        if "samples" not in self.tells and experiment.clients.weighting == "samples":
            return "its owner does not tell its number of samples; set clients.weighting: equal"
        return None

    def check_job(self, do: str, about: dict[str, Any]) -> None:
        """RunError if the owner does not allow a job."""
        if "losses" not in self.tells and do in ("loss", "evaluate"):
            raise RunError("its owner does not tell losses")
        if "samples" not in self.tells and do == "evaluate":
            raise RunError("its owner does not tell its number of samples, of which this would be a part")
        if do == "train" and self.needs_secure and about.get("secret") is None:
            raise RunError("its owner wants secure sums")
        if do == "train" and self.rounds is not None and int(about["version"]) > self.rounds:
            raise RunError(f"its owner allows {self.rounds} rounds")

    def check_participants(self, count: int) -> None:
        if count < self.participants:
            raise RunError(f"its owner wants at least {self.participants} participants in a sum, and there are {count}")


def told_of(text: str) -> frozenset[str]:
    """From `samples,classes`, as the command line gives it."""
    names = frozenset(one.strip() for one in text.split(",") if one.strip())
    if unknown := sorted(names - set(TOLD)):
        raise InputError(f"--tell: '{unknown[0]}' is nothing that a node tells; use {', '.join(TOLD)}")
    return names
