import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.data.holdout import stratified


@given(labels=st.lists(st.integers(0, 5), min_size=1, max_size=200), share=st.floats(0, 1), seed=st.integers(0, 9))
def test_each_class_gives_its_share(labels: list[int], share: float, seed: int) -> None:
    array, held = np.asarray(labels), round(share * len(labels))
    rest, chosen = stratified(array, held, np.random.default_rng(seed))
    assert len(chosen) == held
    assert sorted([*rest, *chosen]) == list(range(len(labels)))
    for label in set(labels):
        exact = held * labels.count(label) / len(labels)
        assert abs((array[chosen] == label).sum() - exact) < 1
    again = stratified(array, held, np.random.default_rng(seed))
    assert np.array_equal(chosen, again[1])
