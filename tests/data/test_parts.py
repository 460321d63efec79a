"""The clients' positions in one array: what a list of arrays would say, in a small part of the room."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.config.partition_settings import IidSplit
from fedsieve.data.partition import split_clients
from fedsieve.data.parts import Parts

lists = st.lists(st.lists(st.integers(0, 30), max_size=5), max_size=6)


@given(lists)
def test_like_a_list_of_arrays(truth: list[list[int]]) -> None:
    parts = Parts.of(np.array(one, dtype=np.int64) for one in truth)
    assert len(parts) == len(truth) and parts.sizes.tolist() == [len(one) for one in truth]
    assert [part.tolist() for part in parts] == truth
    for index in range(-len(truth), len(truth)):
        assert parts[index].tolist() == truth[index]
    for index in (len(truth), -len(truth) - 1):
        with pytest.raises(IndexError):
            parts[index]


@given(st.lists(st.integers(-1, 4), max_size=20))
def test_by_owner(owner: list[int]) -> None:
    parts = Parts.by_owner(np.array(owner, dtype=np.int64), 5)
    assert [part.tolist() for part in parts] == [[k for k, one in enumerate(owner) if one == who] for who in range(5)]


@given(lists, st.integers(-7, 7) | st.none(), st.integers(-7, 7) | st.none())
def test_clients_in_a_row(truth: list[list[int]], first: int | None, last: int | None) -> None:
    parts = Parts.of(np.array(one, dtype=np.int64) for one in truth)
    assert [part.tolist() for part in parts[first:last]] == truth[first:last]


@given(lists)
def test_count_classes_is_a_count(truth: list[list[int]]) -> None:
    labels = np.random.default_rng(0).integers(0, 4, size=31)
    counts = Parts.of(np.array(one, dtype=np.int64) for one in truth).count_classes(labels, 4)
    assert counts.shape == (len(truth), 4)
    for row, one in zip(counts, truth, strict=True):
        assert row.tolist() == [sum(labels[position] == c for position in one) for c in range(4)]


def test_positions_as_narrow_as_they_fit() -> None:
    assert Parts(np.array([0, 2**31 - 1]), np.array([2])).positions.dtype == np.int32
    wide = Parts(np.array([0, 2**31]), np.array([2]))
    assert wide.positions.dtype == np.int64 and wide[0].tolist() == [0, 2**31]


def test_sizes_must_fit() -> None:
    with pytest.raises(ValueError, match="3 positions for clients of 2 samples"):
        Parts(np.arange(3), np.array([1, 1]))


def test_a_hundred_thousand_clients_are_two_arrays() -> None:
    labels = np.arange(200_000) % 10
    tracemalloc.start()
    try:
        split = split_clients(labels, 10, 100_000, IidSplit(), 0)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4 * 200_000 + 8 * 100_000 + 50_000
    assert split.clients.sizes.tolist() == [2] * 100_000
