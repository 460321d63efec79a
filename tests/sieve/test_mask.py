"""A mask against plain arrays and sets, and what becomes of one that was damaged or does not fit."""

import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from fedsieve.errors import InputError
from fedsieve.sieve.mask import Mask, Shapes, shapes_of

quick = settings(deadline=None, max_examples=150)
SHAPES = {"matrix": (3, 5), "bias": (2,), "scale": (), "none": (0, 4), "conv": (2, 1, 3, 2)}  # 30 weights

dimensions = st.lists(st.integers(0, 5), max_size=4).map(tuple)
all_shapes = st.lists(dimensions, max_size=4).map(lambda found: {f"tensor{i}": one for i, one in enumerate(found)})


def weights_of(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


@st.composite
def masks(draw: st.DrawFn, count: int) -> tuple[list[Mask], list[np.ndarray]]:
    """Masks of the same shapes, and the bools they are made of."""
    shapes = draw(all_shapes)
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    arrays = [random.random(weights_of(shapes)) < draw(st.sampled_from([0, 0.1, 0.5, 1])) for _ in range(count)]
    return [Mask.pack(shapes, torch.from_numpy(array)) for array in arrays], arrays


def some_mask(shapes: Shapes = SHAPES, seed: int = 0) -> Mask:
    return Mask.pack(shapes, torch.from_numpy(np.random.default_rng(seed).random(weights_of(shapes)) < 0.5))


def ones_of(mask: Mask) -> set[int]:
    return {8 * byte + bit for byte, value in enumerate(mask.bits.tolist()) for bit in range(8) if value >> bit & 1}


@quick
@given(masks(1))
def test_bits_and_bools(drawn: tuple[list[Mask], list[np.ndarray]]) -> None:
    (mask,), (array,) = drawn
    assert ones_of(mask) == set(np.flatnonzero(array).tolist())  # the first weight in the lowest bit, nothing behind
    assert np.array_equal(mask.unpack().numpy(), array)
    assert mask.unpack().dtype == torch.bool
    assert mask.size == len(array)
    assert mask.active == array.sum()
    assert mask.density == pytest.approx(array.mean() if array.size else 0)
    assert mask.sparsity == pytest.approx(1 - mask.density)
    start = 0
    for name, shape in mask.shapes.items():
        own = array[start : (start := start + math.prod(shape))].reshape(shape)
        assert np.array_equal(mask[name].numpy(), own)
        assert mask[name].shape == shape
        assert mask.ranges[name] == (start - own.size, start)
        assert mask.counts()[name] == own.sum()
        assert mask.densities()[name] == pytest.approx(own.mean() if own.size else 0)


@quick
@given(masks(2))
def test_a_mask_is_a_set_of_weights(drawn: tuple[list[Mask], list[np.ndarray]]) -> None:
    (one, other), arrays = drawn
    a, b = (set(np.flatnonzero(array).tolist()) for array in arrays)
    for combined, expected in ((one & other, a & b), (one | other, a | b), (one ^ other, a ^ b), (one - other, a - b)):
        assert ones_of(combined) == expected
        assert combined.active == len(expected)
        assert combined.shapes == one.shapes
    assert ones_of(~one) == set(range(one.size)) - a  # no bit behind the last weight
    assert ~~one == one
    assert (one <= other) == (a <= b)
    assert (one & other) <= one <= (one | other)
    assert (one == other) == (a == b)
    assert one.overlap(other) == pytest.approx(len(a & b) / len(a | b) if a | b else 1)
    for name, (start, stop) in one.ranges.items():
        own_a, own_b = ({i for i in positions if start <= i < stop} for positions in (a, b))
        expected_overlap = len(own_a & own_b) / len(own_a | own_b) if own_a | own_b else 1
        assert one.overlaps(other)[name] == pytest.approx(expected_overlap)
    assert ones_of(one) == a  # neither has changed
    assert ones_of(other) == b


def test_full_and_empty() -> None:
    assert Mask.full(SHAPES).active == Mask.full(SHAPES).size == 30
    assert Mask.empty(SHAPES).active == 0
    assert ~Mask.full(SHAPES) == Mask.empty(SHAPES)
    assert Mask.full({}).size == Mask.full({}).active == 0
    assert Mask.full({}).density == 0


def test_equal_masks_have_equal_names_and_shapes() -> None:
    mask = some_mask({"a": (2, 3)})
    assert mask != Mask({"a": (3, 2)}, mask.bits)
    assert mask != Mask({"b": (2, 3)}, mask.bits)
    assert Mask.full({"a": (1,), "b": (1,)}) != Mask.full({"b": (1,), "a": (1,)})
    assert mask != "a mask"
    with pytest.raises(TypeError, match="unhashable"):
        hash(mask)


def test_shapes_of_a_model() -> None:
    shapes = shapes_of(nn.Linear(3, 2).named_parameters())
    assert shapes == {"weight": (2, 3), "bias": (2,)}
    assert type(shapes["weight"]) is tuple
    assert Mask.full(shapes)["weight"].all()


def test_a_wrong_number_of_bits() -> None:
    for weights in (0, 8, 10, 16, 17):  # 10 and 16 need as many bytes as 9
        with pytest.raises(ValueError, match="9 weights"):
            Mask.pack({"a": (9,)}, torch.ones(weights, dtype=torch.bool))
    for bits in (torch.zeros(1, dtype=torch.uint8), torch.zeros(2), torch.zeros(2, 1, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="9 weights"):
            Mask({"a": (9,)}, bits)
    with pytest.raises(ValueError, match="behind the last weight"):
        Mask({"a": (9,)}, torch.tensor([0, 2], dtype=torch.uint8))


@quick
@given(masks(1))
def test_pickling(drawn: tuple[list[Mask], list[np.ndarray]]) -> None:
    (mask,), _ = drawn
    assert pickle.loads(pickle.dumps(mask)) == mask
    counts = mask.counts(), mask.active  # which remembers its ranges
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask
    assert (again.counts(), again.active) == counts


def test_a_hundred_masks_of_22_million_weights_fit_in_280_megabytes() -> None:
    mask = Mask.empty({"weights": (22_000_000,)})
    assert 100 * mask.bits.numel() * mask.bits.element_size() <= 280 * 10**6
    assert mask.bits.untyped_storage().nbytes() == mask.bits.numel()
    assert len(pickle.dumps(mask)) < 2_800_000


# Files.


@settings(quick, max_examples=30)
@given(masks(1))
def test_a_file_gives_back_the_mask(tmp_path_factory: pytest.TempPathFactory, drawn: tuple[list[Mask], object]) -> None:
    path = tmp_path_factory.mktemp("mask") / "some.mask"
    mask = drawn[0][0]
    mask.save(path)
    loaded = Mask.load(path)
    assert loaded == mask
    assert list(loaded.shapes.items()) == list(mask.shapes.items())
    assert all(type(shape) is tuple for shape in loaded.shapes.values())
    path.write_bytes(bytes(path.stat().st_size))  # what becomes of the file does not matter any more
    assert loaded == mask


def test_saving_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    some_mask(seed=1).save(tmp_path / "mask")
    some_mask(seed=2).save(tmp_path / "mask")
    assert Mask.load(tmp_path / "mask") == some_mask(seed=2)
    assert [path.name for path in tmp_path.iterdir()] == ["mask"]


def is_refused(path: Path) -> bool:
    try:
        Mask.load(path)
    except InputError as error:
        return str(path) in str(error)
    return False


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "mask"
    some_mask().save(path)
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
        assert is_refused(path), f"byte {place} of {len(good)}"


def test_a_truncated_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "mask"
    some_mask().save(path)
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        assert is_refused(path), f"{length} of {len(good)} bytes"
    path.write_bytes(good + b"\0")
    assert is_refused(path)


def test_what_is_no_mask(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert is_refused(path)  # not there
    assert is_refused(tmp_path)
    path.write_text("name: experiment\n")
    assert is_refused(path)
    for tensors in ({"weight": torch.zeros(3)}, {"bits": torch.zeros(1, dtype=torch.uint8)}):
        save_file(tensors, path)
        assert is_refused(path)  # a model
    for shapes in ("[3]", '{"a": 3}', "{", json.dumps({"a": [3]})):
        save_file({"bits": torch.zeros(1, dtype=torch.uint8)}, path, metadata={"shapes": shapes, "digest": "0"})
        assert is_refused(path)


# Does it fit?


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"a": (2, 3), "c": (4,), "d": (5,)}, "it has b where c is expected"),
        ({"b": (4,), "a": (2, 3)}, "it has a where b is expected"),
        ({"a": (2, 3), "b": (5,)}, "b is 4 in it, and 5 here"),
        ({"a": (3, 2), "c": (4,)}, "a is 2 x 3 in it, and 3 x 2 here"),
        ({"a": ()}, "a is 2 x 3 in it, and a single number here"),
        ({"a": (2, 3)}, "there is no b here"),
        ({}, "there is no a here"),
        ({"a": (2, 3), "b": (4,), "c": (1,), "d": (1,)}, "there is no c in it"),
    ],
)
def test_the_first_tensor_that_does_not_fit_is_named(shapes: Shapes, message: str) -> None:
    mask = some_mask({"a": (2, 3), "b": (4,)})
    with pytest.raises(InputError) as caught:
        mask.must_fit(shapes, "my.mask")
    assert str(caught.value) == f"my.mask belongs to another model or phase: {message}"
    for combine in (Mask.__and__, Mask.__or__, Mask.__xor__, Mask.__sub__, Mask.overlap, Mask.__le__):
        with pytest.raises(InputError, match="belongs to another model"):
            combine(mask, Mask.full(shapes))


def test_what_fits() -> None:
    some_mask({"a": (2, 3), "b": (4,)}).must_fit({"a": torch.Size((2, 3)), "b": (4,)})
    some_mask({}).must_fit({})
