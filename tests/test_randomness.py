import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.randomness import numpy_generator, seed_at, seed_layers, torch_generator

parts = st.lists(st.one_of(st.integers(0, 100), st.text(max_size=4)), max_size=4)


@given(st.integers(0, 2**40), parts, parts)
def test_addresses_are_apart(seed: int, one: list, other: list) -> None:
    assert (seed_at(seed, *one) == seed_at(seed, *other)) == (one == other)
    assert 0 <= seed_at(seed, *one) < 2**63


def test_known_values() -> None:
    """Results depend on these: a change would silently give every experiment another outcome."""
    assert seed_at(42, "clients", "head", 1) == 1566958073923545666
    assert torch.rand(1, generator=torch_generator(1, "x")) == torch.rand(1, generator=torch_generator(1, "x"))
    assert numpy_generator(1, "x").random() != numpy_generator(2, "x").random()


def test_layers_draw_as_after_torch_manual_seed() -> None:
    torch.manual_seed(seed_at(3, "dropout", "head", 1))
    expected = torch.rand(5), torch.nn.functional.dropout(torch.ones(50))
    seed_layers(3, "dropout", "head", 1)
    assert all(map(torch.equal, (torch.rand(5), torch.nn.functional.dropout(torch.ones(50))), expected))
    assert torch.initial_seed() == seed_at(3, "dropout", "head", 1)
