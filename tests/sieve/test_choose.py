"""`choose` against a slow, obvious twin, and what it promises whatever the scores."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedsieve.errors import InputError, RunError
from fedsieve.sieve import choose as module
from fedsieve.sieve.choose import active_range, choose, unit_sizes
from fedsieve.sieve.mask import Mask, Shapes

quick = settings(deadline=None, max_examples=250)

tensor_shapes = st.one_of(
    st.tuples(),
    st.tuples(st.integers(0, 12)),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.just(1), st.integers(1, 5), st.integers(1, 4)),
    st.tuples(st.integers(2, 3), st.integers(1, 3), st.integers(1, 2)),
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.integers(1, 3)),
)
densities = st.one_of(st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.9, 1.0]), st.floats(0, 1))


@dataclass
class Case:
    """What one call of `choose` gets."""

    scores: torch.Tensor
    density: float
    shapes: dict[str, tuple[int, ...]]
    within: Mask | None
    unit: str
    across: str
    keep_alive: int
    draw: str

    def choose(self, **changes: Any) -> Mask:
        return choose(**{**vars(self), **changes})

    def available(self) -> set[int]:
        everything = range(len(self.scores))
        return {i for i in everything if self.within is None or self.within.unpack()[i]}


@st.composite
def cases(pick: st.DrawFn, **fixed: str) -> Case:
    """Few tensors, scores with many ties or with none, sometimes a mask to stay within."""
    shapes = {f"tensor{i}": shape for i, shape in enumerate(pick(st.lists(tensor_shapes, min_size=1, max_size=5)))}
    weights = sum(map(math.prod, shapes.values()))
    random = np.random.default_rng(pick(st.integers(0, 2**31)))
    unit = fixed.get("unit") or pick(st.sampled_from(["weight", "row", "tensor"]))
    across = fixed.get("across") or ("model" if unit == "tensor" else pick(st.sampled_from(["model", "tensor"])))
    how = fixed.get("draw") or pick(st.sampled_from(["exact", "exact", "bernoulli"]))
    if how == "bernoulli":
        scores = np.repeat(random.random(len(sizes := unit_sizes(shapes, unit))), sizes.numpy())
    else:  # quarters have exact sums, so that the twin's means are equal where ours are
        scores = random.integers(-pick(st.sampled_from([1, 3, 1000])), 3, weights) / 4
    mask = None
    if pick(st.booleans()):
        share = pick(st.sampled_from([0.0, 0.2, 0.7, 0.95]))
        mask = Mask.pack(shapes, torch.from_numpy(random.random(weights) < share))
        if pick(st.booleans()):  # whole units
            sizes = unit_sizes(shapes, unit)
            mask = Mask.pack(shapes, torch.from_numpy(random.random(len(sizes)) < share).repeat_interleave(sizes))
    dtype = pick(st.sampled_from([torch.float32, torch.float64]))
    keep_alive = pick(st.sampled_from([0, 1, 1, 2, 7]))
    return Case(torch.from_numpy(scores).to(dtype), pick(densities), shapes, mask, unit, across, keep_alive, how)


def positions_of(shapes: Shapes, unit: str) -> list[list[list[int]]]:
    """The positions of the weights of each unit of each tensor."""
    found, start = [], 0
    for shape in shapes.values():
        positions = start + np.arange(math.prod(shape)).reshape(shape)
        start += positions.size
        if unit == "row" and positions.ndim == 3 and len(positions) == 1:
            positions = positions[0]
        if unit == "tensor":
            units = [positions.flatten().tolist()]
        elif unit == "weight" or positions.ndim < 2:
            units = [[position] for position in positions.flatten().tolist()]
        else:
            units = [row.flatten().tolist() for row in positions]
        found.append([one for one in units if one])
    return found


def weights_in(units: list[list[int]]) -> int:
    return sum(map(len, units))


def filled(taken: list[list[int]], order: list[list[int]], target: float) -> list[list[int]]:
    """`taken` and so many of `order` that the sum is nearest to the target."""
    choices = [taken + order[:count] for count in range(len(order) + 1)]
    return min(choices, key=lambda units: (abs(weights_in(units) - target), len(units)))


def twin(case: Case) -> set[int]:
    """The positions that `choose` should choose; not for the weights of `across tensor`, see `check_shares`."""
    scores, allowed = case.scores.tolist(), case.available()

    def key(unit: list[int]) -> tuple[float, int]:
        return sum(scores[i] for i in unit) / len(unit), unit[0]

    taken: list[list[int]] = []
    orders = []
    for units in positions_of(case.shapes, case.unit):
        order = sorted((unit for unit in units if allowed.issuperset(unit)), key=key)
        orders.append(order)
        best: list[list[int]] = []
        while case.unit != "tensor" and weights_in(best) < case.keep_alive and len(best) < len(order):
            best = order[: len(best) + 1]
        if case.draw == "exact" and case.across == "tensor":
            size = weights_in(units)
            best = filled(best, order[len(best) :], case.density * size)
        taken += best
    everything = sorted((unit for order in orders for unit in order), key=key)
    rest = [unit for unit in everything if unit not in taken]
    if case.draw == "bernoulli":
        taken += [unit for unit in rest if scores[unit[0]] < case.density]
    elif case.across == "model":
        taken = filled(taken, rest, round(case.density * len(scores)))
    return {i for unit in taken or everything[:1] for i in unit}


def active(mask: Mask) -> set[int]:
    return set(mask.unpack().nonzero().flatten().tolist())


@settings(quick, max_examples=600)
@given(cases(), st.sampled_from([(2, 1), (4, 1), (2**15, 2**9)]))
def test_it_chooses_what_the_obvious_twin_does(case: Case, sampling: tuple[int, int]) -> None:
    assume((case.unit, case.across, case.draw) != ("weight", "tensor", "exact"))
    with patch.object(module, "SAMPLE", sampling[0]), patch.object(module, "MARGIN", sampling[1]):
        mask = case.choose()
    assert active(mask) == twin(case)
    assert mask.shapes == case.shapes


@quick
@given(cases())
def test_promises(case: Case) -> None:
    before = case.scores.clone()
    mask, within = case.choose(), case.within or Mask.full(case.shapes)
    assert mask == case.choose()
    assert mask <= within
    assert torch.equal(case.scores, before)
    chosen = active(mask)
    for units in positions_of(case.shapes, case.unit):
        for unit in units:
            assert chosen.isdisjoint(unit) or chosen.issuperset(unit)  # never a part of one
        whole = [unit for unit in units if case.available().issuperset(unit)]
        if case.unit != "tensor":
            alive = sum(len(unit) for unit in units if chosen.issuperset(unit))
            assert alive >= min(case.keep_alive, weights_in(whole))
    some = [unit for units in positions_of(case.shapes, case.unit) for unit in units]
    assert chosen or not any(case.available().issuperset(unit) for unit in some)


@quick
@given(cases(unit="weight", across="model", draw="exact"))
def test_the_number_of_weights_is_exact(case: Case) -> None:
    available = case.within or Mask.full(case.shapes)
    needed = sum(min(case.keep_alive, count) for count in available.counts().values())
    target = max(1, needed, round(case.density * available.size))
    assert case.choose().active == min(target, available.active)


@quick
@given(cases(unit="weight", across="tensor", draw="exact"))
def test_the_same_share_of_each_tensor(case: Case) -> None:
    case.within = None
    mask = case.choose()
    counts, sizes = mask.counts(), {name: math.prod(shape) for name, shape in case.shapes.items()}
    least = {name: min(case.keep_alive, size) for name, size in sizes.items()}
    off = {name: counts[name] - case.density * sizes[name] for name in sizes}
    target = round(case.density * mask.size)
    if target or any(least.values()):
        assert mask.active == max(target, sum(least.values()))
    else:
        assert mask.active == min(1, mask.size)
    assert all(counts[name] >= least[name] for name in sizes)
    if all(case.density * sizes[name] >= least[name] for name in sizes) and target:
        assert all(abs(difference) < 1 for difference in off.values())
        assert counts == by_largest_remainder(case.density, sizes)
    elif target:  # no weight could be given from one tensor to another to make the shares more equal
        gives = [off[name] for name in sizes if counts[name] > least[name]]
        takes = [off[name] for name in sizes if counts[name] < sizes[name]]
        assert not gives or not takes or max(gives) <= min(takes) + 1 + 1e-9
    if target or any(least.values()):
        check_each_has_its_lowest(case, mask, counts)
    capped = Mask.pack(case.shapes, torch.arange(mask.size) % 3 > 0)
    allowed = capped.counts()
    nested = case.choose(within=capped)
    kept = sum(min(least[name], allowed[name]) for name in sizes)
    assert nested.active == min(capped.active, max(target, kept, 1))
    assert nested <= capped


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1000, 105, 2, 2, 2], [99, 9, 1, 1, 1]),  # 100, 10.5 and 0.2 each: 111 in all, of which the last have 3
        ([100, 100, 2], [10, 9, 1]),  # of equal ones the later gives
        ([5, 5, 15, 25], [1, 1, 1, 2]),  # of equal remainders the earlier gets, and none gets a second
    ],
)
def test_who_gives_to_those_kept_alive(sizes: list[int], expected: list[int]) -> None:
    shapes = {f"tensor{i}": (size,) for i, size in enumerate(sizes)}
    assert list(choose(torch.zeros(sum(sizes)), 0.1, shapes, across="tensor").counts().values()) == expected


def by_largest_remainder(density: float, sizes: dict[str, int]) -> dict[str, int]:
    counts = {name: math.floor(density * size) for name, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda name: counts[name] - density * sizes[name])  # stable: the earlier first
    for name in by_remainder[: round(density * sum(sizes.values())) - sum(counts.values())]:
        counts[name] += 1
    return counts


def check_each_has_its_lowest(case: Case, mask: Mask, counts: dict[str, int]) -> None:
    scores = case.scores.tolist()
    for name, (start, stop) in mask.ranges.items():
        lowest = sorted(range(start, stop), key=lambda i: (scores[i], i))[: counts[name]]
        assert {i for i in active(mask) if start <= i < stop} == set(lowest)


@quick
@given(cases(draw="exact"), densities)
def test_a_lower_density_chooses_a_part(case: Case, other: float) -> None:
    """Of the same scores if all units are compared; within the first choice whatever the scores."""
    lower, higher = sorted((case.density, other))
    first = case.choose(density=higher)
    assert case.across == "tensor" or case.choose(density=lower) <= first  # largest remainders are not monotone
    second = case.choose(density=lower, within=first, scores=-case.scores)
    assert second <= first
    assert second.active or not first.active


def test_a_small_example_by_hand() -> None:
    shapes = {"matrix": (2, 3), "bias": (2,), "token": (1, 2, 2)}
    scores = torch.tensor([5.0, 1, 1, 0, 9, 9, 8, 7, 6, 6, 1, 1])

    def chosen(density: float, **arguments: Any) -> list[int]:
        return sorted(active(choose(scores, density, shapes, **arguments)))

    assert chosen(0.25, keep_alive=0) == [1, 2, 3]  # 1 at positions 10 and 11 comes later
    assert chosen(0.25) == [3, 7, 10]
    assert chosen(0.25, keep_alive=2) == [1, 3, 6, 7, 10, 11]  # six of twelve, as it must
    assert chosen(0.25, across="tensor") == [3, 7, 10]
    assert chosen(0.25, across="tensor", keep_alive=0) == [1, 3, 10]  # shares of 1.5, 0.5 and 1: the earlier first
    assert chosen(0.5, across="tensor") == [1, 2, 3, 7, 10, 11]
    assert chosen(0.25, unit="row", keep_alive=0) == [10, 11]  # 2 or 5 weights, and 3 are asked for
    assert chosen(0.4, unit="row", keep_alive=0) == [0, 1, 2, 10, 11]
    assert chosen(0.25, unit="row") == [0, 1, 2, 7, 10, 11]  # one row of each
    assert chosen(0.25, unit="row", across="tensor", keep_alive=0) == [10, 11]  # 1.5 of 3, 0.5 of 1, 1 of 2: none
    assert chosen(0.3, unit="row", across="tensor", keep_alive=0) == [0, 1, 2, 7, 10, 11]
    assert chosen(0.25, unit="tensor") == [8, 9, 10, 11]  # its mean is 3.5
    assert chosen(0.01, keep_alive=0) == [3]


def test_rows() -> None:
    shapes = {
        "conv": (4, 3, 2, 2),
        "token": (1, 1, 6),
        "positions": (1, 5, 6),
        "bias": (3,),
        "scale": (),
        "none": (0, 4),
    }
    assert unit_sizes(shapes, "row").tolist() == [12] * 4 + [6] + [6] * 5 + [1] * 3 + [1]
    assert unit_sizes(shapes, "tensor").tolist() == [48, 6, 30, 3, 1]
    assert unit_sizes(shapes, "weight").tolist() == [1] * 88
    assert unit_sizes({}, "row").tolist() == []
    assert unit_sizes({"cube": (1, 2, 3), "deep": (1, 1, 2, 3)}, "row").tolist() == [3, 3, 6]
    assert unit_sizes(shapes, "row").dtype == torch.int64


@pytest.mark.parametrize("unit", ["weight", "row"])
def test_bernoulli_takes_each_unit_by_itself(unit: str) -> None:
    shapes = {"matrix": (5000, 4), "bias": (3000,), "scale": (2,)}
    sizes = unit_sizes(shapes, unit)
    draws = torch.rand(len(sizes), generator=torch.Generator().manual_seed(1))
    mask = choose(draws.repeat_interleave(sizes), 0.3, shapes, unit=unit, draw="bernoulli", keep_alive=0)
    assert torch.equal(mask.unpack(), (draws.double() < 0.3).repeat_interleave(sizes))
    taken = int((draws < 0.3).sum())
    assert taken != round(0.3 * len(sizes))  # it is not the exact number
    assert abs(taken - 0.3 * len(sizes)) < 5 * math.sqrt(0.3 * 0.7 * len(sizes))
    none = choose(draws.repeat_interleave(sizes), 0.0, shapes, unit=unit, draw="bernoulli")
    assert set(none.counts().values()) <= {1, 4}  # all kept alive


def test_a_draw_is_compared_with_the_density_itself() -> None:
    draws = torch.tensor([0.7, 0.0])  # in float32 it is a little less than 0.7
    assert choose(draws, 0.7, {"bias": (2,)}, draw="bernoulli").active == 2
    assert choose(torch.tensor([0.5, 0.25]), 0.5, {"bias": (2,)}, draw="bernoulli").active == 1
    equal = torch.full((4,), 0.1, dtype=torch.float64)
    equal[3] = 0.0
    assert sum([0.1] * 3) / 3 > 0.1  # so a mean would not do
    just_above = math.nextafter(0.1, 1)
    assert choose(equal, just_above, {"matrix": (1, 3), "bias": (1,)}, unit="row", draw="bernoulli", keep_alive=0) == (
        Mask.full({"matrix": (1, 3), "bias": (1,)})
    )


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("arguments", [{}, {"unit": "row"}, {"across": "tensor"}, {"draw": "bernoulli"}])
def test_scores_that_are_not_finite(wrong: float, arguments: dict[str, Any]) -> None:
    shapes = {"first": (3,), "second": (2, 2), "third": (4,)}
    scores = torch.zeros(11)
    scores[6] = wrong
    with pytest.raises(RunError, match=r"^the scores of second are not finite: 1 of 4"):
        choose(scores, 0.5, shapes, **arguments)


def test_what_makes_no_sense() -> None:
    shapes, scores = {"matrix": (2, 2)}, torch.zeros(4)
    wrong: list[dict[str, Any]] = [
        {"unit": "tensor", "across": "tensor"},
        {"unit": "column"},
        {"across": "client"},
        {"draw": "gauss"},
        {"keep_alive": -1},
        {"density": 1.1},
        {"density": math.nan},
        {"scores": torch.zeros(5)},
        {"scores": torch.zeros(2, 2)},
        {"scores": torch.zeros(4, dtype=torch.float16)},
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"none of|cannot be|no sense|need as many"):
            choose(**{"scores": scores, "density": 0.5, "shapes": shapes, **arguments})
    with pytest.raises(InputError, match="belongs to another model"):
        choose(scores, 0.5, shapes, within=Mask.full({"other": (2, 2)}))


@pytest.mark.parametrize("unit", ["weight", "row", "tensor"])
def test_nothing_to_choose_from(unit: str) -> None:
    assert choose(torch.zeros(0), 0.5, {}, unit=unit).active == 0
    assert choose(torch.zeros(0), 0.5, {"none": (0, 3)}, unit=unit).active == 0
    shapes = {"matrix": (2, 2)}
    assert choose(torch.zeros(4), 0.5, shapes, unit=unit, within=Mask.empty(shapes)).active == 0


@quick
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=80), st.data(), st.integers(1, 20), st.integers(0, 5))
def test_kth_lowest(numbers: list[int], data: st.DataObject, sample: int, margin: int) -> None:
    k = data.draw(st.integers(0, len(numbers) - 1))
    with patch.object(module, "SAMPLE", sample), patch.object(module, "MARGIN", margin):
        assert module._kth_lowest(np.array(numbers, dtype=np.float32), k) == sorted(numbers)[k]


HARD: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # what takes other ways of selection very long
    "random": lambda uniform: uniform,
    "ascending": np.sort,
    "descending": lambda uniform: np.sort(uniform)[::-1],
    "equal": np.zeros_like,
    "mostly zero": lambda uniform: np.where(uniform < 0.7, 0, uniform),
    "few values": lambda uniform: np.floor(10 * uniform),
    "sawtooth": lambda uniform: np.arange(len(uniform)) % 1000,
}


@pytest.mark.parametrize("kind", HARD)
def test_a_million_weights_take_little_time(kind: str) -> None:
    uniform = np.random.default_rng(0).random(1_000_000, dtype=np.float32)
    scores = np.ascontiguousarray(HARD[kind](uniform), dtype=np.float32)
    expected = np.zeros(len(scores), dtype=np.bool_)
    expected[np.argsort(scores, kind="stable")[:100_000]] = True
    start = time.perf_counter()
    mask = choose(torch.from_numpy(scores), 0.1, {"matrix": (1000, 1000)}, keep_alive=1)
    assert time.perf_counter() - start < 2  # 0.03 s; a quadratic selection takes half a minute
    assert np.array_equal(mask.unpack().numpy(), expected)


@quick
@given(case=cases(), rounds=st.integers(1, 4), seed=st.integers(0, 99))
def test_the_number_of_active_weights_is_known_beforehand(case: Case, rounds: int, seed: int) -> None:
    """Calibrated in any number of rounds, with any scores."""
    assume(case.density > 0)
    random, active = np.random.default_rng(seed), Mask.full(case.shapes)
    sizes = unit_sizes(case.shapes, case.unit).numpy()
    for round in range(1, rounds + 1):
        scores = torch.from_numpy(random.random(len(sizes)).repeat(sizes))
        active = case.choose(scores=scores, density=case.density ** (round / rounds), within=active)
    asked = {"unit": case.unit, "across": case.across, "keep_alive": case.keep_alive, "draw": case.draw}
    least, most = active_range(case.density, case.shapes, **asked)
    assert least <= active.active <= most
    if case.unit == "weight" and case.draw == "exact":
        assert least == most
