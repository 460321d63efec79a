import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.federate.aggregate import WEIGHTINGS, FedAvg
from fedsieve.federate.client import Update

numbers = st.floats(-100, 100, width=32)


@given(
    updates=st.lists(st.tuples(st.integers(1, 1000), st.tuples(numbers, numbers, numbers)), min_size=1, max_size=8),
    weights=st.tuples(numbers, numbers, numbers),
    weighting=st.sampled_from(sorted(WEIGHTINGS)),
)
def test_is_the_weighted_mean_of_the_clients_weights(updates, weights, weighting) -> None:
    server = FedAvg(torch.tensor(weights), WEIGHTINGS[weighting])
    for client, (samples, delta) in enumerate(updates):
        server.add(Update(client, samples, {"delta": torch.tensor(delta)}))
    clients = np.asarray([np.add(weights, delta) for _, delta in updates])
    shares = [samples if weighting == "samples" else 1 for samples, _ in updates]
    np.testing.assert_allclose(server.finish(), np.average(clients, axis=0, weights=shares), rtol=1e-5, atol=1e-4)


@given(st.permutations(range(6)))
def test_the_order_of_arrival_does_not_matter(order: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    updates = [Update(i, i + 1, {"delta": torch.randn(50, generator=generator)}) for i in range(6)]
    results = []
    for sequence in (range(6), order):
        server = FedAvg(torch.zeros(50), WEIGHTINGS["samples"])
        for index in sequence:
            server.add(updates[index])
        results.append(server.finish())
    assert torch.allclose(*results, rtol=0, atol=1e-7)
