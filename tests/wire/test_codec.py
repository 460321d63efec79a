"""What is decoded is what was encoded, and in how many bytes."""

import itertools
import math
import struct
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from examples import POSITIONS, SEED, TYPES, Example, example, packed, some_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsieve.wire import Extent, Layout, Message, Vector, WireError, decode, encode, encoded_length, layout_fingerprint
from fedsieve.wire.entropy import CHUNK, decode_entropy, encode_entropy, frequencies
from fedsieve.wire.frames import compress as zstd
from fedsieve.wire.positions import encode_positions

sizes = st.one_of(st.integers(0, 40), st.integers(0, 5000), st.sampled_from([511, 512, 513, 1024, 70_000]))


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Equal in every bit, whatever the bits mean."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()


def rounded_as_sent(sent: Example, received: Tensor) -> bool:
    """The end is exact, float16 and bfloat16 are those of torch, and int8 is off by less than a block's scale."""
    values = sent.vector.values
    body = len(values) - sent.layout.vectors["delta"].exact
    if sent.type != "int8":
        expected = torch.cat([values[:body].to(getattr(torch, sent.type)).float(), values[body:]])
        return same(received, expected)
    scales = [block.abs().max().item() / 127 for block in values[:body].split(512)] if body else []
    error = (received - values)[:body].abs().numpy()
    return same(received[body:], values[body:]) and all(error <= np.repeat(scales, 512)[:body] * (1 + 1e-5))


@settings(deadline=None, max_examples=300)
@given(
    sizes, st.integers(0, 9), st.sampled_from(POSITIONS), st.sampled_from(TYPES), st.booleans(), st.integers(0, 2**32)
)
def test_what_is_decoded_is_what_was_encoded(
    weights: int, tail: int, positions: str, kind: str, compress: bool, seed: int
) -> None:
    if (positions, kind) == ("dense", "none"):
        return
    sent = example(weights, tail, positions, kind, compress, seed)
    encoded = sent.encode()
    received = sent.decode(encoded.data)
    assert received.kind == "update"
    assert received.numbers == {"round": 3.0, "samples": -0.5}
    assert list(received.vectors) == ["delta"]
    vector = received.vectors["delta"]
    assert same(vector.bits, sent.vector.bits)
    assert (vector.known, vector.seed) == (positions == "known", SEED if positions == "seed" else None)
    if kind in ("float16", "bfloat16", "int8"):
        assert rounded_as_sent(sent, vector.values)
    else:
        assert same(vector.values, sent.vector.values)
    how, what = encoded.encodings["delta"].split()
    assert what == kind
    assert how == positions or how in POSITIONS[4:] or (how == "full" and positions in POSITIONS[4:])


@settings(deadline=None, max_examples=60)
@given(st.binary(min_size=400, max_size=4000), st.sampled_from(["dense", "entropy", "known"]), st.booleans())
def test_every_pattern_of_a_float_survives(data: bytes, positions: str, compress: bool) -> None:
    values = torch.frombuffer(bytearray(data[: len(data) // 4 * 4]), dtype=torch.float32)
    special = torch.tensor([0x7F800001, -0x400000, -(2**31), 0x7F800000, 1], dtype=torch.int32)
    values = torch.cat([special.view(torch.float32), values])
    weights = len(values) if positions == "dense" else len(values) * 9
    random = np.random.default_rng(len(data))
    bits = None if positions == "dense" else packed(random.permutation(weights) < len(values))
    layout = Layout(bytes(16), {"delta": Extent(weights, weights)})
    message = Message("update", {}, {"delta": Vector(values, bits, known=positions == "known")})
    encoded = encode(message, layout, compress=compress)
    known = None if bits is None else {"delta": bits}
    assert same(decode(encoded.data, layout, "update", known).vectors["delta"].values, values)
    assert encoded_length(message, layout, compress) == len(encoded.data)


def test_numbers_and_names() -> None:
    numbers = {"loss": math.nan, "größe": -math.inf, "": -0.0, "n" * 255: 1e-320, "round": 2.0**53 - 1}
    layout = Layout(bytes(range(16)), {"delta": Extent(3, 4), "größe": Extent(0, 2), "none": Extent(0, 0)})
    vectors = {
        "größe": Vector(torch.tensor([1, 2])),
        "none": Vector(torch.empty(0)),
        "delta": Vector(torch.tensor([0.5]), torch.zeros(1, dtype=torch.uint8)),
    }
    received = decode(encode(Message("keys", numbers, vectors), layout).data, layout, "keys")
    assert list(received.numbers) == list(numbers)
    assert struct.pack("<5d", *received.numbers.values()) == struct.pack("<5d", *numbers.values())
    assert list(received.vectors) == list(vectors)
    assert all(same(received.vectors[name].values, vectors[name].values) for name in vectors)
    nothing = decode(encode(Message("request", {}, {}), layout).data, layout, "request")
    assert (nothing.numbers, nothing.vectors) == ({}, {})


def test_a_fingerprint_is_that_of_names_and_shapes_in_order() -> None:
    shapes = [[("a", (2, 3)), ("b", (4,))], [("b", (4,)), ("a", (2, 3))], [("a", (3, 2)), ("b", (4,))], [("a", (2, 3))]]
    prints = {layout_fingerprint(some, *more) for some in shapes for more in ((), ("edit",), ("edit", ""))}
    assert len(prints) == 12
    assert {len(one) for one in prints} == {16}
    assert layout_fingerprint(iter(shapes[0]), "edit") == layout_fingerprint(shapes[0], "edit")


# Positions.


@pytest.mark.parametrize("density", [0.0, 0.001, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_entropy_coding_of_any_mask(size: int, density: float) -> None:
    bits = packed(np.random.default_rng(size).random(8 * size) < density).numpy()
    coded = encode_entropy(bits)
    assert np.array_equal(decode_entropy(coded, size), bits)
    if density in (0.0, 1.0):
        assert len(coded) <= 2 * (size // CHUNK + 2)  # chunks of one kind cost nothing but their count


def test_frequencies_add_up_and_are_those_of_independent_bits() -> None:
    for ones, total in ((1, 8), (1, 65528), (65527, 65528), (32764, 65528), (6000, 65528)):
        found = frequencies(ones, total)
        assert found.sum() == 2**24
        assert found.min() >= 1
        p = ones / total
        expected = [p ** byte.bit_count() * (1 - p) ** (8 - byte.bit_count()) for byte in range(256)]
        assert np.allclose(found / 2**24, expected, atol=300 / 2**24)


@pytest.mark.parametrize("sparsity", [0.2, 0.5, 0.9, 0.99])
def test_random_masks_take_little_more_than_their_entropy(sparsity: float) -> None:
    weights = 2_000_000
    active = np.random.default_rng(0).random(weights) >= sparsity
    p = active.mean()
    bound = -weights * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 8
    encoding, payload = encode_positions(Vector(bits=packed(active)), Extent(weights, weights))
    assert encoding == ("bitmap" if sparsity == 0.5 else "entropy")
    assert 0.998 * bound <= len(payload) <= 1.01 * bound


def test_masks_whose_density_varies_take_less() -> None:
    weights = 1_000_000
    active = np.random.default_rng(0).random(weights) < np.repeat([0.5, 0.01, 0.2, 0.0], weights // 4)
    p = active.mean()
    overall = -weights * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 8
    _, payload = encode_positions(Vector(bits=packed(active)), Extent(weights, weights))
    assert len(payload) < 0.7 * overall


@pytest.mark.parametrize(("positions", "weights"), itertools.product(POSITIONS[4:], (0, 1, 9, 400, 4000, 300_000)))
def test_the_smallest_is_chosen(positions: str, weights: int) -> None:
    bits = some_bits(weights, positions, np.random.default_rng(1))
    assert bits is not None
    candidates = {"bitmap": bits.numpy(), "runs": zstd(bits.numpy()), "entropy": encode_entropy(bits.numpy())}
    extent = Extent(weights, weights + 2)
    encoding, payload = encode_positions(Vector(bits=bits), extent)
    if encoding == "full":
        assert weights < 10
        return
    assert len(payload) == min(map(len, candidates.values())) == len(candidates[encoding])
    assert encoding == positions or weights < 4000
    encoded = encode(Message("mask", {}, {"delta": Vector(bits=bits)}), Layout(bytes(16), {"delta": extent}))
    assert len(encoded.data) == 40 + 24 + 8 + -(-len(payload) // 8) * 8 + 8


def test_positions_that_need_not_be_sent_cost_nothing() -> None:
    lengths = {positions: len(example(80_000, 0, positions, "none").encode().data) for positions in POSITIONS[1:4]}
    assert lengths["known"] == lengths["full"] + 8
    assert lengths["seed"] == lengths["full"] + 16
    assert lengths["full"] < 150


@pytest.mark.parametrize("positions", ["known", "seed"])
def test_positions_that_are_not_those_of_the_sender(positions: str) -> None:
    sent = example(1000, 3, positions, "float32")
    assert sent.vector.bits is not None
    data, other = sent.encode().data, sent.vector.bits.clone()
    other[0] ^= 3
    for bits in (other, sent.vector.bits[1:], sent.vector.bits.int()):
        with pytest.raises(WireError, match=r"not those of the sender|are 125 bytes"):
            decode(data, sent.layout, "update", {"delta": bits}, lambda seed: bits)  # noqa: B023
    with pytest.raises(WireError, match=r"not known here|cannot be done here"):
        decode(data, sent.layout, "update")


# Values.


def test_int8_is_right_on_average() -> None:
    block = torch.from_numpy(np.random.default_rng(0).normal(0, 1, 512).astype(np.float32))
    block[:3] = torch.tensor([0.0, 1e-30, 5.0])
    layout = Layout(bytes(16), {"delta": Extent(512 * 3000, 512 * 3000)})
    message = Message("update", {}, {"delta": Vector(block.repeat(3000))})
    encoded = encode(message, layout, "int8", generator=torch.Generator().manual_seed(0))
    received = decode(encoded.data, layout, "update").vectors["delta"].values.view(3000, 512)
    scale = 5 / 127
    assert (received.double().mean(0) - block).abs().max() < 5 * 0.5 * scale / math.sqrt(3000)
    assert (received - block).abs().max() <= scale * (1 + 1e-6)
    assert received.std(0).max() > 0.4 * scale  # at random, and not to the nearest
    assert not received[:, 0].any()
    assert torch.allclose(received[:, 2], torch.tensor(5.0))
    again = encode(message, layout, "int8", generator=torch.Generator().manual_seed(0))
    other = encode(message, layout, "int8", generator=torch.Generator().manual_seed(1))
    assert again.data == encoded.data != other.data


def test_int8_of_tiny_values() -> None:
    for values in (torch.zeros(700), torch.full((700,), 1e-45), 3e38 * torch.linspace(-1, 1, 700)):
        layout = Layout(bytes(16), {"delta": Extent(700, 700)})
        message = Message("update", {}, {"delta": Vector(values)})
        encoded = encode(message, layout, "int8", generator=torch.Generator().manual_seed(0))
        received = decode(encoded.data, layout, "update").vectors["delta"].values
        assert (received - values).abs().max() <= max(values.abs().max().item() / 127 * (1 + 1e-5), 1.2e-38)


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("float16", 65536.0, "too large for float16"),
        ("float16", -1e30, "too large for float16"),
        ("bfloat16", 3.4e38, "too large for bfloat16"),
        ("int8", math.nan, "not finite"),
        ("int8", -math.inf, "not finite"),
    ],
)
def test_values_that_do_not_fit(kind: str, value: float, reason: str) -> None:
    layout = Layout(bytes(16), {"delta": Extent(3, 4)})
    message = Message("update", {}, {"delta": Vector(torch.tensor([1.0, value, 0.0, 7.0]))})
    with pytest.raises(WireError, match=reason):
        encode(message, layout, kind, generator=torch.Generator())
    in_tail = Message("update", {}, {"delta": Vector(torch.tensor([1.0, 1.0, 0.0, value]))})
    received = decode(encode(in_tail, layout, kind, generator=torch.Generator()).data, layout, "update")
    assert same(received.vectors["delta"].values[3:], torch.tensor([value]))


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_infinities_and_nan_pass_through_floats(kind: str) -> None:
    values = torch.tensor([math.inf, -math.inf, math.nan, -0.0])
    layout = Layout(bytes(16), {"delta": Extent(4, 4)})
    encoded = encode(Message("update", {}, {"delta": Vector(values)}), layout, kind)
    received = decode(encoded.data, layout, "update").vectors["delta"].values
    assert torch.equal(received.nan_to_num(5.0), values.nan_to_num(5.0))
    assert received[3].signbit()


def test_compression_is_used_only_where_it_makes_values_smaller() -> None:
    noise = torch.from_numpy(np.random.default_rng(0).integers(-(2**62), 2**62, 4000))
    for values, smaller in ((noise, False), (torch.ones(4000), True), (torch.randn(4000) * 1e-3, True)):
        layout = Layout(bytes(16), {"delta": Extent(4000, 4000)})
        message = Message("update", {}, {"delta": Vector(values)})
        plain, packed_up = encode(message, layout).data, encode(message, layout, compress=True).data
        assert (len(packed_up) < len(plain)) == smaller
        assert smaller or packed_up == plain


def test_dense_values_are_views_and_nothing_is_copied_or_warned_of() -> None:
    sent = example(1000, 3, "dense", "float32")
    data = sent.encode().data
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        received = sent.decode(data).vectors["delta"].values
        received[0] = 42.0
        assert struct.pack("<f", 42.0) in data
        for other in (bytes(data), memoryview(bytes(data)), memoryview(bytearray(b"x") + data)[1:]):
            with pytest.raises(WireError, match="altered"):
                sent.decode(other)
        data = sent.encode().data
        for other in (bytes(data), memoryview(bytes(data)), memoryview(bytearray(b"x") + data)[1:]):
            values = sent.decode(other).vectors["delta"].values
            assert same(values, sent.vector.values)
            assert values.data_ptr() % 8 == 0
            values[0] = 1.0


# What the sender gets wrong.


def test_messages_that_cannot_be_encoded() -> None:
    layout = Layout(bytes(16), {"delta": Extent(9, 10)})
    bits = torch.tensor([3, 0], dtype=torch.uint8)
    values = torch.ones(3)
    wrong = {
        "has 2 values at 3 positions": Vector(values[:2], bits),
        "has 3 values at 10 positions": Vector(values),
        "are 2 bytes": Vector(values, bits[:1]),
        "behind the last weight": Vector(torch.ones(2), torch.tensor([0, 2], dtype=torch.uint8)),
        "not both": Vector(values, bits, known=True, seed=1),
        "63 bits": Vector(values, bits, seed=2**63),
        "give them": Vector(values, known=True),
        "neither values nor positions": Vector(),
        "not 2-D": Vector(values[None], bits),
        "not 1-D torch.float16": Vector(values.half(), bits),
    }
    for reason, vector in wrong.items():
        with pytest.raises(WireError, match=reason):
            encode(Message("update", {}, {"delta": vector}), layout)
    good = Message("update", {}, {"delta": Vector(values, bits)})
    encode(good, layout)
    with pytest.raises(WireError, match="no kind of message"):
        encode(replace(good, kind="letter"), layout)
    with pytest.raises(WireError, match="no vector delta"):
        encode(good, Layout(bytes(16), {}))
    with pytest.raises(WireError, match="too long"):
        encode(replace(good, numbers={"n" * 256: 1.0}), layout)
    with pytest.raises(WireError, match="no type for values"):
        encode(good, layout, "int4")
    with pytest.raises(WireError, match="give a generator"):
        encode(good, layout, "int8")


def test_data_that_must_not_be_written_to_is_read_in_place(recwarn: pytest.WarningsRecorder) -> None:
    """As it lies in memory that processes share: nothing is copied, and nobody is warned."""
    layout = Layout(bytes(16), {"delta": Extent(4, 4)})
    encoded = encode(Message("update", {}, {"delta": Vector(values=torch.arange(4.0))}), layout)
    aligned = np.frombuffer(bytes(encoded.data), np.uint8)
    found = decode(aligned.data, layout, "update").vectors["delta"].values
    assert found.tolist() == [0, 1, 2, 3] and not recwarn.list
    first = aligned.ctypes.data
    assert aligned.ctypes.data % 8 or first <= found.data_ptr() < first + aligned.nbytes
