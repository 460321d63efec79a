"""The record of a round: who took part, what it cost, and how the updates agreed. No update is kept."""

from dataclasses import dataclass, field
from typing import Any

from fedsieve.federate.diagnostics import Interference
from fedsieve.federate.traffic import Traffic
from fedsieve.federate.types import Broadcast, Update
from fedsieve.sieve.density import MeanDensity
from fedsieve.sieve.mask import Mask


@dataclass
class RoundRecord:
    broadcast: Broadcast
    version: int  # the round's number over all phases; clients' states are stored under it
    interference: Interference | None  # None: it is not measured
    density: MeanDensity | None  # of the clients' masks; None: there are none, or it is not measured in this round
    traffic: Traffic = field(default_factory=Traffic)
    chosen: list[int] = field(default_factory=list)
    selection: dict[str, Any] = field(default_factory=dict)  # details of the selection
    samples: dict[int, int] = field(default_factory=dict)  # by client
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # by client: why it was left out
    warned: set[int] = field(default_factory=set)  # clients that the user has been told of
    redone: int = 0  # how often keys were made for secure sums

    @property
    def left(self) -> list[int]:
        """Chosen clients that were not left out."""
        return [client for client in self.chosen if client not in self.failed]

    @property
    def place(self) -> str:
        return f"phase {self.broadcast.phase}, round {self.broadcast.round}"

    def add(self, update: Update) -> None:
        """Add an update that is used."""
        self.samples[update.client], self.metrics[update.client] = update.samples, update.metrics
        if self.interference is not None:
            positions = update.positions(len(self.broadcast.weights))
            self.interference.add(update.client, update.vectors["delta"], positions, update.mask)
        self.add_mask(update.mask)

    def add_mask(self, mask: Mask | None) -> None:
        if self.density is not None and mask is not None:
            self.density.add(mask)

    def mean(self, name: str, by_samples: bool = False) -> float | None:
        known = {client: metrics[name] for client, metrics in self.metrics.items() if name in metrics}
        weights = {client: self.samples[client] if by_samples else 1 for client in known}
        total = sum(weights.values())
        return sum(weights[client] * value for client, value in known.items()) / total if known else None

    def line(self) -> dict[str, Any]:
        """The round's line of metrics."""
        line = {
            "phase": self.broadcast.phase,
            "round": self.broadcast.round,
            "clients": self.chosen,
            "failed": self.failed,
            **self.selection,
            "train_loss": self.mean("train_loss", by_samples=True),
            "val_accuracy": None,
            "val_loss": None,
            "drift_mean": self.mean("drift"),
            "bytes_up": self.traffic.up,
            "bytes_down": self.traffic.down,
            "encodings": dict(self.traffic.encodings),
            "density": self.mean("density") or 1.0,
        }
        if self.interference is not None:
            drifts = {client: metrics["drift"] for client, metrics in self.metrics.items()}
            line |= {"drift_max": max(drifts.values()), "drift": drifts}
            found = self.interference.finish().items()
            line |= {name: value for name, value in found if not name.startswith("drift")}
        if self.density is not None and self.density.masks:
            line["layers"] = self.density.layers().rounded()
        return line
