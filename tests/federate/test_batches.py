"""Batches, steps and schedules of a local update."""

import math
from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.config.local_settings import LocalSettings
from fedsieve.federate.batches import batches, number_of_steps
from fedsieve.federate.schedule import SCHEDULES

sizes = st.integers(1, 200)


@given(samples=sizes, batch_size=sizes, epochs=st.integers(1, 4), seed=st.integers(0, 9))
def test_epochs_visit_each_sample_once(samples: int, batch_size: int, epochs: int, seed: int) -> None:
    local = LocalSettings(epochs=epochs, batch_size=batch_size, lr=0.1)
    drawn = list(chain.from_iterable(batches(samples, local, seed, "phase", 1, 0)))
    assert len(drawn) == number_of_steps(samples, local) == epochs * math.ceil(samples / batch_size)
    assert all(len(batch) <= batch_size for batch in drawn)
    together = torch.cat(drawn)
    for epoch in range(epochs):
        part = together[epoch * samples : (epoch + 1) * samples]
        assert sorted(part.tolist()) == list(range(samples))


@given(samples=sizes, batch_size=sizes, steps=st.integers(1, 30))
def test_steps_are_counted_exactly(samples: int, batch_size: int, steps: int) -> None:
    local = LocalSettings(steps=steps, batch_size=batch_size, lr=0.1)
    drawn = list(chain.from_iterable(batches(samples, local, 0, "phase", 1, 0)))
    assert len(drawn) == steps
    counts = torch.cat(drawn).bincount(minlength=samples)
    assert counts.max() - counts.min() <= 1  # no sample is seen again before all have been


def test_batches_depend_on_the_whole_address() -> None:
    local = LocalSettings(epochs=1, batch_size=50, lr=0.1)
    addresses = [(0, "a", 1, 0), (1, "a", 1, 0), (0, "b", 1, 0), (0, "a", 2, 0), (0, "a", 1, 1)]
    drawn = {tuple(next(batches(50, local, *address))[0].tolist()) for address in addresses}
    assert len(drawn) == len(addresses)
    assert tuple(next(batches(50, local, *addresses[0]))[0].tolist()) in drawn


@given(done=st.floats(0, 1))
def test_schedules_fall_from_one_to_zero(done: float) -> None:
    assert SCHEDULES["constant"](done) == 1
    for name in ("linear", "cosine"):
        schedule = SCHEDULES[name]
        assert schedule(0) == 1 and abs(schedule(1)) < 1e-12
        assert 0 <= schedule(done) <= 1 and schedule(done) <= schedule(done / 2)
    assert math.isclose(SCHEDULES["cosine"](done) + SCHEDULES["cosine"](1 - done), 1)
