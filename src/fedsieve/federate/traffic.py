"""The bytes that clients and server send each other."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fedsieve.errors import RunError
from fedsieve.runs.atomic import write_text


@dataclass
class Traffic:
    """Bytes up (from clients to the server) and down, and how often each encoding was used for updates."""

    up: int = 0
    down: int = 0
    encodings: Counter[str] = field(default_factory=Counter)

    def __iadd__(self, other: "Traffic") -> "Traffic":
        self.up, self.down = self.up + other.up, self.down + other.down
        self.encodings += other.encodings
        return self

    def save(self, path: Path) -> None:
        write_text(path, json.dumps({"up": self.up, "down": self.down}) + "\n")

    @staticmethod
    def load(path: Path) -> "Traffic":
        try:
            saved = json.loads(path.read_text())
            return Traffic(int(saved["up"]), int(saved["down"]))
        except (OSError, ValueError, KeyError, TypeError):
            raise RunError(f"{path} is damaged, so this run cannot go on; start it anew") from None


def size(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
