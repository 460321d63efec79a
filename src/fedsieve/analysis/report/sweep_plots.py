"""Pictures of a sweep: which settings matter, and which values go together with good results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib  # fedsieve.analysis.report.palette has told it to draw to files only
import matplotlib.pyplot as plt
import numpy as np

from fedsieve.analysis.report.palette import COLOURS, HEAT, in_page_colours, page_colour
from fedsieve.analysis.report.plots import save_figure, without_frame
from fedsieve.config.dotted import as_text
from fedsieve.observe.numbers import percent

Tried = tuple[dict[str, Any], float]  # values by key, and the validation accuracy they gave


def tried(results: Mapping[str, Any]) -> list[Tried]:
    """Every complete trial of a sweep's results, with the values of its arm."""
    return [
        ({**arm["values"], **trial["values"]}, trial["val_accuracy"])
        for arm in results["arms"]
        for trial in arm["trials"]
        if trial["state"] == "complete"
    ]


def importances(trials: Sequence[Tried]) -> dict[str, float]:
    """The share of the accuracies' variance that each key explains (fANOVA, Hutter et al., ICML 2014).

    Empty where there is nothing to explain: fewer than four trials, or all of them alike.
    """
    import optuna
    from optuna.distributions import CategoricalDistribution

    keys = [key for key in (trials[0][0] if trials else {}) if len({as_text(values[key]) for values, _ in trials}) > 1]
    if len(trials) < 4 or len({accuracy for _, accuracy in trials}) == 1 or not keys:
        return {}
    spaces = {key: list(dict.fromkeys(as_text(values[key]) for values, _ in trials)) for key in keys}
    distributions: dict[str, Any] = {}
    for key, texts in spaces.items():
        numbers = _numbers([values[key] for values, _ in trials])
        distributions[key] = CategoricalDistribution(texts) if numbers is None else _span(numbers)
    study = optuna.create_study(direction="maximize")
    for values, accuracy in trials:
        params = {
            key: as_text(values[key]) if isinstance(space, CategoricalDistribution) else values[key]
            for key, space in distributions.items()
        }
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=accuracy))
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return optuna.importance.get_param_importances(study, evaluator=evaluator)


@in_page_colours
def plot_importances(trials: Sequence[Tried], path: Path) -> bool:
    """Bars of what explains the accuracy most; False, and no picture, where there is nothing to explain."""
    found = importances(trials)
    if not found:
        return False
    names, shares = list(found)[::-1], list(found.values())[::-1]
    figure, axis = plt.subplots(figsize=(8, 0.8 + 0.45 * len(names)), layout="constrained")
    axis.barh(names, shares, color=COLOURS[0], height=0.6)
    for row, share in enumerate(shares):
        axis.text(share, row, f" {percent(share)}", va="center")
    axis.set_xlim(0, max(shares) * 1.12)
    axis.set_xlabel("share of the variance in validation accuracy that it explains")
    axis.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    without_frame(axis)
    axis.grid(visible=False)
    save_figure(figure, path)
    return True


@in_page_colours
def plot_parallel(trials: Sequence[Tried], path: Path) -> bool:
    """One line for each trial through the values it took, coloured by its accuracy; False if there is none."""
    keys = [key for key in (trials[0][0] if trials else {}) if len({as_text(values[key]) for values, _ in trials}) > 1]
    if not keys:
        return False
    accuracies = np.array([accuracy for _, accuracy in trials])
    scale = matplotlib.colors.Normalize(accuracies.min(), max(accuracies.max(), accuracies.min() + 1e-9))
    figure, axis = plt.subplots(figsize=(2.6 * (len(keys) + 1), 4.2), layout="constrained")
    columns, ticks = [], []
    for key in keys:
        heights, labels = _axis([values[key] for values, _ in trials])
        columns.append(heights)
        ticks.append(labels)
    columns.append([float(scale(accuracy)) for accuracy in accuracies])
    ticks.append({float(scale(a)): percent(a) for a in np.linspace(accuracies.min(), accuracies.max(), 5)})
    order = np.argsort(accuracies)  # the best ones on top; colours by rank, for one that failed would outshine the rest
    for rank, row in enumerate(order):
        colour = HEAT(0.25 + 0.75 * rank / max(1, len(order) - 1))
        axis.plot(range(len(columns)), [column[row] for column in columns], color=colour, linewidth=1.6, alpha=0.85)
    behind = {"fc": page_colour("paper"), "ec": "none", "pad": 0.5, "alpha": 0.7}  # so that lines do not hide text
    for place, labels in enumerate(ticks):
        axis.axvline(place, color=page_colour("quiet"), linewidth=0.8, zorder=0)
        for height, label in labels.items():
            axis.text(place, height, f" {label}", fontsize=8, va="center", bbox=behind)
    axis.set_xticks(range(len(columns)), [*keys, "validation accuracy"])
    axis.set_yticks([])
    axis.set_xlim(-0.2, len(columns) - 0.5)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    save_figure(figure, path)
    return True


def _numbers(values: Sequence[Any]) -> np.ndarray | None:
    """The values as numbers, if that is what they are."""
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return None
    return np.array(values, float)


def _is_logarithmic(numbers: np.ndarray) -> bool:
    return bool(numbers.min() > 0 and numbers.max() / numbers.min() >= 20)


def _span(numbers: np.ndarray) -> Any:
    from optuna.distributions import FloatDistribution

    return FloatDistribution(numbers.min(), numbers.max(), log=_is_logarithmic(numbers))


def _axis(values: Sequence[Any]) -> tuple[list[float], dict[float, str]]:
    """Heights from 0 to 1 for values of one key, and what to write at which height."""
    numbers = _numbers(values)
    if numbers is None:
        names = list(dict.fromkeys(as_text(value) for value in values))
        place = {name: index / max(1, len(names) - 1) for index, name in enumerate(names)}
        return [place[as_text(value)] for value in values], {height: name for name, height in place.items()}
    shown = np.log(numbers) if _is_logarithmic(numbers) else numbers
    heights = (shown - shown.min()) / max(float(np.ptp(shown)), 1e-12)
    marked = sorted(set(zip(heights.tolist(), numbers.tolist(), strict=True)))
    if len(marked) > 6:
        marked = [marked[round(i)] for i in np.linspace(0, len(marked) - 1, 6)]
    return heights.tolist(), {height: f"{number:.3g}" for height, number in marked}
