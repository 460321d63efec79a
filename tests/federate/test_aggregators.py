from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import trim_mean

from fedsieve.config.registry import NoSettings
from fedsieve.federate.aggregators import AGGREGATORS
from fedsieve.federate.aggregators.mean import PIECE, pieces
from fedsieve.federate.norm_limit import all_finite
from fedsieve.federate.server_optimizers.sgd import Sgd
from fedsieve.federate.types import Update
from fedsieve.federate.weighting import WEIGHTINGS
from fedsieve.sieve.mask import Mask


def averaged(aggregate: str, weights: torch.Tensor, updates: list[Update], weighting: str = "samples") -> torch.Tensor:
    """The server's new weights."""
    aggregator = AGGREGATORS[aggregate](NoSettings(), weights)
    for update in updates:
        aggregator.add(replace(update, weight=WEIGHTINGS[weighting](update.samples)))
    return Sgd(Sgd.Settings()).step(weights, aggregator.finish(), {})[0]


numbers = st.floats(-100, 100, width=32)


@given(
    updates=st.lists(st.tuples(st.integers(1, 1000), st.tuples(numbers, numbers, numbers)), min_size=1, max_size=8),
    weights=st.tuples(numbers, numbers, numbers),
    weighting=st.sampled_from(sorted(WEIGHTINGS)),
)
def test_is_the_weighted_mean_of_the_clients_weights(updates, weights, weighting) -> None:
    sent = [Update(client, samples, {"delta": torch.tensor(delta)}) for client, (samples, delta) in enumerate(updates)]
    found = averaged("mean", torch.tensor(weights), sent, weighting)
    clients = np.asarray([np.add(weights, delta) for _, delta in updates])
    shares = [samples if weighting == "samples" else 1 for samples, _ in updates]
    np.testing.assert_allclose(found, np.average(clients, axis=0, weights=shares), rtol=1e-5, atol=1e-4)


@given(st.permutations(range(6)))
def test_the_order_of_arrival_does_not_matter(order: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    updates = [Update(i, i + 1, {"delta": torch.randn(50, generator=generator)}) for i in range(6)]
    results = [averaged("mean", torch.zeros(50), [updates[i] for i in sequence]) for sequence in (range(6), order)]
    assert torch.allclose(*results, rtol=0, atol=1e-7)


@given(
    data=st.data(), clients=st.integers(1, 5), buffers=st.integers(0, 2), weighting=st.sampled_from(sorted(WEIGHTINGS))
)
def test_masked_updates(data: st.DataObject, clients: int, buffers: int, weighting: str) -> None:
    """What a mask froze is zero, or does not count: against numpy's weighted means, weight by weight."""
    shapes, size = {"a": (2, 3), "b": (4,)}, 10
    weights = torch.arange(size + buffers, dtype=torch.float32)
    bools = st.lists(st.booleans(), min_size=size, max_size=size)
    masks = [torch.tensor(data.draw(bools)) for _ in range(clients)]
    deltas = [
        torch.tensor(data.draw(st.lists(numbers, min_size=size + buffers, max_size=size + buffers))) for _ in masks
    ]
    samples = [data.draw(st.integers(1, 50)) for _ in masks]
    updates = []
    for client in range(clients):
        sent = torch.cat((masks[client], torch.ones(buffers, dtype=torch.bool)))
        mask = Mask.pack(shapes, masks[client])
        updates.append(Update(client, samples[client], {"delta": deltas[client][sent]}, mask=mask))
    for aggregate in ("mean", "active"):
        for place, found in enumerate(averaged(aggregate, weights, updates, weighting)):
            active = [place >= size or bool(mask[place]) for mask in masks]
            changes = [float(delta[place]) if on else 0.0 for delta, on in zip(deltas, active, strict=True)]
            shares = [count if weighting == "samples" else 1 for count in samples]
            if aggregate == "active":
                shares = [share * on for share, on in zip(shares, active, strict=True)]
            mean = np.average(changes, weights=shares) if any(shares) else 0.0
            np.testing.assert_allclose(found, float(weights[place]) + mean, rtol=1e-5, atol=1e-4)


def test_a_frozen_weight_keeps_its_bits() -> None:
    """Also that of a negative zero, which adding zero would make a positive one."""
    weights = torch.tensor([-0.0, 0.0, 1e-45, 3.3, -0.0])
    mask = Mask.pack({"a": (5,)}, torch.tensor([False, False, False, False, True]))
    for aggregate in ("mean", "active"):
        after = averaged(aggregate, weights, [Update(0, 3, {"delta": torch.tensor([0.5])}, mask=mask)])
        assert torch.equal(after[:4].view(torch.int32), weights[:4].view(torch.int32))
        assert float(after[4]) == 0.5


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_found(wrong: float) -> None:
    values = torch.randn(1000)
    assert all_finite(values) and all_finite(torch.empty(0))
    assert all_finite(torch.full((1000,), 3e38))  # though their sum overflows
    values[137] = wrong
    assert not all_finite(values)
    values[138] = -wrong  # +inf and -inf do not cancel either
    assert not all_finite(values)


@pytest.mark.parametrize("size", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_pieces_are_the_whole(size: int) -> None:
    vector = torch.arange(size)
    assert torch.equal(torch.cat([vector[part] for part in pieces(vector)]), vector)
    assert [len(vector[part]) for part in pieces(vector)] == [len(part) for part in vector.split(PIECE)]


@given(
    data=st.data(),
    clients=st.integers(1, 7),
    buffers=st.integers(0, 2),
    share=st.sampled_from([None, 0.0, 0.1, 0.29, 0.4]),
)
def test_median_and_trimmed_mean_are_those_of_numpy_and_scipy(
    data: st.DataObject, clients: int, buffers: int, share: float | None
) -> None:
    """Over the clients for which a weight was active, weight by weight; in several pieces."""
    shapes, size = {"a": (2, 3), "b": (4,)}, 10
    is_masked = data.draw(st.booleans())
    bools = st.lists(st.booleans(), min_size=size, max_size=size)
    masks = [torch.tensor(data.draw(bools) if is_masked else [True] * size) for _ in range(clients)]
    values = np.asarray(
        data.draw(st.lists(numbers, min_size=clients * (size + buffers), max_size=clients * (size + buffers)))
    )
    values = values.reshape(clients, -1).astype(np.float32)
    name = "median" if share is None else "trimmed_mean"
    part = AGGREGATORS[name]
    aggregator = part(NoSettings() if share is None else part.Settings(share=share), torch.zeros(size + buffers))
    for client, (mask, row) in enumerate(zip(masks, values, strict=True)):
        there = torch.cat((mask, torch.ones(buffers, dtype=torch.bool)))
        packed = Mask.pack(shapes, mask) if is_masked else None
        aggregator.add(
            Update(client, client + 1, {"delta": torch.from_numpy(row)[there]}, mask=packed, weight=client + 1.0)
        )
    with mock.patch("fedsieve.federate.aggregators.median.AT_ONCE", 3 * clients):
        found = aggregator.finish()
    for place in range(size + buffers):
        own = [row[place] for mask, row in zip(masks, values, strict=True) if place >= size or mask[place]]
        expected = 0.0 if not own else np.median(own) if share is None else trim_mean(own, share)
        np.testing.assert_allclose(found[place], expected, rtol=1e-5, atol=1e-5)


def test_a_median_ignores_a_minority_however_large() -> None:
    aggregator = AGGREGATORS["median"](NoSettings(), torch.zeros(2))
    for client, value in enumerate([0.1, 0.2, 0.3, 1e30, -1e30]):
        aggregator.add(Update(client, 1, {"delta": torch.full((2,), value)}))
    torch.testing.assert_close(aggregator.finish(), torch.full((2,), 0.2, dtype=torch.float64))
