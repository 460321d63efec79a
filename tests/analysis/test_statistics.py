"""Intervals and paired tests, against scipy's."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedsieve.analysis.statistics import holm, interval, paired

accuracies = st.lists(st.integers(0, 10_000).map(lambda hits: hits / 10_000), min_size=2, max_size=12)


@given(accuracies)
def test_interval_is_scipys(values: list[float]) -> None:
    ours = interval(values)
    error = stats.sem(values)
    assert ours.mean == pytest.approx(np.mean(values))
    assert ours.count == len(values)
    if error > 0:
        low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error)
        assert (ours.low, ours.high) == pytest.approx((low, high), rel=1e-9)
    else:
        assert ours.margin == pytest.approx(0, abs=1e-12)


def test_one_value_has_no_interval() -> None:
    alone = interval([0.7])
    assert (alone.mean, alone.margin, alone.low, alone.high) == (0.7, None, None, None)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), min_size=2, max_size=10))
def test_paired_test_is_scipys(pairs: list[tuple[int, int]]) -> None:
    one = {seed: hits / 10_000 for seed, (hits, _) in enumerate(pairs)}
    other = {seed: hits / 10_000 for seed, (_, hits) in enumerate(pairs)}
    ours = paired(one, other)
    assert ours is not None
    if len({a - b for a, b in pairs}) > 1:
        theirs = stats.ttest_rel(list(one.values()), list(other.values()))
        assert ours.p == pytest.approx(theirs.pvalue, rel=1e-6, abs=1e-12)
        span = theirs.confidence_interval(0.95)
        assert (ours.difference.low, ours.difference.high) == pytest.approx((span.low, span.high), rel=1e-6, abs=1e-9)


def test_pairs_are_the_seeds_that_both_have() -> None:
    one, other = {1: 0.5, 2: 0.6, 3: 0.7, 9: 0.0}, {3: 0.5, 1: 0.4, 2: 0.55, 8: 1.0}
    ours = paired(one, other)
    assert ours is not None and ours.difference.count == 3
    assert ours.p == pytest.approx(stats.ttest_rel([0.5, 0.6, 0.7], [0.4, 0.55, 0.5]).pvalue)
    assert paired({1: 0.5}, {2: 0.5}) is None
    single = paired({1: 0.5}, {1: 0.25})
    assert single is not None and (single.p, single.difference.mean) == (None, 0.25)


def test_differences_that_never_vary() -> None:
    """Accuracies are shares of so many samples, so two seeds may differ by exactly the same: not proof of anything."""
    same, always = paired({1: 0.5, 2: 0.6}, {1: 0.5, 2: 0.6}), paired({1: 0.9, 2: 0.8}, {1: 0.8, 2: 0.7})
    assert same is not None and always is not None and 0.9 - 0.8 != 0.8 - 0.7
    assert (same.p, always.p) == (1.0, None) and always.difference.mean == pytest.approx(0.1)


def test_holm_on_its_definition() -> None:
    assert holm([0.01, 0.04, None, 0.03]) == pytest.approx([0.03, 0.06, None, 0.06])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_against_the_step_down_rule(p_values: list[float]) -> None:
    """Rejecting step by step at any level rejects just those whose corrected value is below it."""
    corrected = [p for p in holm(p_values) if p is not None]
    for level in (0.01, 0.05, 0.2):
        rejected = set()
        for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
            if (len(p_values) - rank) * p_values[index] > level:
                break
            rejected.add(index)
        ours = {index for index, p in enumerate(corrected) if p <= level}
        assert ours == rejected or any(math.isclose(p, level) for p in corrected)
