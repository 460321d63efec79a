"""Both ends of the wire: whatever a client is sent and sends must be enough for the other side."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsieve.config.mask_settings import MaskSettings
from fedsieve.config.wire_settings import WireSettings
from fedsieve.federate.mask_source import MaskSource
from fedsieve.federate.traffic import Traffic
from fedsieve.federate.transport import Transport
from fedsieve.federate.types import Update
from fedsieve.federate.versions import NOTHING, Versions
from fedsieve.model.flat import FlatModel, Scope
from fedsieve.sieve.mask import Mask, packed, shapes_of
from fedsieve.wire import WireError, decode

VALUES = ("float32", "float16", "bfloat16", "int8")


def small_model() -> FlatModel:
    """With a backbone, its BatchNorm statistics, and a head."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13))
    return FlatModel(nn.ModuleDict({"backbone": backbone, "head": nn.Linear(13, 5)}))


def masks_of(scope: Scope, /, **settings: object) -> MaskSource:
    """Random masks; one that all clients have is there from the beginning."""
    asked = MaskSettings(sparsity=0.5, rule="random", calibration_rounds=1, **settings)  # type: ignore[arg-type]
    masks = MaskSource(asked, scope, nn.Identity(), 4, "edit", 3, scope.read())
    if asked.has_one_for_all:
        masks.share(masks.calibrated([], None))
    return masks


def transport_of(scope: Scope, masks: MaskSource | None = None, **settings: object) -> Transport:
    versions = Versions.at_start(scope.model, clients=10, have_backbone=True)
    return Transport(scope, "edit", WireSettings(**settings), versions, 3, masks)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------- up


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("values", VALUES[:3])
@pytest.mark.parametrize("kind", ["none", "own", "shared", "seed"])
@pytest.mark.parametrize("dense", [(), ("head",)])
def test_an_update_arrives(dense: tuple, kind: str, values: str, compress: bool) -> None:
    scope = small_model().scope("all", dense=dense)
    masks = None if kind == "none" else masks_of(scope, scope="server" if kind == "shared" else "client")
    transport = transport_of(scope, masks, values=values, compress=compress)
    mask, seed = None, None
    if masks is not None:
        seed = masks.seed_of(4, 1)
        mask = masks.shared if kind == "shared" else masks.drawn(seed)
    count = scope.size if mask is None else mask.active + scope.size - mask.size
    delta = torch.randn(count)
    metrics = {"train_loss": 0.1, "drift": 2.5}
    update = Update(4, 17, {"delta": delta}, metrics, mask, seed if kind == "seed" else None)
    encoded, state = transport.encode_update(update, 1, {})
    assert state == {}
    if masks is not None:
        masks._drawn.clear()  # the server draws the mask by itself
    found = transport.decode_update(encoded.data, 4, 1)
    expected = delta.to(getattr(torch, values)).float()
    buffers = scope.size - sum(one.numel() for one in scope.parameters)
    expected[count - buffers :] = delta[count - buffers :]  # statistics are never rounded
    assert torch.equal(found.vectors["delta"], expected)
    assert (found.client, found.samples, found.metrics, found.mask) == (4, 17, metrics, mask)
    assert torch.equal(
        update.positions(scope.size) if mask is not None else torch.arange(count),
        found.positions(scope.size) if found.mask is not None else torch.arange(count),
    )
    assert (found.mask is None) == (kind == "none")
    word = {"none": "dense", "shared": "known", "seed": "seed"}.get(kind)
    assert word is None or encoded.encodings["delta"].startswith(word)


@given(rounds=st.integers(1, 6), seed=st.integers(0, 99), masked=st.booleans())
def test_what_eight_bits_have_no_room_for_comes_later(rounds: int, seed: int, masked: bool) -> None:
    """Error feedback: all that was ever decoded and what is still left are all that was ever wanted."""
    scope = small_model().scope("head")
    masks = masks_of(scope, refresh="round") if masked else None
    transport = transport_of(scope, masks, values="int8")
    torch.manual_seed(seed)
    wanted, arrived, state = torch.zeros(scope.size), torch.zeros(scope.size), {}
    for round in range(1, rounds + 1):
        mask = masks.drawn(masks.seed_of(0, round)) if masks is not None else None
        where = torch.arange(scope.size) if mask is None else mask.positions
        delta = torch.randn(len(where)) * 10.0 ** float(torch.randint(-4, 3, ()))
        wanted[where] += delta
        encoded, state = transport.encode_update(Update(0, 5, {"delta": delta}, {}, mask), round, state)
        arrived[where] += transport.decode_update(encoded.data, 0, round).vectors["delta"]
    torch.testing.assert_close(arrived + state["residual"], wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert state["residual"].abs().max() > 0  # there was something to lose


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda update: replace(update, client=5), "another client"),
        (lambda update: replace(update, samples=0), "samples"),
        (lambda update: replace(update, metrics={"drift": float("nan")}), "not finite"),
        (lambda update: replace(update, vectors={"delta": torch.full((70,), float("inf"))}), "not finite"),
        (lambda update: replace(update, vectors={"delta": torch.full((70,), float("nan"))}), "not finite"),
    ],
)
def test_what_cannot_be_used_is_refused(spoil, reason: str) -> None:
    scope = small_model().scope("head")
    transport = transport_of(scope)
    good = Update(4, 17, {"delta": torch.ones(scope.size)})
    transport.decode_update(transport.encode_update(good, 1, {})[0].data, 4, 1)
    with pytest.raises(WireError, match=reason):
        transport.decode_update(transport.encode_update(spoil(good), 1, {})[0].data, 4, 1)
    with pytest.raises(WireError, match="another round"):
        transport.decode_update(transport.encode_update(good, 2, {})[0].data, 4, 1)
    other = Transport(scope, "another phase", WireSettings(), transport.versions, 3)
    with pytest.raises(WireError, match="another model or phase"):
        other.decode_update(transport.encode_update(good, 1, {})[0].data, 4, 1)


# ------------------------------------------------------------------------------------------- down


class SlowClient:
    """A client that holds nothing but what it was sent (and the pretrained backbone, if it has it)."""

    def __init__(self, model: FlatModel, have_backbone: bool) -> None:
        self.weights = torch.full_like(model.vector, torch.nan)
        for entry in model.entries:
            if have_backbone and entry.name.startswith("backbone."):
                self.weights[entry.start : entry.stop] = model.vector[entry.start : entry.stop]

    def receive(self, data: bytearray, transport: Transport) -> None:
        shared = transport.masks.shared if transport.masks is not None else None
        known = None
        if shared is not None:  # what the mask does not cover may always change
            outside_mask = torch.ones(transport.scope.size - shared.size, dtype=torch.bool)
            known = {"weights": packed(torch.cat((shared.unpack(), outside_mask)))}
        message = decode(data, transport.layout, "broadcast", known)
        for name, ranges in (("weights", transport.scope.ranges), ("rest", transport.scope.outside)):
            if name in message.vectors:
                where = torch.tensor([place for start, stop in ranges for place in range(start, stop)])
                vector = message.vectors[name]
                if vector.bits is not None:
                    where = where[unpacked(vector.bits, len(where))]
                self.weights[where] = vector.values


def unpacked(bits: Tensor, size: int) -> Tensor:
    return torch.tensor([bool(int(bits[place // 8]) >> place % 8 & 1) for place in range(size)], dtype=torch.bool)


@given(data=st.data(), way=st.sampled_from(["full", "delta"]), have_backbone=st.booleans(), shared=st.booleans())
def test_broadcasts_are_enough(data: st.DataObject, way: str, have_backbone: bool, shared: bool) -> None:
    """Whoever takes part, and whenever: a client that gets its messages holds the server's weights to the bit."""
    model = small_model()
    versions = Versions.at_start(model, 3, have_backbone)
    clients = [SlowClient(model, have_backbone) for _ in range(3)]
    down = 0
    for phase in data.draw(st.lists(st.sampled_from(["head", "backbone", "all"]), min_size=1, max_size=3)):
        scope = model.scope(phase, dense=("head",) if phase == "all" and data.draw(st.booleans()) else ())
        masks = masks_of(scope, scope="server") if shared else None
        transport = Transport(scope, phase, WireSettings(broadcast=way), versions, 3, masks)  # type: ignore[arg-type]
        for _ in range(data.draw(st.integers(1, 3))):
            weights, traffic = scope.read(), Traffic()
            chosen = data.draw(st.sets(st.integers(0, 2), min_size=1))
            sent = {client: transport.broadcast(versions.last_seen(client), weights).data for client in chosen}
            transport.bring_up_to_date(chosen, weights, traffic)
            assert traffic.down == sum(map(len, sent.values()))
            assert (traffic.up > 0) == (way == "delta")
            down += traffic.down
            for client, message in sent.items():
                clients[client].receive(message, transport)
                assert torch.equal(clients[client].weights, model.vector)
            after = weights.clone()
            moved = torch.rand(len(after)) < data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.97, 1.0]))
            if transport.masks is not None:
                covered = transport.masks.shared.unpack()
                moved[: len(covered)] &= covered
            after[moved] += torch.randn(int(moved.sum()))
            versions.record(scope, weights, after)
            scope.write(after)


def test_only_what_changed_is_sent() -> None:
    model = small_model()
    scope, versions = model.scope("head"), Versions.at_start(model, clients=3, have_backbone=True)
    transport = Transport(scope, "head", WireSettings(), versions, 3)
    first = len(transport.broadcast(NOTHING, scope.read()).data)
    assert 4 * scope.size < first < 4 * scope.size + 300
    weights = scope.read()
    after = weights.clone()
    after[3] = -after[3]
    versions.record(scope, weights, after)
    scope.write(after)
    assert len(transport.broadcast(0, after).data) < first - 4 * (scope.size - 10)
    assert len(transport.broadcast(1, after).data) < len(transport.broadcast(0, after).data)  # nothing at all
    zero = after.clone()
    zero[5] = 0.0
    versions.record(scope, after, zero)
    negative = zero.clone()
    negative[5] = -0.0
    versions.record(scope, zero, negative)
    assert versions.changed[scope.ranges[0][0] + 5] == 3  # to the bit


def test_without_the_backbone_a_first_broadcast_has_it_all() -> None:
    model = small_model()
    scope = model.scope("head")
    sizes = {}
    for have in (True, False):
        transport = Transport(scope, "head", WireSettings(), Versions.at_start(model, 3, have), 3)
        sizes[have] = len(transport.broadcast(NOTHING, scope.read()).data)
    backbone = len(model.vector) - scope.size
    assert sizes[False] - sizes[True] == pytest.approx(4 * backbone, abs=100)


def test_a_random_mask_is_its_seed() -> None:
    scope = small_model().scope("all")
    masks = masks_of(scope, scope="server")
    transport = transport_of(scope, masks)
    assert masks.shared is not None
    drawn = Mask.pack(shapes_of(scope.named.items()), masks.shared.unpack())
    assert masks.drawn(masks.seed_of(0, 1)) == drawn
    by_seed, by_bits = Traffic(), Traffic()
    transport.send_mask([0], drawn, by_seed, masks.seed_of(0, 1))
    transport.send_mask([0], drawn, by_bits)
    assert by_seed.down < by_bits.down
    assert torch.equal(packed(drawn.unpack()), drawn.bits)
