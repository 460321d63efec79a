"""What an experiment can be made of: every part of every slot, with what it does and what it does not go with."""

import inspect
import re
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from fedsieve.config.decorators import CALLBACKS
from fedsieve.config.refusals import ZERO_SUM_REFUSES, Refusal, refusals_of
from fedsieve.config.registry import Registry, settings_class
from fedsieve.config.schema import SLOTS
from fedsieve.config.settings import Settings
from fedsieve.data import DATASETS, SPLITS
from fedsieve.federate.schedule import SCHEDULES
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
        return Part(name, about, found[1] if found else None, _defaults(settings_class(part)), refuses)


def catalogue() -> dict[str, list[Part]]:
    """All parts by the key of their slot, those of loaded plugins included."""
    slots: dict[str, Registry] = {f"phases.*.{key}": registry for key, registry in SLOTS.items()}
    slots |= {
        "phases.*.local.schedule": SCHEDULES,
        "phases.*.mask.rule": RULES,
        "clients.select": SELECTIONS,
        "clients.split": SPLITS,
        "data.name": DATASETS,
    }
    parts = {key: [Part.of(name, registry[name]) for name in registry] for key, registry in slots.items()}
    about = "The server learns the sum of the updates, and no single one"
    hidden = Part("zero_sum", about, "Bonawitz et al., CCS 2017", {}, [_described(one) for one in ZERO_SUM_REFUSES])
    callbacks = [Part.of(name, part) for name, part in CALLBACKS.items()]  # only users have any
    return {**parts, "clients.secure": [hidden], **({"callbacks": callbacks} if callbacks else {})}


def _described(refusal: Refusal) -> str:
    return f"{refusal.what}: {refusal.why}"


def _defaults(settings: type[Settings]) -> dict[str, Any]:
    """The default of each setting; "…" for one that has none."""
    return {
        name: "…" if field.is_required() else to_jsonable_python(field.get_default(call_default_factory=True))
        for name, field in settings.model_fields.items()
    }
