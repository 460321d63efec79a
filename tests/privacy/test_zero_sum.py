import hashlib
import hmac
import itertools
import math
import random
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fedsieve.privacy import zero_sum
from fedsieve.privacy.zero_sum import (
    FixedPointError,
    Participant,
    Roster,
    SecureError,
    ZeroSum,
    from_fixed_point,
    to_fixed_point,
)

LEAST, MOST = -(2**63), 2**63 - 1
SIZE = 2**17  # entries that a statistical test looks at
int64s = st.integers(LEAST, MOST) | st.sampled_from([LEAST, LEAST + 1, -1, 0, 1, MOST])


def a_round(clients: Sequence[int], context: str = "edit 1") -> tuple[list[Participant], Roster]:
    participants = [Participant(client) for client in clients]
    return participants, Roster(context, {each.client: each.public_key for each in participants})


def looks_uniform(messages: Tensor) -> bool:
    """Chi-squared tests: each of the 8 bytes, the 12 top bits, and how often each bit changes from entry to entry.

    Uniform noise is called something else less than once in 10^8 times.
    """
    entries = messages.numpy().view(np.uint64)
    counts = [np.bincount(column, minlength=256) for column in entries.view(np.uint8).reshape(-1, 8).T]
    counts.append(np.bincount((entries >> np.uint64(52)).astype(int), minlength=4096))
    changes = np.unpackbits((entries[1:] ^ entries[:-1]).view(np.uint8).reshape(-1, 8), axis=1).sum(0, dtype=int)
    counts += [np.array([change, len(entries) - 1 - change]) for change in changes]
    return min(stats.chisquare(count).pvalue for count in counts) > 1e-8 / len(counts)


def an_update(seed: int = 0) -> Tensor:
    return to_fixed_point(0.01 * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)), 32, 10)


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(0, 10**6), min_size=2, max_size=6, unique=True), st.integers(0, 20))
def test_the_noise_cancels_exactly(data: st.DataObject, clients: list[int], size: int) -> None:
    """For any values, any order of roster and arrival: against sums of Python's unbounded integers."""
    values = {client: data.draw(st.lists(int64s, min_size=size, max_size=size)) for client in clients}
    participants, roster = a_round(clients)
    server = ZeroSum(roster, size)
    for each in participants:
        shuffled = Roster(roster.context, dict(data.draw(st.permutations(list(roster.keys.items())))))
        sent = torch.tensor(values[each.client], dtype=torch.int64)
        server.add(each.client, shuffled.digest, each.masked(sent, shuffled))
        assert sent.tolist() == values[each.client]  # left as it was
    expected = [sum(column) % 2**64 for column in zip(*values.values(), strict=True)]
    assert [total % 2**64 for total in server.finish().tolist()] == expected


@pytest.mark.parametrize("size", [zero_sum.PIECE - 1, zero_sum.PIECE, 2 * zero_sum.PIECE + 3])
def test_the_noise_cancels_across_pieces(size: int) -> None:
    participants, roster = a_round([4, 9, 2])
    values = torch.randint(LEAST, MOST, (3, size), generator=torch.Generator().manual_seed(0))
    server = ZeroSum(roster, size)
    for each, own in zip(participants, values, strict=True):
        server.add(each.client, roster.digest, each.masked(own, roster))
    assert torch.equal(server.finish(), values.sum(0))


def slow_stream(participant: Participant, peer: int, roster: Roster, size: int) -> list[int]:
    """The noise of a pair from its definition: HKDF (RFC 5869) by hand, and AES of one counter after the other."""
    assert participant._private is not None
    secret = participant._private.exchange(X25519PublicKey.from_public_bytes(roster.keys[peer]))
    low, high = min(participant.client, peer), max(participant.client, peer)
    info = roster.context.encode() + roster.keys[low] + roster.keys[high]
    extracted = hmac.digest(bytes(32), secret, hashlib.sha256)
    block = Cipher(algorithms.AES256(hmac.digest(extracted, info + b"\x01", hashlib.sha256)), modes.ECB()).encryptor()
    content = b"".join(block.update(counter.to_bytes(16, "big")) for counter in range((size + 1) // 2))
    return [int.from_bytes(content[8 * entry : 8 * entry + 8], "little") for entry in range(size)]


def test_a_message_is_what_its_definition_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_sum, "PIECE", 4)
    size, values = 11, [LEAST, MOST, 0, -1, 1, 2, 3, 4, 5, 6, 7]
    participants, roster = a_round([7, 3, 30, 11])
    for each in participants:
        expected = list(values)
        for peer in roster.keys:
            if peer != each.client:
                noise, sign = slow_stream(each, peer, roster, size), 1 if peer > each.client else -1
                expected = [value + sign * entry for value, entry in zip(expected, noise, strict=True)]
        found = each.masked(torch.tensor(values), roster).tolist()
        assert [entry % 2**64 for entry in found] == [entry % 2**64 for entry in expected]


def test_a_message_looks_like_noise() -> None:
    """And what would be sent without the noise does not, nor does noise that is the same for every entry."""
    participants, roster = a_round([0, 1, 2])
    for each in participants:
        assert looks_uniform(each.masked(an_update(), roster))
    assert not looks_uniform(an_update())
    assert not looks_uniform(an_update() + 0x123456789ABCDEF)


def test_the_sum_of_some_clients_looks_like_noise() -> None:
    """Only the sum of all does not."""
    participants, roster = a_round([5, 6, 7, 8])
    messages = [each.masked(an_update(seed), roster) for seed, each in enumerate(participants)]
    for count in range(1, 4):
        for some in itertools.combinations(messages, count):
            assert looks_uniform(torch.stack(some).sum(0))
    assert not looks_uniform(torch.stack(messages).sum(0))


def test_the_same_update_is_never_sent_alike() -> None:
    """The messages of two rounds do not even correlate: 6 standard deviations, passed once in 10^8 times."""
    first, second = (each[0].masked(an_update(), roster) for each, roster in (a_round([1, 2]), a_round([1, 2])))
    assert looks_uniform(first - second)
    assert looks_uniform(first + second)
    assert abs(np.corrcoef(first.numpy(), second.numpy())[0, 1]) < 6 / math.sqrt(SIZE)


def test_no_key_is_ever_repeated() -> None:
    """Over 200 rounds of 4 clients, not one public key, and not one stream key except between the two that share it."""
    public, shared = [], []
    for _ in range(200):
        participants, roster = a_round(range(4))
        public += roster.keys.values()
        for one, other in itertools.combinations(participants, 2):
            key = one.stream_key(other.client, roster)
            assert key == other.stream_key(one.client, roster)
            shared.append(key)
    assert len(set(public)) == 200 * 4
    assert len(set(shared)) == 200 * 6
    assert {len(key) for key in public + shared} == {32}


def test_a_stream_key_belongs_to_its_context_and_keys() -> None:
    (one, other), roster = a_round([0, 1])
    swapped = Roster("edit 1", {1: roster.keys[1], 0: roster.keys[0]})
    assert one.stream_key(1, roster) == one.stream_key(1, swapped)
    keys = {one.stream_key(1, Roster(context, roster.keys)) for context in ("edit 1", "edit 2", "head 1", "")}
    assert len(keys) == 4
    assert one.stream_key(1, Roster("edit 1", {**roster.keys, 0: other.public_key})) not in keys


def test_keys_do_not_depend_on_any_seed() -> None:
    keys = set()
    for _ in range(5):
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        keys.add(Participant(0).public_key)
    assert len(keys) == 5


def test_a_participant_serves_once() -> None:
    (one, _), roster = a_round([0, 1])
    one.masked(torch.zeros(3, dtype=torch.int64), roster)
    for again in (roster, Roster("edit 2", roster.keys)):
        with pytest.raises(SecureError, match="client 0: this round's key was used already"):
            one.masked(torch.zeros(3, dtype=torch.int64), again)


def test_a_participant_refuses_a_roster_that_would_not_hide_it() -> None:
    (one, two, three), roster = a_round([1, 2, 3])
    keys, stranger = dict(roster.keys), Participant(1).public_key
    refused = {
        "lacks it, or has another key": [{2: keys[2], 3: keys[3]}, {**keys, 1: stranger}, {}],
        "client 1 is alone": [{1: keys[1]}],
        "have the same key": [{**keys, 3: keys[2]}, {**keys, 2: keys[1]}],
        "the public key of client 3 is not valid": [{**keys, 3: keys[3][:31]}, {**keys, 3: bytes(32)}],
    }
    values = torch.zeros(2, dtype=torch.int64)
    for message, rosters in refused.items():
        for wrong in rosters:
            with pytest.raises(SecureError, match=message):
                one.masked(values, Roster("edit 1", wrong))
    for wrong_values in (values.double(), values.int(), values[None]):
        with pytest.raises(SecureError, match="vector of int64"):
            one.masked(wrong_values, roster)
    total = sum(each.masked(values, roster) for each in (one, two, three))  # a refusal costs nothing
    assert torch.equal(torch.as_tensor(total), values)


def test_the_digest_covers_everything_and_fits_a_float64() -> None:
    _, roster = a_round([1, 2, 12])
    keys = dict(roster.keys)
    others = [
        Roster("edit 2", keys),
        Roster("edit 1", {1: keys[1], 2: keys[2]}),
        Roster("edit 1", {**keys, 2: Participant(2).public_key}),
        Roster("edit 1", {1: keys[2], 2: keys[1], 12: keys[12]}),
        Roster("edit 1", {1: keys[1], 2: keys[2], 13: keys[12]}),
        Roster("edit 1", {**keys, 4: Participant(4).public_key}),
    ]
    assert len({each.digest for each in [roster, *others]}) == 7
    assert Roster("edit 1", dict(reversed(keys.items()))).digest == roster.digest
    digests = [Roster(str(context), {}).digest for context in range(100)]
    assert all(int(float(digest)) == digest for digest in digests)
    assert 2**52 <= max(digests) < 2**53  # all 53 bits are in use


def test_the_server_refuses_all_but_the_rosters_clients() -> None:
    _, roster = a_round([3, 5, 8, 13])
    message = torch.zeros(4, dtype=torch.int64)
    server = ZeroSum(roster, 4)
    server.add(5, roster.digest, message + 1)
    altered = Roster(roster.context, {**roster.keys, 3: Participant(3).public_key})
    for client, digest, sent, why in (
        (4, roster.digest, message, "client 4 is not in this round's roster"),
        (5, roster.digest, message, "client 5 has sent its message already"),
        (3, altered.digest, message, "client 3 used another roster"),
        (3, roster.digest, message[:3], "client 3 sent"),
        (3, roster.digest, message[:1], "client 3 sent"),
        (3, roster.digest, message.double(), "client 3 sent"),
    ):
        with pytest.raises(SecureError, match=why):
            server.add(client, digest, sent)
    server.add(8, roster.digest, message + 2)
    with pytest.raises(SecureError, match="no message from client 3, 13:"):
        server.finish()
    for client in (13, 3):
        server.add(client, roster.digest, message)
    assert server.finish().tolist() == [3] * 4  # what was refused left no trace


@given(st.lists(st.floats(-1000, 1000)), st.integers(0, 40), st.booleans())
def test_fixed_point_is_within_half_a_step(values: list[float], bits: int, single: bool) -> None:
    exact = torch.tensor(values, dtype=torch.float32 if single else torch.float64)
    back = from_fixed_point(to_fixed_point(exact, bits, 100), bits)
    assert back.dtype == torch.float64
    for before, after in zip(exact.tolist(), back.tolist(), strict=True):
        assert abs(Fraction(before) - Fraction(after)) <= Fraction(1, 2 ** (bits + 1))


@example(1, 0, 1.0)  # here the limit is not a float64
@given(st.integers(1, 10**6), st.integers(0, 60), st.sampled_from([-1.0, 1.0]))
def test_overflow_is_refused_at_the_exact_boundary(clients: int, bits: int, sign: float) -> None:
    limit = MOST // clients
    below = float(limit) if int(float(limit)) <= limit else math.nextafter(float(limit), 0)
    fits = to_fixed_point(torch.tensor([0.0, sign * below / 2**bits], dtype=torch.float64), bits, clients)
    assert int(fits[1]) == sign * int(below)
    assert abs(int(fits[1])) * clients <= MOST
    above = max(math.nextafter(below, math.inf), below + 1)
    assert round(above) * clients > MOST
    with pytest.raises(FixedPointError, match="exceeds"):
        to_fixed_point(torch.tensor([sign * above / 2**bits, 0.0], dtype=torch.float64), bits, clients)


def test_overflow_counts_after_rounding() -> None:
    limit = 2**43 - 1  # exactly representable, and so is a quarter more
    assert to_fixed_point(torch.tensor([limit + 0.25], dtype=torch.float64), 0, 2**20).item() == limit
    with pytest.raises(FixedPointError, match=r"8\.79609e\+12 exceeds .* each of 1048576 clients"):
        to_fixed_point(torch.tensor([limit + 0.5], dtype=torch.float64), 0, 2**20)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(FixedPointError):
        to_fixed_point(torch.tensor([0.0, value, 1.0]), 16, 2)


def test_fixed_point_leaves_its_argument_alone() -> None:
    values = torch.tensor([0.3, -1.7], dtype=torch.float64)
    fixed = to_fixed_point(values, 8, 2)
    from_fixed_point(fixed, 8)
    assert values.tolist() == [0.3, -1.7]
    assert fixed.tolist() == [77, -435]
