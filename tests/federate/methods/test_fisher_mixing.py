"""Fisher-weighted mixing against its formula read weight by weight, and what rounding must not do to it."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsieve.config.registry import NoSettings
from fedsieve.errors import RunError
from fedsieve.federate.aggregators.mean import Mean
from fedsieve.federate.methods.fisher_mixing import FisherMixing, mix, pack_scores, unpack_scores
from fedsieve.federate.server_optimizers.sgd import Sgd
from fedsieve.model.flat import FlatModel

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 0.0}  # relative

dtypes = st.sampled_from(DTYPES)
numbers = st.floats(-8, 8, width=32)
scores = st.one_of(st.just(0.0), st.floats(-14, 0).map(lambda power: 10.0**power))
clients_scores = st.lists(st.tuples(*[scores] * 4), min_size=1, max_size=6).map(torch.tensor)  # client by weight


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]).tolist()


def by_the_formula(weights: Tensor, old: Tensor, own: Tensor, total: Tensor) -> list[float]:
    """Each weight on its own, in float64: Python's."""
    theta = []
    for index, weight in enumerate(weights.tolist()):
        rounded = float(weights[index].to(old.dtype))
        if index >= len(own) or float(total[index]) == 0 or float(old[index]) == rounded:
            theta.append(weight)
            continue
        beta = float(own[index]) / float(total[index])
        theta.append(beta * float(old[index]) + (1 - beta) * weight)
    return theta


@given(
    everyone=clients_scores,
    weights=st.tuples(*[numbers] * 6),  # four parameters and two buffers
    old=st.tuples(*[numbers] * 4),
    dtype=dtypes,
    exact=st.booleans(),
)
def test_is_equation_5(everyone: Tensor, weights, old, dtype: torch.dtype, exact: bool) -> None:
    precision = torch.float64 if exact else torch.float32
    given_weights, given_old = torch.tensor(weights, dtype=precision), torch.tensor(old).to(dtype)
    shares = [unpack_scores(pack_scores(own, dtype)).to(precision) for own in everyone]
    total = torch.stack(shares).sum(dim=0)
    theta = mix(given_weights, given_old, shares[0], total)
    expected = by_the_formula(given_weights, given_old, shares[0], total)
    assert theta.dtype == precision
    np.testing.assert_allclose(theta, expected, rtol=0, atol=1e-14 if exact else 4e-6)
    assert given_weights.tolist() == list(torch.tensor(weights).tolist())  # the server's own stay as they were
    assert bits(theta[4:]) == bits(given_weights[4:])
    low, high = torch.minimum(given_weights[:4], given_old), torch.maximum(given_weights[:4], given_old)
    slack = 1e-14 if exact else 4e-6
    assert ((low - slack <= theta[:4]) & (theta[:4] <= high + slack)).all()


@given(everyone=clients_scores, dtype=dtypes)
def test_the_clients_shares_sum_to_one(everyone: Tensor, dtype: torch.dtype) -> None:
    shares = [unpack_scores(pack_scores(own, dtype)) for own in everyone]
    total = torch.stack(shares).sum(dim=0)
    zeros, ones = torch.zeros(4), torch.ones(4, dtype=dtype)
    betas = torch.stack([mix(zeros, ones, own, total) for own in shares])  # from 0 to 1: beta itself
    np.testing.assert_allclose(betas.sum(dim=0), (total > 0).float(), rtol=0, atol=1e-6)


@given(weights=st.tuples(*[numbers] * 4), old=st.tuples(*[numbers] * 4), dtype=dtypes)
def test_who_has_no_score_follows_the_server(weights, old, dtype: torch.dtype) -> None:
    server, own = torch.tensor(weights), torch.tensor([0.0, 0.0, 0.0, 1.0])
    theta = mix(server, torch.tensor(old).to(dtype), own, torch.tensor([1.0, 1e-14, 0.0, 1.0]))
    assert bits(theta[:3]) == bits(server[:3])


@given(weights=st.tuples(*[numbers] * 4), old=st.tuples(*[numbers] * 4), own=scores.filter(bool), dtype=dtypes)
def test_the_only_client_keeps_its_own(weights, old, own: float, dtype: torch.dtype) -> None:
    server, remembered, score = torch.tensor(weights), torch.tensor(old).to(dtype), torch.full((4,), own)
    expected = torch.where(remembered == server.to(dtype), server, remembered.float())
    assert torch.equal(mix(server, remembered, score, score), expected)


@given(weights=st.lists(st.floats(width=32, allow_nan=False), min_size=1), dtype=dtypes, own=scores, others=scores)
def test_what_nobody_changed_stays_to_the_bit(weights, dtype: torch.dtype, own: float, others: float) -> None:
    server = torch.tensor(weights)
    share, total = torch.full_like(server, own), torch.full_like(server, own + others)
    theta = mix(server, server.to(dtype), share, total)
    assert bits(theta) == bits(server)
    assert theta.data_ptr() != server.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_step_of_the_small_type_is_a_difference(dtype: torch.dtype) -> None:
    server = torch.tensor([1.0, 0.1, -3.0])
    next_to = (server.to(dtype).view(torch.int16 if dtype.itemsize == 2 else torch.int32) + 1).view(dtype)
    theta = mix(server, next_to, torch.full((3,), 3.0), torch.full((3,), 4.0))
    np.testing.assert_allclose(theta, 0.75 * next_to.double() + 0.25 * server.double(), rtol=1e-7)
    assert (theta != server).all()


def test_shares_stay_within_0_and_1() -> None:
    """Whatever is passed as total: less than one's own, or nothing."""
    server, old = torch.tensor([1.0, 1.0, -0.0]), torch.tensor([3.0, 3.0, 3.0])
    theta = mix(server, old, torch.tensor([2.0, 2.0, 0.0]), torch.tensor([1.0, 0.0, 0.0]))
    assert bits(theta) == bits(torch.tensor([3.0, 1.0, -0.0]))


def test_without_a_score_nothing_of_the_old_weights_is_left() -> None:
    """Not even the sign of a zero, or what did not fit into the small type."""
    server, old = torch.tensor([-0.0, 1.0]), torch.tensor([3.0, float("inf")], dtype=torch.float16)
    assert bits(mix(server, old, torch.zeros(2), torch.ones(2))) == bits(server)


def test_old_weights_may_have_the_buffers_too() -> None:
    old = torch.tensor([2.0, 2.0, 2.0], dtype=torch.float16)
    assert mix(torch.zeros(3), old, torch.ones(2), torch.ones(2) * 2).tolist() == [1, 1, 0]


def test_the_total_may_be_more_precise_than_the_weights() -> None:
    theta = mix(torch.zeros(2), torch.ones(2), torch.ones(2), torch.tensor([3.0, 1e-9 + 1], dtype=torch.float64))
    assert theta.dtype == torch.float32
    np.testing.assert_allclose(theta, [1 / 3, 1], rtol=1e-7)


@given(
    largest=st.floats(-20, 4).map(lambda power: 10.0**power),
    below=st.lists(st.floats(-8, 0).map(lambda power: 10.0**power), max_size=20),
    dtype=dtypes,
)
def test_scores_come_back_to_the_precision_of_the_type(largest: float, below: list[float], dtype: torch.dtype) -> None:
    given_scores = torch.tensor([0.0, largest, *(largest * ratio for ratio in below)])
    state = pack_scores(given_scores, dtype)
    assert state["fisher"].dtype == dtype and torch.isfinite(state["fisher"]).all()
    read = unpack_scores(state)
    assert read.dtype == torch.float32 and read[0] == 0
    assert ((read - given_scores).abs() <= given_scores * ROUNDING[dtype]).all()


@given(
    scores=st.lists(st.floats(0, width=32, max_value=2.0**127), min_size=1),
    dtype=dtypes,
)
def test_scores_of_any_size_are_packed_in_order(scores: list[float], dtype: torch.dtype) -> None:
    given_scores = torch.tensor(scores).sort().values
    read = unpack_scores(pack_scores(given_scores, dtype))
    assert torch.isfinite(read).all() and (read.diff() >= 0).all() and (read >= 0).all()
    if float(given_scores[-1]) > 1e-30:
        assert float(read[-1]) == pytest.approx(float(given_scores[-1]), rel=ROUNDING[dtype], abs=0)


def test_float16_is_used_up_to_its_top() -> None:
    for largest in (2.0**-40, 1.0, 1.9999999, 3e-14, 1e-30, 2.0**-149, 3e38):
        state = pack_scores(torch.tensor([largest, 0.0]), torch.float16)
        assert state["fisher"][0] <= 2**15
        assert state["fisher"][0] >= (2**14 if largest > 1e-33 else 0)
    span = torch.tensor([1.0, 2.0**-28, 2.0**-38, 2.0**-41])
    assert unpack_scores(pack_scores(span, torch.float16)).tolist() == [1.0, 2.0**-28, 2.0**-38, 0.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_scores_zero(dtype: torch.dtype) -> None:
    read = unpack_scores(pack_scores(torch.zeros(3), dtype))
    assert read.tolist() == [0, 0, 0]
    assert mix(torch.ones(3), torch.zeros(3, dtype=dtype), read, read).tolist() == [1, 1, 1]


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_scores_that_are_not_finite_are_refused(wrong: float) -> None:
    with pytest.raises(RunError, match="not finite"):
        pack_scores(torch.tensor([1.0, wrong, 0.0]), torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_takes_a_copy_and_the_bytes_it_said(dtype: torch.dtype) -> None:
    given_scores = torch.rand(7, generator=torch.Generator().manual_seed(0))
    state = pack_scores(given_scores, dtype)
    before = bits(state["fisher"])
    given_scores.zero_()
    assert bits(state["fisher"]) == before
    state["old"] = torch.zeros(7, dtype=dtype)
    scope = FlatModel(nn.ModuleDict({"head": nn.Linear(6, 1)})).scope("head")
    settings = FisherMixing.Settings(dtype=str(dtype).removeprefix("torch."))
    method = FisherMixing(settings, scope, partial(Mean, NoSettings()), Sgd(NoSettings()))
    assert method.remembers(scope) == sum(tensor.nbytes for tensor in state.values())
