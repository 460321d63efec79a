"""Every split keeps the promises of `split_clients`, and each keeps its own."""

import itertools
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedsieve.config.partition_settings import ClassesSplit, DirichletSplit, FlwrSplit, IidSplit
from fedsieve.data import SPLITS
from fedsieve.data import partition as module
from fedsieve.data.partition import Split, split_clients
from fedsieve.errors import InputError

quick = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**31)


@st.composite
def label_vectors(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Shuffled labels of up to 8 classes, imbalanced, some classes perhaps without samples."""
    sizes = draw(st.lists(st.one_of(st.integers(0, 4), st.integers(0, 60)), min_size=1, max_size=8))
    assume(sum(sizes) > 0)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return np.random.default_rng(draw(seeds)).permutation(labels), len(sizes)


def classes_split(per_client: int, assign: str = "even", limit: int | None = None) -> ClassesSplit:
    return ClassesSplit.model_validate(
        {"kind": "classes", "per_client": per_client, "assign": assign, "per_class_limit": limit}
    )


def dirichlet_split(alpha: float, balanced: bool = True, per_client: int | None = None) -> DirichletSplit:
    return DirichletSplit(kind="dirichlet", alpha=alpha, balanced=balanced, per_client=per_client)


def hsu_split(concentration: float, per_client: int | None = None) -> DirichletSplit:
    return DirichletSplit(kind="dirichlet", concentration=concentration, per_client=per_client)


def flwr_split(partitioner: str, **arguments: object) -> FlwrSplit:
    return FlwrSplit.model_validate({"kind": "flwr", "partitioner": partitioner, **arguments})


def sizes_of(split: Split) -> np.ndarray:
    return np.array([len(client) for client in split.clients])


def table(split: Split, labels: np.ndarray, classes: int) -> np.ndarray:
    """Clients x classes: how many samples each client has of each class."""
    return np.array([np.bincount(labels[client], minlength=classes) for client in split.clients])


def check(split: Split, labels: np.ndarray, count: int, everything: bool) -> None:
    """What every split promises."""
    handed = np.concatenate(split.clients)
    assert len(split.clients) == count
    assert all(client.dtype == np.int32 and client.size for client in split.clients)
    assert all((np.diff(client) > 0).all() for client in split.clients)  # sorted, nothing twice
    assert len(set(handed.tolist())) == len(handed)  # nor with two clients
    assert set(handed.tolist()) <= set(range(len(labels)))
    if everything:
        assert len(handed) == len(labels)
        assert not any("left out" in note for note in split.notes)


def same(a: Split, b: Split) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a.clients, b.clients, strict=True))


hundred = np.repeat(np.arange(100), 500)  # CIFAR-100's training labels, up to their order
ten = np.repeat(np.arange(10), 200)
skewed = np.repeat(np.arange(10), [20, 50, 100, 150, 200, 250, 300, 300, 300, 330])

EVERY_KIND = [
    IidSplit(),
    classes_split(3),
    classes_split(3, "random"),
    classes_split(3, limit=7),
    dirichlet_split(0.5),
    dirichlet_split(0.5, per_client=50),
    dirichlet_split(0.5, balanced=False),
    flwr_split("IidPartitioner"),
    flwr_split("DirichletPartitioner", alpha=0.5, min_partition_size=1),
]


@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: " ".join(str(value) for _, value in kind))
def test_the_seed_decides(kind) -> None:
    first, again, other = (split_clients(skewed, 10, 12, kind, seed) for seed in (1, 1, 2))
    check(first, skewed, 12, everything=False)
    assert same(first, again)
    assert first.notes == again.notes
    assert not same(first, other)


def test_all_kinds_are_tried_here() -> None:
    assert {kind.model_dump()["kind"] for kind in EVERY_KIND} == set(SPLITS)


@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: " ".join(str(value) for _, value in kind))
def test_more_clients_than_samples(kind) -> None:
    with pytest.raises(
        InputError, match=r"clients\.count is 1,001, but there are only 1,000 samples; use at most 1,000"
    ):
        split_clients(skewed[:1000], 10, 1001, kind, 0)


# ----------------------------------------------------------------------------------------------- iid


@quick
@given(label_vectors(), st.integers(1, 20), seeds)
def test_iid(data, count, seed) -> None:
    labels, classes = data
    assume(count <= len(labels))
    split = split_clients(labels, classes, count, IidSplit(), seed)
    check(split, labels, count, everything=True)
    assert np.ptp(sizes_of(split)) <= 1


def test_iid_with_one_client_is_everything() -> None:
    (client,) = split_clients(ten, 10, 1, IidSplit(), 0).clients
    assert np.array_equal(client, np.arange(len(ten)))


def test_iid_mixes_the_classes() -> None:
    """Each class's share of a client is hypergeometric with mean 50 and deviation below 7: five of them is 35."""
    per_class = table(split_clients(hundred % 10, 10, 100, IidSplit(), 0), hundred % 10, 10)
    assert (np.abs(per_class - 50) < 35).all()
    assert per_class.std() > 3  # random, not dealt in turns


# ------------------------------------------------------------------------------------- classes, even


@settings(deadline=None, max_examples=200)
@given(label_vectors(), st.integers(1, 12), st.integers(1, 8), seeds)
def test_classes_even(data, count, per_client, seed) -> None:
    labels, classes = data
    assume(count <= len(labels))
    sizes = np.bincount(labels)
    sizes = sizes[sizes > 0]
    fewest, slots = count * per_client // len(sizes), count * per_client
    possible = (
        per_client <= len(sizes) <= slots  # distinct classes for each client, a client for each class
        and sizes.min() >= fewest  # a sample for each holder, also where there is one holder more
        and np.minimum(sizes, fewest + 1).sum() >= slots
    )
    if not possible:
        with pytest.raises(InputError, match=r"^clients\.split\.per_client is \d+, .*; use .*\d+"):
            split_clients(labels, classes, count, classes_split(per_client), seed)
        return
    split = split_clients(labels, classes, count, classes_split(per_client), seed)
    check(split, labels, count, everything=True)
    holds = table(split, labels, classes) > 0
    assert (holds.sum(axis=1) == per_client).all()
    assert np.ptp(holds.sum(axis=0)[np.bincount(labels, minlength=classes) > 0]) <= 1


@quick
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 4), st.integers(12, 40), seeds)
def test_equal_classes_give_equal_clients(classes, per_client, rounds, size, seed) -> None:
    """Quotas that divide: sizes may differ by one sample in each held class and no more."""
    per_client = min(per_client, classes)
    count = classes * rounds  # so each class has rounds * per_client holders
    assume(rounds * per_client <= size)
    labels = np.repeat(np.arange(classes), size)
    split = split_clients(labels, classes, count, classes_split(per_client), seed)
    held = table(split, labels, classes)
    assert np.ptp(held[held > 0]) <= 1
    assert np.ptp(sizes_of(split)) <= per_client


@pytest.mark.parametrize("per_client", [1, 5, 10, 50, 100])
def test_a_hundred_clients_on_cifar100_are_equal(per_client) -> None:
    split = split_clients(hundred, 100, 100, classes_split(per_client), 0)
    assert set(sizes_of(split)) == {500}


def test_imbalanced_classes_still_give_near_equal_clients() -> None:
    """Against the obvious twin that deals each class evenly to the same holders."""
    labels = np.random.default_rng(0).choice(100, 50_000, p=np.linspace(1, 3, 100) / 200)
    split = split_clients(labels, 100, 100, classes_split(10), 0)
    holds = table(split, labels, 100) > 0
    evenly = (holds * (np.bincount(labels) / holds.sum(axis=0))).sum(axis=1)
    assert np.ptp(evenly) > 100
    assert np.ptp(sizes_of(split)) <= 3


def test_which_classes_and_who_holds_them_is_random() -> None:
    firsts, rich, leads = set(), set(), 0
    for seed in range(40):
        holds = table(split_clients(ten, 10, 7, classes_split(3), seed), ten, 10) > 0
        firsts |= set(np.flatnonzero(holds[0]))
        (popular,) = np.flatnonzero(holds.sum(axis=0) == 3)  # 21 holdings: one class has three holders
        rich.add(popular)
        leads += holds[0, popular]
    assert firsts == rich == set(range(10))
    assert 5 < leads < 30  # three of seven clients hold it: 17 expected


def test_the_extra_holder_goes_where_there_are_samples() -> None:
    labels = np.repeat(np.arange(4), [1, 1, 1, 9])  # 5 holdings of 4 classes: only the last can have two
    for seed in range(10):
        split = split_clients(labels, 4, 5, classes_split(1), seed)
        assert ((table(split, labels, 4) > 0).sum(axis=0) == [1, 1, 1, 2]).all()


def test_speed() -> None:
    start = time.perf_counter()
    split_clients(hundred, 100, 100, classes_split(5), 0)
    assert time.perf_counter() - start < 0.5
    split_clients(hundred, 100, 10_000, classes_split(2), 0)
    split_clients(hundred, 100, 10_000, dirichlet_split(0.5), 0)
    assert time.perf_counter() - start < 6


@pytest.mark.parametrize(
    ("labels", "count", "kind", "message"),
    [
        (hundred, 10, classes_split(120), "per_client is 120, but there are only 100 classes; use at most 100"),
        (hundred, 10, classes_split(120, "random"), "but there are only 100 classes; use at most 100"),
        (hundred, 30, classes_split(3), "to hold 100 classes; use at least 4, or clients.count 34"),
        (ten, 100, classes_split(10, "even"), None),
        (ten[::10], 21, classes_split(10), "a class of 20 samples; use clients.count x per_client of at most 200"),
    ],
)
def test_what_cannot_be_held(labels, count, kind, message) -> None:
    if message is None:  # the neighbour of an error is none
        check(split_clients(labels, int(labels.max()) + 1, count, kind, 0), labels, count, everything=True)
        return
    with pytest.raises(InputError) as error:
        split_clients(labels, int(labels.max()) + 1, count, kind, 0)
    assert str(error.value).startswith("clients.split.per_client is ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("labels", "count", "kind"),
    [
        (hundred, 30, classes_split(4)),
        (hundred, 34, classes_split(3)),
        (ten[::10], 20, classes_split(10)),
    ],
)
def test_what_the_errors_suggest_works(labels, count, kind) -> None:
    split = split_clients(labels, int(labels.max()) + 1, count, kind, 0)
    check(split, labels, count, everything=True)


# ----------------------------------------------------------------------------------- classes, random


@settings(deadline=None, max_examples=200)
@given(label_vectors(), st.integers(1, 12), st.integers(1, 4), seeds)
def test_classes_random(data, count, per_client, seed) -> None:
    labels, classes = data
    sizes = np.bincount(labels, minlength=classes)
    plenty = (sizes[sizes > 0] >= count).all()  # a sample of each class for everybody who might draw it
    assume(count <= len(labels) and per_client <= (sizes > 0).sum())
    try:
        split = split_clients(labels, classes, count, classes_split(per_client, "random"), seed)
    except InputError:
        assert not plenty
        return
    check(split, labels, count, everything=False)
    held = table(split, labels, classes)
    assert ((held > 0).sum(axis=1) <= per_client).all()
    for size, column in zip(sizes, held.T, strict=True):
        assert column.sum() in (0, size)  # a class is left out as a whole or not at all
        assert column.max() - column[column > 0].min(initial=column.max()) <= 1
    if plenty:
        assert ((held > 0).sum(axis=1) == per_client).all()
    undrawn = sizes[(held.sum(axis=0) == 0) & (sizes > 0)]
    numbers = [[int(word) for word in note.split() if word.isdigit()] for note in split.notes]
    assert numbers == ([[undrawn.sum(), len(undrawn)]] if len(undrawn) else [])


def test_random_notes_what_nobody_drew() -> None:
    split = split_clients(hundred, 100, 1, classes_split(1, "random"), 0)
    assert split.notes == ["left out: 49,500 samples of 99 classes nobody drew"]
    split = split_clients(np.array([0, 1]), 2, 1, classes_split(1, "random"), 0)
    assert split.notes == ["left out: 1 sample of 1 class nobody drew"]


def test_random_draws_are_independent_and_uniform() -> None:
    """1,000 clients draw 5 of 50 classes: a class is drawn Binomial(1000, 0.1) times, deviation 9.5."""
    labels = np.repeat(np.arange(50), 2000)
    drawn = (table(split_clients(labels, 50, 1000, classes_split(5, "random"), 0), labels, 50) > 0).sum(axis=0)
    assert (np.abs(drawn - 100) < 5 * 9.5).all()
    assert drawn.std() > 4.5  # even assignment would give exactly 100 each


def test_random_refuses_to_leave_a_client_empty() -> None:
    labels = np.repeat(np.arange(10), 1)
    with pytest.raises(InputError, match=r"clients\.count is 10, which leaves \d clients? without samples; use fewer"):
        split_clients(labels, 10, 10, classes_split(1, "random"), 0)


def test_one_class_without_samples_is_no_class() -> None:
    labels = np.repeat([0, 2, 3], 30)
    for assign in ("even", "random"):
        held = table(split_clients(labels, 4, 6, classes_split(2, assign), 0), labels, 4)
        assert ((held > 0).sum(axis=1) == 2).all()
    with pytest.raises(InputError, match="only 3 classes"):
        split_clients(labels, 4, 6, classes_split(4), 0)


@pytest.mark.parametrize("assign", ["even", "random"])
def test_per_class_limit(assign) -> None:
    free = table(split_clients(skewed, 10, 20, classes_split(2, assign), 3), skewed, 10)
    split = split_clients(skewed, 10, 20, classes_split(2, assign, limit=20), 3)
    check(split, skewed, 20, everything=False)
    assert np.array_equal(table(split, skewed, 10), np.minimum(free, 20))
    over = int(np.maximum(free - 20, 0).sum())
    assert split.notes[-1] == f"left out: {over:,} samples above clients.split.per_class_limit, 20"


# ----------------------------------------------------------------------------------------- dirichlet

alphas = st.sampled_from([5e-324, 1e-6, 1e-2, 0.5, 10.0, 1e6, 1e12])


@settings(deadline=None, max_examples=120)
@given(label_vectors(), st.integers(1, 12), alphas, st.booleans(), seeds)
def test_dirichlet(data, count, alpha, balanced, seed) -> None:
    labels, classes = data
    assume(count <= len(labels))
    split = split_clients(labels, classes, count, dirichlet_split(alpha, balanced), seed)
    check(split, labels, count, everything=True)
    if balanced:
        assert np.ptp(sizes_of(split)) <= 1
        assert split.notes == []


@quick
@given(label_vectors(), st.integers(1, 12), st.integers(1, 30), alphas, seeds)
def test_dirichlet_per_client(data, count, per_client, alpha, seed) -> None:
    labels, classes = data
    assume(count <= len(labels))
    kind = dirichlet_split(alpha, per_client=per_client)
    if count * per_client > len(labels):
        with pytest.raises(InputError, match=rf"per_client is .* use at most {len(labels) // count}$"):
            split_clients(labels, classes, count, kind, seed)
        return
    split = split_clients(labels, classes, count, kind, seed)
    check(split, labels, count, everything=False)
    assert (sizes_of(split) == per_client).all()
    assert bool(split.notes) == (count * per_client < len(labels))


def test_dirichlet_per_client_needs_balanced() -> None:
    with pytest.raises(InputError, match=r"clients\.split\.balanced: true"):
        split_clients(ten, 10, 10, dirichlet_split(1.0, balanced=False, per_client=5), 0)


def test_dirichlet_left_out_note() -> None:
    split = split_clients(ten, 10, 10, dirichlet_split(1.0, per_client=50), 0)
    assert split.notes == ["left out: 1,500 samples above clients.split.per_client"]


def test_small_alpha_gives_few_classes_and_large_alpha_the_prior() -> None:
    labels = np.repeat(np.arange(10), np.arange(1, 11) * 1000)
    prior = np.arange(1, 11) / 55
    few = table(split_clients(labels, 10, 50, dirichlet_split(1e-6, per_client=50), 0), labels, 10)
    assert ((few > 0).sum(axis=1) == 1).all()
    near = table(split_clients(labels, 10, 50, dirichlet_split(1e6, per_client=500), 0), labels, 10) / 500
    assert (np.abs(near - prior) < 5 * np.sqrt(prior * (1 - prior) / 500)).all()  # five deviations of a multinomial


def test_concentration_is_the_total() -> None:
    """If q ~ Dir(s * p) then E q = p and Var q_c = p_c (1 - p_c) / (s + 1).

    A client's share of class c in m draws has the variance p_c (1 - p_c) (1 + (m - 1) / (s + 1)) / m.
    """
    p, s, m = np.array([0.1, 0.2, 0.7]), 4.0, 200
    labels = np.repeat(np.arange(3), (p * 4_000_000).astype(int))
    shares = table(split_clients(labels, 3, 2000, hsu_split(s, per_client=m), 0), labels, 3) / m
    variance = p * (1 - p) * (1 + (m - 1) / (s + 1)) / m
    assert np.allclose(shares.mean(axis=0), p, atol=5 * np.sqrt(variance.max() / 2000))
    assert np.allclose(shares.var(axis=0), variance, rtol=0.2)  # with 3 s in its place it would be 60% lower


def effective_classes(split: Split, labels: np.ndarray, classes: int) -> float:
    """exp of the entropy of a client's class proportions, averaged over the clients."""
    q = table(split, labels, classes) / sizes_of(split)[:, None]
    return float(np.exp(-(q * np.log(np.where(q > 0, q, 1))).sum(axis=1)).mean())


@pytest.mark.parametrize(("classes", "count"), [(100, 100), (100, 37), (10, 50)])
def test_the_smaller_the_concentration_the_fewer_classes(classes: int, count: int) -> None:
    """Also of the last clients, who find most classes empty."""
    labels = np.repeat(np.arange(classes), 50)
    least = max(1.0, classes / count)  # no client can do with fewer, for all samples are handed out
    for seed in range(3):
        found = [
            effective_classes(split_clients(labels, classes, count, hsu_split(one), seed), labels, classes)
            for one in (1e-8, 1e-4, 1e-2, 0.1, 0.5, 2.0, 10.0, 100.0)
        ]
        assert all(more > 0.97 * less for less, more in itertools.pairwise(found))  # the first three are nearly alike
        assert found[-1] > 4 * found[0] and found[0] < 1.3 * least + 0.2


def test_alpha_is_that_of_flower() -> None:
    """Dir(0.5) gives as many of 100 classes as the partitioner of flwr-datasets does, where sizes vary."""
    labels = np.repeat(np.arange(100), 100)
    theirs = flwr_split("DirichletPartitioner", alpha=0.5, min_partition_size=1, self_balancing=False)
    kinds = (theirs, dirichlet_split(0.5, balanced=False), dirichlet_split(0.5), hsu_split(50.0))
    flower, spread, drawn, in_total = (
        effective_classes(split_clients(labels, 100, 20, kind, 0), labels, 100) for kind in kinds
    )
    assert spread == pytest.approx(flower, rel=0.1)
    assert drawn == pytest.approx(flower, rel=0.3) and in_total == drawn
    labels = np.repeat(np.arange(4), [10, 20, 30, 40])  # alpha is concentration over the number of classes here, too
    parts = [split_clients(labels, 4, 5, kind, 0).clients.positions for kind in (dirichlet_split(0.5), hsu_split(2.0))]
    assert np.array_equal(*parts)


def test_unbalanced_follows_its_distribution() -> None:
    """A class's share of a client is Beta(alpha, (n - 1) alpha): variance (1/n)(1 - 1/n) / (n alpha + 1)."""
    count, alpha = 20, 0.5
    shares = table(split_clients(hundred, 100, count, dirichlet_split(alpha, balanced=False), 0), hundred, 100) / 500
    expected = (1 / count) * (1 - 1 / count) / (count * alpha + 1)
    assert shares.var() == pytest.approx(expected, rel=0.2)
    flat = sizes_of(split_clients(hundred, 100, count, dirichlet_split(1e6, balanced=False), 0))
    assert np.ptp(flat) < 25  # about 2,500 each
    steep = split_clients(ten, 10, count, dirichlet_split(1e-6, balanced=False), 0)
    assert (sizes_of(steep) == 1).sum() >= 10  # ten classes go to at most ten clients
    assert steep.notes[0].endswith("clients drew nothing and got one sample each from the largest client")


PRIOR = np.array([0.4, 1.0, 0.2, 2.0])


def draw_one_at_a_time(pool: np.ndarray, want: int, q: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The obvious twin of `_draw`."""
    taken = np.zeros_like(pool)
    for _ in range(want):
        left = np.flatnonzero(taken < pool)
        if q[left].sum() == 0:
            q = np.zeros(len(pool))
            q[left] = generator.dirichlet(PRIOR[left])
        weights = np.where(taken < pool, q, 0)
        taken[generator.choice(len(pool), p=weights / weights.sum())] += 1
    return taken


@pytest.mark.parametrize("q", [[0.7, 0.2, 0.1, 0.0], [0.0, 1.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
def test_draw_is_drawing_one_at_a_time(q) -> None:
    pool, want, tries = np.array([5, 3, 8, 4]), 12, 1500
    generator = np.random.default_rng(0)
    fast = np.array([module._draw(pool, want, np.array(q), PRIOR, generator) for _ in range(tries)])
    slow = np.array([draw_one_at_a_time(pool, want, np.array(q), generator) for _ in range(tries)])
    assert (fast.sum(axis=1) == want).all()
    assert (fast <= pool).all()
    error = 5 * np.sqrt((fast.var(axis=0) + slow.var(axis=0)) / tries) + 1e-12
    assert (np.abs(fast.mean(axis=0) - slow.mean(axis=0)) <= error).all()


# --------------------------------------------------------------------------------------------- parts


@quick
@given(st.integers(1, 12), st.integers(1, 8), seeds, st.floats(0, 100))
def test_round_keeps_column_sums_and_each_entry_near(rows, columns, seed, scale) -> None:
    generator = np.random.default_rng(seed)
    totals = generator.integers(0, 1 + int(scale * rows), columns)
    shares = generator.dirichlet(np.full(rows, 0.3), columns).T * totals
    rounded = module._round(shares)
    assert np.array_equal(rounded.sum(axis=0), totals)
    assert (np.abs(rounded - shares) < 1).all()


def test_round_pays_back_what_it_owes() -> None:
    """Twenty classes of a sample and a half for each of ten clients: 30 each, where a twin by class gives 20 or 40."""
    shares = np.full((10, 20), 1.5)
    assert (module._round(shares).sum(axis=1) == 30).all()


def test_round_leaves_whole_shares_alone() -> None:
    """The second client is owed most when the second class is dealt, but its share of that is already whole."""
    rounded = module._round(np.array([[0.6, 0.7], [0.4, 2.0], [0.0, 0.3]]))
    assert rounded[:, 0].tolist() == [1, 0, 0]
    assert rounded[1, 1] == 2


@quick
@given(label_vectors(), st.integers(1, 6), seeds)
def test_deal_hands_out_exactly_the_counts(data, count, seed) -> None:
    labels = np.unique(data[0], return_inverse=True)[1]
    generator = np.random.default_rng(seed)
    counts = np.array(
        [generator.multinomial(size, np.full(count + 1, 1 / (count + 1))) for size in np.bincount(labels)]
    )
    counts = counts.T[:count]  # the last part is nobody's
    split = module._deal(labels, counts, [], generator)
    assert np.array_equal(table(split, labels, counts.shape[1]), counts)


def test_which_samples_of_a_class_a_client_gets_is_random() -> None:
    labels = np.zeros(100, dtype=np.int64)
    split = split_clients(labels, 1, 2, classes_split(1), 0)
    assert 10 < (split.clients[0] < 50).sum() < 40


# ---------------------------------------------------------------------------------------------- flwr


@pytest.mark.parametrize(
    "kind",
    [
        flwr_split("IidPartitioner"),
        flwr_split("DirichletPartitioner", alpha=0.5),
        flwr_split("ShardPartitioner", num_shards_per_partition=2),
        flwr_split("LinearPartitioner"),
        flwr_split("NaturalIdPartitioner"),
        flwr_split("InnerDirichletPartitioner", partition_sizes=[200] * 10, alpha=0.3),
    ],
    ids=lambda kind: kind.partitioner,
)
def test_flwr_partitioners(kind, capfd) -> None:
    split = split_clients(ten, 10, 10, kind, 0)
    check(split, ten, 10, everything=True)
    assert capfd.readouterr() == ("", "")


def test_flwr_pathological() -> None:
    kind = flwr_split("PathologicalPartitioner", num_classes_per_partition=3)
    split = split_clients(ten, 10, 10, kind, 0)
    check(split, ten, 10, everything=False)
    assert ((table(split, ten, 10) > 0).sum(axis=1) == 3).all()


def test_flwr_says_what_is_left_out() -> None:
    split = split_clients(ten, 10, 4, flwr_split("SizePartitioner", partition_sizes=[100, 200, 300, 400]), 0)
    assert list(sizes_of(split)) == [100, 200, 300, 400]
    assert split.notes == ["left out: 1,000 samples that SizePartitioner gives to nobody"]


def test_flwr_iid_is_shuffled_and_a_given_seed_is_kept() -> None:
    iid = table(split_clients(ten, 10, 10, flwr_split("IidPartitioner"), 0), ten, 10)
    assert (iid > 0).all()  # cut in order, each would hold one class
    kinds = [flwr_split("DirichletPartitioner", alpha=0.5, seed=seed) for seed in (1, 2, 1)]
    one, two, again = (split_clients(ten, 10, 5, kind, 0) for kind in kinds)
    assert same(one, again)
    assert not same(one, two)


def test_flwr_partitioners_are_seeded_by_the_experiment() -> None:
    """Not only the shuffle: with the partitioner's own default seed, the sizes would always be the same."""
    kind = flwr_split("DirichletPartitioner", alpha=0.5)
    one, two = (sizes_of(split_clients(ten, 10, 5, kind, seed)) for seed in (0, 1))
    assert not np.array_equal(one, two)


def test_flwr_arrays_may_be_lists() -> None:
    kind = flwr_split(
        "DistributionPartitioner",
        distribution_array=[[1.0, 2.0]] * 10,
        num_unique_labels_per_partition=2,
        preassigned_num_samples_per_label=5,
    )
    check(split_clients(ten, 10, 10, kind, 0), ten, 10, everything=True)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (flwr_split("DirichletPartitoner"), r"partitioner is DirichletPartitoner, .*; use DirichletPartitioner, .*Iid"),
        (flwr_split("VerticalEvenPartitioner"), "does not exist"),
        (flwr_split("Partitioner"), "does not exist; use IidPartitioner, "),
        (flwr_split("DirichletPartitioner"), "DirichletPartitioner refuses: .*alpha"),
        (flwr_split("DirichletPartitioner", alpha=0.5, beta=1), "refuses: .*beta"),
        (flwr_split("DirichletPartitioner", alpha=-1.0), "refuses: Alpha values"),
        (flwr_split("DirichletPartitioner", alpha=1e-3), "refuses: The max number of attempts"),
        (flwr_split("IidPartitioner", num_partitions=5), r"clients\.count is 20, but .* makes 5 clients; set .* to 5$"),
        (flwr_split("NaturalIdPartitioner"), r"makes 10 clients; set clients\.count to 10$"),
        (flwr_split("DirichletPartitioner", alpha=0.01, min_partition_size=0), r"leaves \d+ clients without samples"),
    ],
)
def test_flwr_errors(kind, message) -> None:
    with pytest.raises(InputError, match=message) as error:
        split_clients(ten, 10, 20, kind, 0)
    assert "\n" not in str(error.value)


def test_flwr_is_not_trusted(monkeypatch) -> None:
    from flwr_datasets.partitioner import IidPartitioner

    monkeypatch.setattr(IidPartitioner, "load_partition", lambda self, partition_id: self.dataset.select(range(3)))
    with pytest.raises(InputError, match="IidPartitioner gives a sample to two clients"):
        split_clients(ten, 10, 2, flwr_split("IidPartitioner"), 0)


def test_flwr_is_imported_only_when_asked_for() -> None:
    code = "import sys, fedsieve.data.partition; sys.exit('datasets' in sys.modules or 'flwr_datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
