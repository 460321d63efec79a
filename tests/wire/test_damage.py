"""Whatever is done to its bytes, a message is refused with a reason, or is one that fits the layout."""

import random as python_random
import struct
import tracemalloc
import warnings
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
import torch
import zstandard
from examples import Example, all_examples, example, ones_of, packed, sealed

from fedsieve.wire import Layout, Message, WireError, decode
from fedsieve.wire.codec import HEADER, VECTOR
from fedsieve.wire.entropy import decode_entropy, encode_entropy

MUTATIONS = 14_000
EXTREMES = [0, 1, 7, 8, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]

Random = python_random.Random
Mutation = Callable[[bytearray, bytearray, Random], bytearray]


def flip_bits(data: bytearray, other: bytearray, random: Random) -> bytearray:
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return data


def flip_bits_in_front(data: bytearray, other: bytearray, random: Random) -> bytearray:
    """Where the fields are."""
    data[random.randrange(min(len(data), 140))] ^= 1 << random.randrange(8)
    return data


def cut(data: bytearray, other: bytearray, random: Random) -> bytearray:
    return data[: random.randrange(len(data))]


def extend(data: bytearray, other: bytearray, random: Random) -> bytearray:
    at = random.choice([len(data), len(data) - 8])
    return data[:at] + random.choice([bytes, random.randbytes])(random.choice([1, 8, 64])) + data[at:]


def leave_out(data: bytearray, other: bytearray, random: Random) -> bytearray:
    start = random.randrange(len(data))
    return data[:start] + data[start + random.choice([1, 4, 8, 32]) :]


def splice(data: bytearray, other: bytearray, random: Random) -> bytearray:
    at = random.randrange(min(len(data), len(other)))
    return data[:at] + other[at:]


def overwrite(data: bytearray, other: bytearray, random: Random) -> bytearray:
    start = random.randrange(len(data))
    stretch = data[start : start + random.choice([1, 2, 4, 16])]
    data[start : start + len(stretch)] = random.randbytes(len(stretch))
    return data


def edit_a_field(data: bytearray, other: bytearray, random: Random) -> bytearray:
    at = random.randrange(0, min(len(data) - 8, 160), random.choice([1, 4, 8]))
    form = random.choice(["<B", "<H", "<I", "<Q"])
    struct.pack_into(form, data, at, random.choice(EXTREMES) % 256 ** struct.calcsize(form))
    return data


ALL_MUTATIONS: list[Mutation] = [
    flip_bits,
    flip_bits_in_front,
    cut,
    extend,
    leave_out,
    splice,
    overwrite,
    edit_a_field,
]


def obeys(message: Message, layout: Layout) -> bool:
    """The vectors are such that whoever uses them need not look at their sizes again."""
    for name, vector in message.vectors.items():
        extent = layout.vectors[name]
        assert vector.values.dim() == 1
        assert vector.values.dtype in (torch.uint8, torch.float32, torch.float64, torch.int64)
        if vector.bits is not None:
            assert vector.bits.dtype == torch.uint8
            assert vector.bits.shape == (extent.mask_bytes,)
            unused = 8 * extent.mask_bytes - extent.weights
            assert not unused or int(vector.bits[-1]) < 1 << (8 - unused)
        if vector.values.dtype == torch.uint8:
            assert vector.bits is not None and not vector.values.numel()
        else:
            count = extent.size if vector.bits is None else ones_of(vector.bits) + extent.tail
            assert vector.values.shape == (count,)
    return all(isinstance(number, float) for number in message.numbers.values())


def test_mutated_messages() -> None:
    examples = [*all_examples(3000, 5), *all_examples(333, 0), example(80_000, 3, "entropy", "none")]
    encoded = [bytes(one.encode().data) for one in examples]
    random = Random(0)
    accepted = refused = 0
    for turn in range(MUTATIONS):
        index = random.randrange(len(examples))
        mutation = ALL_MUTATIONS[turn // 2 % len(ALL_MUTATIONS)]
        data = mutation(bytearray(encoded[index]), bytearray(random.choice(encoded)), random)
        if turn % 2:
            data = sealed(data)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                message = examples[index].decode(data)
            except WireError as reason:
                assert "\n" not in str(reason)
                refused += 1
                continue
        accepted += 1
        assert obeys(message, examples[index].layout)
        assert turn % 2 or data in encoded
    assert accepted > 500  # so that mutations reach what lies behind the checks of the frame
    assert refused > 10_000


def test_every_cut_and_every_flipped_bit_is_noticed() -> None:
    sent = example(60, 2, "bitmap", "float16")
    data = sent.encode().data
    for length in range(len(data)):
        with pytest.raises(WireError):
            sent.decode(data[:length])
    for at in range(8 * len(data)):
        data[at // 8] ^= 1 << at % 8
        with pytest.raises(WireError):
            sent.decode(data)
        data[at // 8] ^= 1 << at % 8
    sent.decode(data)


def sent_and_data() -> tuple[Example, bytearray]:
    sent = example(1000, 3, "entropy", "float32")
    return sent, sent.encode().data


def test_reasons() -> None:
    sent, data = sent_and_data()
    with pytest.raises(WireError, match=r"cut short: 7 bytes are not even a header"):
        sent.decode(data[:7])
    with pytest.raises(WireError, match=f"cut short: {len(data) - 1} bytes instead of {len(data)}"):
        sent.decode(data[:-1])
    with pytest.raises(WireError, match="something behind it"):
        sent.decode(data + b"!")
    with pytest.raises(WireError, match="no message of fedsieve"):
        sent.decode(bytes(100))
    with pytest.raises(WireError, match="altered"):
        sent.decode(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    with pytest.raises(WireError, match="version 7 is not known; this is version 1"):
        sent.decode(sealed(data[:4] + b"\7\0" + data[6:]))
    with pytest.raises(WireError, match="another model"):
        decode(data, Layout(bytes(16), sent.layout.vectors), "update")
    with pytest.raises(WireError, match="of kind update, where broadcast is expected"):
        decode(data, sent.layout, "broadcast")
    with pytest.raises(WireError, match="not in the layout"):
        decode(data, Layout(sent.layout.fingerprint, {}), "update")
    with pytest.raises(WireError, match="no known kind"):
        sent.decode(sealed(data[:6] + b"\x08" + data[7:]))


def where_the_vector_is(data: bytearray) -> int:
    return data.index(b"delta") - VECTOR.size


def frame_that_claims(size: int) -> bytes:
    """The beginning of a zstd frame of one segment with its content size in 8 bytes, and an empty last block."""
    return struct.pack("<IBQ", zstandard.MAGIC_NUMBER, 0b11100000, size) + b"\1\0\0"


@pytest.mark.parametrize("size", [2**28, 2**34, 2**40, 2**63 - 1, 2**64 - 1])
def test_giant_claims_take_no_memory(size: int) -> None:
    sent, data = sent_and_data()
    at = where_the_vector_is(data)
    claims = {}
    for what, form, place in (
        ("numbers", "<I", 32),
        ("vectors", "<I", 36),
        ("positions", "<Q", at + 8),
        ("values", "<Q", at + 16),
    ):
        claims[what] = bytearray(data)
        struct.pack_into(form, claims[what], place, min(size, 256 ** struct.calcsize(form) - 1))
    frame = frame_that_claims(size)
    head = data[:at]
    claims["runs"] = head + VECTOR.pack(5, 1, 0, 5, 0, 16, 0) + b"delta\0\0\0" + frame + bytes(8)
    claims["compressed"] = head + VECTOR.pack(0, 1, 1, 5, 0, 0, 16) + b"delta\0\0\0" + frame + bytes(8)
    for what, claim in claims.items():
        tracemalloc.start()
        with pytest.raises(WireError, match=r"cut short|expected of it|twice"):
            sent.decode(sealed(claim))
        assert tracemalloc.get_traced_memory()[1] < 100_000, what
        tracemalloc.stop()


def test_frames_of_another_size_than_the_mask() -> None:
    sent = example(8000, 0, "runs", "none")
    data = sent.encode().data
    at = where_the_vector_is(data)
    for size in (999, 1001, 10_000_000):
        for frame in (
            zstandard.ZstdCompressor().compress(bytes(size)),
            zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size)),
            frame_that_claims(1000),
            zstandard.ZstdCompressor().compress(bytes(1000)) + b"more",
        ):
            vector = VECTOR.pack(5, 0, 0, 5, 0, len(frame), 0) + b"delta\0\0\0" + frame + bytes(-len(frame) % 8)
            with pytest.raises(WireError, match="1000 bytes expected"):
                sent.decode(sealed(data[:at] + vector + bytes(8)))


def test_a_vector_that_is_repeated_is_not_decoded_again() -> None:
    sent, data = sent_and_data()
    at = where_the_vector_is(data)
    again = bytearray(data[:-8] + data[at:-8] + bytes(8))
    struct.pack_into("<I", again, HEADER.size - 4, 2)
    with pytest.raises(WireError, match="'delta' is in the message twice"):
        sent.decode(sealed(again))
    struct.pack_into("<I", again, HEADER.size - 4, 1)
    with pytest.raises(WireError, match="more than its header says"):
        sent.decode(sealed(again))


def test_one_form_for_one_message() -> None:
    """What means nothing is zero, and what is said twice agrees."""
    sent = example(1001, 1, "bitmap", "float32")
    data = sent.encode().data
    at = where_the_vector_is(data)
    for place, reason in (
        (at + 2, "not known"),
        (7, "no known kind"),
        (at + 4, "not known"),
        (at + 24 + 5, "where nothing should be"),
        (at + 32 + 125, "behind the last weight"),  # the last byte of the mask has one weight
    ):
        changed = bytearray(data)
        changed[place] |= 0x80
        with pytest.raises(WireError, match=reason):
            sent.decode(sealed(changed))


def test_coded_masks_that_do_not_add_up() -> None:
    sent = example(8 * 9000, 0, "entropy", "none")
    data = sent.encode().data
    at = where_the_vector_is(data) + 32  # two counts, then the words
    first, second = struct.unpack_from("<2H", data, at)
    for counts in ((first + 1, second - 1), (first, 0), (first, 8 * 809), (first, 8 * 809 + 1), (0xFFFF, second)):
        changed = bytearray(data)
        struct.pack_into("<2H", changed, at, *counts)
        with pytest.raises(WireError, match="damaged"):
            sent.decode(sealed(changed))


def test_coded_masks_that_were_made_wrong_on_purpose() -> None:
    bits = packed(np.random.default_rng(0).random(800) < 0.1).numpy()
    count = int(encode_entropy(bits)[:2].view(np.uint16)[0])
    with patch("fedsieve.wire.entropy.ones_in_chunks", lambda bits: np.array([count + 1])):
        under_another_count = encode_entropy(bits)
    padded = encode_entropy(bits)
    padded[2] = 1
    for payload in (under_another_count, padded, np.array([801, 0], dtype=np.uint16).view(np.uint8)):
        with pytest.raises(WireError, match="damaged"):
            decode_entropy(payload, 100)
    for cut in range(len(padded)):
        with pytest.raises(WireError, match=r"damaged|cut short"):
            decode_entropy(encode_entropy(bits)[:cut], 100)
