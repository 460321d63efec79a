"""Figures of several runs as the page's data has them."""

from collections.abc import Sequence

from fedsieve.analysis.statistics import interval

Figure = list[float | None]  # [mean, half its interval's width or None, number of values]


def figure(values: Sequence[float | None]) -> Figure | None:
    """The mean of the values that are known; None without any. All digits are kept: whoever shows it rounds once."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    found = interval(known)
    return [found.mean, found.margin, found.count]


def short(value: float) -> float | int:
    """With 7 significant digits; bytes and other whole numbers as they are."""
    return value if isinstance(value, int) else float(f"{value:.7g}")
