"""The bytes that clients and server send each other."""

import json
from collections import Counter
from dataclasses import dataclass, field

from xxhash import xxh3_128


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

    def to_json(self, of: str) -> str:
        """The bytes up and down, with a digest of them and of what they were spent on."""
        return json.dumps({"up": self.up, "down": self.down, "digest": self._digest(of)})

    @staticmethod
    def from_json(text: str, of: str) -> "Traffic":
        """The reverse of `to_json`; ValueError if the text was changed, or is about something else."""
        try:
            saved = json.loads(text)
            traffic = Traffic(saved["up"], saved["down"])
            if saved["digest"] == traffic._digest(of):
                return traffic
        except (KeyError, TypeError, RecursionError):
            pass
        raise ValueError("the bytes are not as they were written")

    def _digest(self, of: str) -> str:
        return xxh3_128(json.dumps([of, self.up, self.down]).encode()).hexdigest()


def size(count: float) -> str:
    """A number of bytes in readable form."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
