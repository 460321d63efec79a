"""What streams by is measured as if all updates were held at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedsieve.config.scope_settings import BlocksScope, Train
from fedsieve.federate import diagnostics as drift
from fedsieve.federate.diagnostics import Interference, block_ranges
from fedsieve.federate.local import touched_positions
from fedsieve.model.classifier import Classifier, make_head
from fedsieve.model.flat import Entry, FlatModel, Scope
from fedsieve.model.vit import ViT, ViTShape
from fedsieve.sieve.mask import Mask

MEASURES = ["drift_mean", "drift_max", "cosine", "opposed", "agreement", "mask_overlap"]


@dataclass
class Sent:
    """One client's update: all entries of the vector, which of them it sends (None: all), and its mask."""

    full: np.ndarray
    positions: np.ndarray | None = None
    active: np.ndarray | None = None


def measured(
    sent: Sequence[Sent], weights: int, blocks: dict[str, list[tuple[int, int]]] | None = None
) -> dict[str, Any]:
    interference = Interference(len(sent[0].full), weights, blocks)
    for client, one in enumerate(sent):
        places = slice(None) if one.positions is None else one.positions
        positions = None if one.positions is None else torch.from_numpy(one.positions)
        mask = None if one.active is None else Mask.pack({"a": (weights,)}, torch.from_numpy(one.active))
        interference.add(client, torch.from_numpy(one.full[places]), positions, mask)
    return interference.finish()


def naive(sent: Sequence[Sent], inside: list[int]) -> dict[str, float | None]:
    """The definitions, loop by loop, over the weights `inside`."""
    updates = [one.full[inside].astype(np.float64) for one in sent]
    norms = [float(np.sqrt((update**2).sum())) for update in updates]
    pairs = list(combinations([i for i, norm in enumerate(norms) if norm > 0], 2))
    cosines = [updates[i] @ updates[j] / (norms[i] * norms[j]) for i, j in pairs]
    both_ways, alignment = [], []
    for weight in range(len(inside)):
        signs = [np.sign(update[weight]) for update in updates if update[weight] != 0]
        if len(signs) >= 2:
            both_ways.append(1 in signs and -1 in signs)
            alignment.append(abs(sum(signs)) / len(signs))
    masks = [one.active[inside] for one in sent if one.active is not None]
    common = sum(int((one & other).sum()) for one, other in combinations(masks, 2))
    union = sum(int((one | other).sum()) for one, other in combinations(masks, 2))
    return {
        "drift_mean": float(np.mean(norms)),
        "drift_max": max(norms),
        "cosine": float(np.mean(cosines)) if cosines else None,
        "opposed": float(np.mean(both_ways)) if both_ways else None,
        "agreement": float(np.mean(alignment)) if alignment else None,
        "mask_overlap": None if len(masks) < 2 else common / union if union else 1.0,
    }


def check(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    for name in MEASURES:
        if expected[name] is None:
            assert found[name] is None, name
        else:
            small = 0 if "drift" in name else tolerance  # a drift may itself be small
            assert found[name] == pytest.approx(expected[name], rel=1e-6, abs=small), name


changes = st.one_of(st.just(0.0), st.floats(-100, 100, width=32), st.sampled_from([1e-30, -1e-30]))


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[Sent], int]:
    """A round's updates, and how many of their entries are weights."""
    weights, buffers = draw(st.integers(1, 12)), draw(st.integers(0, 3))
    kind = draw(st.sampled_from(["dense", "sparse", "masked", "dense under a mask"]))
    shared = draw(st.booleans())
    bools = st.lists(st.booleans(), min_size=weights, max_size=weights)
    masks, sent = draw(bools), []
    for _ in range(draw(st.integers(1, 6))):
        values = draw(st.lists(changes, min_size=weights + buffers, max_size=weights + buffers))
        active = np.array(masks if shared else draw(bools))
        full = np.array(values, dtype=np.float32)
        if kind == "dense":
            sent.append(Sent(full))
            continue
        full[:weights][~active] = 0
        positions = touched_positions(Mask.pack({"a": (weights,)}, torch.from_numpy(active)), weights + buffers).numpy()
        sent.append(Sent(full, positions if "dense" not in kind else None, active if "mask" in kind else None))
    return sent, weights


@given(a_round=rounds(), cuts=st.sets(st.integers(0, 15)), chunk=st.integers(1, 20))
def test_against_loops_over_all_updates(a_round: tuple[list[Sent], int], cuts: set[int], chunk: int) -> None:
    """Also within blocks, of which some have several ranges and some reach into the buffers."""
    sent, weights = a_round
    size = len(sent[0].full)
    bounds = sorted({0, size} | {cut for cut in cuts if cut < size})
    blocks: dict[str, list[tuple[int, int]]] = {}
    for number, (start, stop) in enumerate(pairwise(bounds)):
        blocks.setdefault(str(number % 3), []).append((start, stop))
    with mock.patch.object(drift, "CHUNK", chunk):
        found = measured(sent, weights, blocks)
    check(found, naive(sent, list(range(weights))))
    assert found["drift"] == pytest.approx([naive([one], list(range(weights)))["drift_max"] for one in sent])
    inside = {
        name: [place for start, stop in ranges for place in range(start, min(stop, weights))]
        for name, ranges in blocks.items()
    }
    assert list(found["blocks"]) == [name for name in blocks if inside[name]]
    for name, measures in found["blocks"].items():
        assert list(measures) == MEASURES
        check(measures, naive(sent, inside[name]))


@given(a_round=rounds(), data=st.data())
def test_the_order_of_arrival_does_not_matter(a_round: tuple[list[Sent], int], data: st.DataObject) -> None:
    sent, weights = a_round
    order = data.draw(st.permutations(range(len(sent))))
    one, other = measured(sent, weights), measured([sent[client] for client in order], weights)
    check(one, other)
    assert [one["drift"][client] for client in order] == other["drift"]


# ----------------------------------------------------------------------------------------- known cases


def dense(*updates: Sequence[float]) -> list[Sent]:
    return [Sent(np.array(update, dtype=np.float32)) for update in updates]


@pytest.mark.parametrize(
    ("updates", "cosine", "opposed", "agreement"),
    [
        ([[1, -2, 3], [1, -2, 3]], 1, 0, 1),
        ([[1, -2, 3], [2, -4, 6], [10, -20, 30]], 1, 0, 1),
        ([[1, -2, 3], [-1, 2, -3]], -1, 1, 0),
        ([[1, 1, 0], [1, -1, 0]], 0, 0.5, 0.5),
        ([[1, 0, 0], [0, 1, 0]], 0, None, None),  # no weight that both moved
        ([[3, 4, 0], [3, 4, 0], [0, 0, 0]], 1, 0, 1),  # who did not move at all is in no pair
        ([[1, 0, 0], [1, 0, 0], [-1, 0, 0]], -1 / 3, 1, 1 / 3),
        ([[1, 2, 3]], None, None, None),
        ([[1, 2, 3], [0, 0, 0]], None, None, None),
    ],
)
def test_known_cases(
    updates: list[list[float]], cosine: float | None, opposed: float | None, agreement: float | None
) -> None:
    found = measured(dense(*updates), 3)
    expected = {"cosine": cosine, "opposed": opposed, "agreement": agreement, "mask_overlap": None}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert "blocks" not in found


def test_drift_is_the_length_of_the_change_of_the_weights_without_buffers() -> None:
    found = measured(dense([3, 4, 100], [0, 0, 100], [5, 12, 0]), 2)
    assert found["drift"] == [5, 0, 13]
    assert (found["drift_mean"], found["drift_max"]) == (6, 13)


def test_a_cosine_is_at_most_one() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        update = generator.normal(size=7)
        for opposite in (1, -1):
            found = measured(dense(update, opposite * update), 7)["cosine"]
            assert found == pytest.approx(opposite, abs=1e-6) and -1 <= found <= 1


def test_nobody_came() -> None:
    assert Interference(3, 3, {"0": [(0, 3)]}).finish() == {
        "drift": [],
        **dict.fromkeys(MEASURES),
        "blocks": {"0": dict.fromkeys(MEASURES)},
    }


def masked(*masks: Sequence[int]) -> list[Sent]:
    return [Sent(np.zeros(len(mask), np.float32), active=np.array(mask, dtype=bool)) for mask in masks]


@pytest.mark.parametrize(
    ("masks", "overlap"),
    [
        ([[1, 1, 0, 0]], None),
        ([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]], 1),
        ([[1, 1, 0, 0], [0, 0, 1, 1]], 0),
        ([[1, 1, 0, 0], [1, 0, 1, 0]], 1 / 3),
        ([[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0]], 4 / 8),  # of pairs 2/2, 1/3 and 1/3
        ([[0, 0, 0, 0], [0, 0, 0, 0]], 1),
    ],
)
def test_overlap_of_masks(masks: list[list[int]], overlap: float | None) -> None:
    assert measured(masked(*masks), 4)["mask_overlap"] == overlap


def test_overlap_of_masks_within_blocks() -> None:
    blocks = {"different": [(0, 2)], "same": [(2, 4)], "empty": [(4, 6)], "partly": [(6, 9)]}
    sent = masked([1, 0, 1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0, 1, 0, 1])
    found = measured(sent, 9, blocks)
    overlaps = {name: block["mask_overlap"] for name, block in found["blocks"].items()}
    assert overlaps == {"different": 0, "same": 1, "empty": 1, "partly": 1 / 3}
    assert found["mask_overlap"] == 3 / 7


@pytest.mark.parametrize("second", [[True, True, False, True], [True, False, True, True]])
def test_masks_do_not_overlap_where_they_cover_nothing(second: list[bool]) -> None:
    """Layers that are trained whole come behind what the masks cover."""
    interference = Interference(9, 9, {"covered": [(0, 4)], "both": [(2, 6)], "dense": [(6, 9)]})
    for active in ([True, True, False, True], second):
        mask = Mask.pack({"a": (4,)}, torch.tensor(active))
        interference.add(0, torch.ones(3 + 5), torch.cat((mask.positions, torch.arange(4, 9))), mask)
    overlaps = {name: block["mask_overlap"] for name, block in interference.finish()["blocks"].items()}
    assert overlaps["dense"] is None
    assert overlaps["covered"] == (1.0 if second[1] else 2 / 4)
    assert overlaps["both"] == (1.0 if second[1] else 1 / 2)


def test_a_shared_mask_is_never_unpacked() -> None:
    mask, copy = (Mask.pack({"a": (4,)}, torch.tensor([True, True, False, True])) for _ in range(2))
    interference = Interference(4, 4)
    with mock.patch.object(Mask, "unpack", side_effect=AssertionError):
        for one in (mask, mask, copy):
            interference.add(0, torch.ones(4), None, one)
        assert interference.finish()["mask_overlap"] == 1.0


@pytest.mark.parametrize("clients", [127, 128, 300])
def test_many_clients_can_be_counted(clients: int) -> None:
    """More than a byte can: half of the masks come first and are the same."""
    masks = [[1, 1, 1]] * (clients // 2) + [[1, 1, 0]] * (clients - clients // 2)
    sent = masked(*masks)
    for number, one in enumerate(sent):
        one.full[:] = [1, -1, -1 if number == 0 else 1]
    found = measured(sent, 3)
    check(found, naive(sent, [0, 1, 2]), tolerance=1e-7 * clients)  # directions are summed in float32
    assert found["agreement"] == pytest.approx((2 + (clients - 2) / clients) / 3)


@pytest.mark.parametrize(
    ("highest", "kind"), [(127, torch.int8), (128, torch.int16), (32767, torch.int16), (32768, torch.int32)]
)
def test_counts_are_as_wide_as_needed(highest: int, kind: torch.dtype) -> None:
    assert drift._wide_enough(torch.zeros(1, dtype=torch.int8), highest).dtype == kind


def test_the_sum_over_many_weights_is_accurate() -> None:
    """Large against the float32 that updates come in: a hundred thousand small changes beside a large one."""
    update = np.full(100_001, 1e-4, dtype=np.float32)
    update[0] = 1000.0
    expected = naive([Sent(update)], list(range(len(update))))["drift_max"]
    assert measured([Sent(update)], len(update))["drift_max"] == pytest.approx(expected, rel=1e-12)


def test_an_update_stays_as_it_was() -> None:
    delta, positions = torch.tensor([1.0, 2.0]), torch.tensor([0, 2])
    interference = Interference(3, 3, {"0": [(0, 3)]})
    interference.add(0, delta, positions, None)
    interference.add(1, torch.ones(3), None, None)
    assert delta.tolist() == [1, 2] and positions.tolist() == [0, 2]


@pytest.mark.parametrize("positions", [None, torch.tensor([0, 1])])
def test_an_update_of_another_size_is_refused(positions: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match=r"client 4: an update of 1 values for [23] entries"):
        Interference(3, 3).add(4, torch.ones(1), positions, None)


# ------------------------------------------------------------------------------------------------ blocks


def test_squares_of_the_drifts_in_blocks_add_up() -> None:
    generator = np.random.default_rng(0)
    sent = dense(generator.normal(size=100))
    found = measured(sent, 90, {"0": [(0, 20), (50, 60)], "1": [(20, 50)], "rest": [(60, 100)]})
    squares = [block["drift_max"] ** 2 for block in found["blocks"].values()]
    assert sum(squares) == pytest.approx(found["drift_max"] ** 2)


def test_updates_are_normalised_within_a_block() -> None:
    """What is far away elsewhere does not make two clients more alike here."""
    found = measured(dense([1, 1, 1000, 0], [1, -1, 1000, 0]), 4, {"0": [(0, 2)], "1": [(2, 4)]})
    assert found["blocks"]["0"]["cosine"] == pytest.approx(0, abs=1e-6)
    assert found["blocks"]["1"]["cosine"] == pytest.approx(1)
    assert found["cosine"] == pytest.approx(1, abs=1e-5)


class Convolutional(nn.Module):
    width = 4

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def transformer() -> FlatModel:
    backbone = ViT(ViTShape(8, 8, width=4, depth=11, heads=1, hidden=4, layer_scale=True))
    return FlatModel(Classifier(backbone, make_head(4, 2, None), ["a", "b"]))


def names_in(scope: Scope) -> Iterator[tuple[Entry, int]]:
    """Each entry of a scope, and where in its vector it starts."""
    start = 0
    for entry in scope.entries:
        yield entry, start
        start += entry.stop - entry.start


@pytest.mark.parametrize(
    ("train", "names"),
    [
        ("all", {*map(str, range(11)), "rest"}),
        ("head", {"rest"}),
        (BlocksScope(blocks=(1, 10)), {"1", "10"}),
        (BlocksScope(blocks=(3,), head=True), {"3", "rest"}),
    ],
)
def test_block_ranges_cover_a_scope_exactly_once(train: Train, names: set[str]) -> None:
    scope = transformer().scope(train)
    blocks = block_ranges(scope.entries)
    assert set(blocks) == names
    owner = np.full(scope.size, "", dtype=object)
    for name, ranges in blocks.items():
        assert all(stop < start for (_, stop), (start, _) in pairwise(ranges))  # merged
        for start, stop in ranges:
            assert start < stop and (owner[start:stop] == "").all()
            owner[start:stop] = name
    for entry, start in names_in(scope):
        parts = entry.name.split(".")
        block = parts[2] if parts[1] == "blocks" else "rest"
        assert (owner[start : start + entry.stop - entry.start] == block).all(), entry.name


def test_a_network_without_blocks_is_all_rest() -> None:
    scope = FlatModel(Classifier(Convolutional(), make_head(4, 2, None), ["a", "b"])).scope("backbone")  # type: ignore[arg-type]
    assert block_ranges(scope.entries) == {"rest": [(0, scope.size)]}  # in the model the head is between its parts
