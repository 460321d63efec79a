import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.config.client_settings import ClientSettings
from fedsieve.federate.selection.by_size import drawn_by_size as by_size
from fedsieve.federate.selection.high_loss import HighLoss
from fedsieve.federate.selection.uniform import drawn as uniform
from fedsieve.randomness import numpy_generator


@given(count=st.integers(1, 300), fraction=st.floats(0.001, 1), seed=st.integers(0, 99))
def test_as_many_different_clients_as_asked(count: int, fraction: float, seed: int) -> None:
    wanted = ClientSettings(count=count, fraction=fraction).per_round
    assert wanted == max(1, round(fraction * count))
    chosen = uniform(count, wanted, numpy_generator(seed, "clients", "head", 1))
    assert len(set(chosen)) == len(chosen) == wanted
    assert chosen == sorted(chosen) and chosen[0] >= 0 and chosen[-1] < count
    assert chosen == uniform(count, wanted, numpy_generator(seed, "clients", "head", 1))


def test_every_client_is_equally_likely() -> None:
    """2,000 rounds of 10 of 50 clients: a chi-squared statistic that uniform sampling exceeds once in 10^6."""
    rounds, count, per_round = 2000, 50, 10
    seen = np.zeros(count)
    for round in range(rounds):
        seen[uniform(count, per_round, numpy_generator(0, "clients", "head", round))] += 1
    expected = rounds * per_round / count
    statistic = ((seen - expected) ** 2).sum() / (expected * (1 - per_round / count))
    assert 15 < statistic < 115  # 49 degrees of freedom


def test_by_size_is_in_proportion_to_samples() -> None:
    sizes = [10, 0, 30, 60]
    drawn = [by_size(sizes, 1, np.random.default_rng(seed))[0] for seed in range(4000)]
    counts = np.bincount(drawn, minlength=4)
    assert counts[1] == 0
    for client, share in ((0, 0.1), (2, 0.3), (3, 0.6)):
        assert abs(counts[client] - 4000 * share) < 5 * np.sqrt(4000 * share * (1 - share))
    assert by_size(sizes, 3, np.random.default_rng(0)) == [0, 2, 3]


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=40), data=st.data(), seed=st.integers(0, 99))
def test_by_size_draws_as_numpy_does(sizes: list[int], data: st.DataObject, seed: int) -> None:
    sizes[data.draw(st.integers(0, len(sizes) - 1))] += 1
    wanted = data.draw(st.integers(1, np.count_nonzero(sizes)))
    shares = np.array(sizes) / np.sum(sizes)
    truth = np.random.default_rng(seed).choice(len(sizes), size=wanted, replace=False, p=shares)
    assert by_size(sizes, wanted, np.random.default_rng(seed)) == sorted(truth.tolist())
    assert by_size(np.array(sizes), wanted, np.random.default_rng(seed)) == sorted(truth.tolist())


def test_more_clients_than_have_samples() -> None:
    with pytest.raises(ValueError, match="only 2 have samples"):
        by_size([3, 0, 1], 3, np.random.default_rng(0))


@given(
    losses=st.dictionaries(st.integers(0, 50), st.floats(0, 5), min_size=1, max_size=12),
    data=st.data(),
)
def test_highest_is_a_direct_reading(losses: dict[int, float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(losses)))
    chosen = HighLoss(HighLoss.Settings(candidates=20), np.ones(51), count).among(losses)
    assert chosen == sorted(set(chosen)) and len(chosen) == count and set(chosen) <= set(losses)
    for client in losses.keys() - set(chosen):
        assert all((losses[one], -one) > (losses[client], -client) for one in chosen)
