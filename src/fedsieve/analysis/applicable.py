"""Which settings of an experiment have an effect: those of Fisher information have none on a random mask."""

from typing import Any

from pydantic import BaseModel

from fedsieve.config.dotted import flat
from fedsieve.config.mask_settings import MaskSettings
from fedsieve.config.schema import Experiment
from fedsieve.config.settings import option
from fedsieve.sieve.rules import RULES

UNIMPORTANT = {"workers", "threads", "engine", "track", "expect", "analyze"}  # the outcome does not depend on them
UNWEIGHTED = ("median", "trimmed_mean")  # aggregators for which all clients count the same,
WEIGHTING_NOTHING = ("fedavg", "fedprox", "scaffold")  # and methods that weigh nothing besides (FedNova its taus)
CHOOSING = ["rule", "sparsity", "calibration_rounds", "damping", "fisher", "scope", "draw", "unit", "across"]


def applicable(experiment: Experiment) -> dict[str, Any]:
    """The settings that the outcome depends on, by dotted key; a phase without a mask has the key `mask` only."""
    settings = flat(experiment.model_dump(mode="json", exclude=UNIMPORTANT))
    without = _without_effect(experiment)
    return {key: value for key, value in settings.items() if not any(_is_below(key, other) for other in without)}


def _without_effect(experiment: Experiment) -> list[str]:
    """Keys that change nothing, with all keys below them."""
    found = ["clients.minimum", "evaluate.clients"]  # a run with too few replies in a round ends without a result
    if experiment.evaluate.test != "never":  # then there is no test accuracy, and nothing to take a mean with
        found.append("evaluate.test")
    if experiment.clients.count == 1:
        found += [f"clients.{name}" for name in ("fraction", "weighting", "norm_limit")]
    if experiment.data.validation == 0:
        found.append("evaluate.sample")
    if experiment.phases and all(
        option(phase.aggregate) in UNWEIGHTED and option(phase.method) in WEIGHTING_NOTHING
        for phase in experiment.phases
    ):
        found.append("clients.weighting")
    for number, phase in enumerate(experiment.phases):
        if option(phase.local.optimizer) != "sgd":
            found += [f"phases.{number}.local.momentum", f"phases.{number}.local.nesterov"]
        if phase.mask is not None:
            found += [f"phases.{number}.mask.{name}" for name in _without_effect_in_mask(phase.mask)]
    return found


def _without_effect_in_mask(mask: MaskSettings) -> list[str]:
    """As docs/sieve.md explains them."""
    if mask.file is not None:
        return [*CHOOSING, "keep_alive", "refresh", "momentum"]
    found = []
    if mask.refresh == "once":
        found.append("momentum")
    if mask.rule != "random":
        found.append("draw")
    if mask.unit == "tensor":
        found.append("keep_alive")
    if mask.rule in RULES and not mask.looks_at_data:  # a rule of a plugin that is not loaded may look at data
        found += ["calibration_rounds", "damping", "fisher"]
    else:
        found += ["damping"] if mask.calibration_rounds == 1 else []
        found += ["fisher.draws"] if mask.fisher.kind != "exact" else []
    return found


def _is_below(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.")


def at_default(settings: BaseModel, key: str = "") -> set[str]:
    """The dotted keys, of these settings and all below them, whose values are the defaults."""
    found: set[str] = set()
    for name, field in type(settings).model_fields.items():
        value, place = getattr(settings, name), f"{key}.{name}".lstrip(".")
        parts = {place: value} if not isinstance(value, tuple) else {f"{place}.{k}": one for k, one in enumerate(value)}
        for where, part in parts.items():
            if isinstance(part, BaseModel):
                found |= at_default(part, where)
            elif not field.is_required() and value == field.get_default(call_default_factory=True):
                found.add(where)
        if not parts and not field.is_required():  # an empty list
            found.add(place)
    return found
