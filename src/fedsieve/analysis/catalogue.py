"""What an experiment can be made of: every part of every slot, with what it does and what it does not go with."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedsieve.config.refusals import ZERO_SUM_REFUSES, Refusal, refusals_of
from fedsieve.config.registry import settings_class
from fedsieve.config.schema import SLOTS
from fedsieve.federate.selection import SELECTIONS
from fedsieve.sieve.rules import RULES

PAPER = re.compile(r"\s*\(([^()]+)\)\.?$")  # at the end of a docstring's first line


@dataclass(frozen=True)
class Part:
    """One part, as `fedsieve methods` lists it."""

    name: str
    about: str
    paper: str | None
    settings: dict[str, Any]  # with their defaults
    refuses: list[str]

    @staticmethod
    def of(name: str, part: Any) -> "Part":
        line = (inspect.getdoc(part) or "").partition("\n")[0]
        found = PAPER.search(line)
        about = PAPER.sub("", line).rstrip(".")
        refuses = [_described(refusal) for refusal in refusals_of(part)]
        return Part(name, about, found[1] if found else None, settings_class(part)().model_dump(mode="json"), refuses)


def catalogue() -> dict[str, list[Part]]:
    """All parts by the key of their slot."""
    slots: dict[str, Mapping[str, Any]] = {f"phases.*.{key}": registry for key, registry in SLOTS.items()}
    slots |= {"phases.*.mask.rule": RULES, "clients.select": SELECTIONS}
    parts = {key: [Part.of(name, slot[name]) for name in slot] for key, slot in slots.items()}
    about = "the server learns the sum of the updates, and no single one"
    hidden = Part("zero_sum", about, "Bonawitz et al., CCS 2017", {}, [_described(one) for one in ZERO_SUM_REFUSES])
    return {**parts, "clients.secure": [hidden]}


def _described(refusal: Refusal) -> str:
    return f"{refusal.what}: {refusal.why}"
