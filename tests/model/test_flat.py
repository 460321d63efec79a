"""The vector is the model: its tensors are views, its scopes the right parts, its training flags the right ones."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsieve.config.scope_settings import BlocksScope, Train
from fedsieve.errors import InputError
from fedsieve.model.classifier import Classifier, initialize_head, make_head
from fedsieve.model.flat import FlatModel
from fedsieve.model.vit import ViT, ViTShape, initialize

DEPTH = 4


class Convolutional(nn.Module):
    """A backbone with everything that a vision transformer lacks: BatchNorm, its counters, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 6
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.5))

    def forward(self, images: Tensor) -> Tensor:
        return self.second(self.first(images)).mean(dim=(2, 3))


def transformer(hidden: int | None = None) -> Classifier:
    generator = torch.Generator().manual_seed(0)
    backbone = ViT(ViTShape(16, 8, width=8, depth=DEPTH, heads=2, hidden=12))
    initialize(backbone, generator)
    head = make_head(8, 3, hidden)
    initialize_head(head, generator)
    return Classifier(backbone, head, ["a", "b", "c"])


def convolutional() -> Classifier:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    return Classifier(Convolutional(), head, ["a", "b", "c"])  # type: ignore[arg-type]


models = pytest.mark.parametrize("make", [transformer, lambda: transformer(hidden=5), convolutional])
random_images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
trains: st.SearchStrategy[Train] = st.one_of(
    st.sampled_from(["head", "backbone", "all"]),
    st.builds(
        BlocksScope,
        blocks=st.sets(st.integers(0, DEPTH - 1), min_size=1).map(lambda blocks: tuple(sorted(blocks))),
        head=st.booleans(),
    ),
)


@models
def test_flattening_changes_nothing(make: Callable[[], Classifier]) -> None:
    model = make().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scores = model(random_images)
    flat = FlatModel(model)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(model(random_images), scores)
    assert all(torch.equal(tensor, before[name]) for name, tensor in flat.tensors().items())


@models
def test_parameters_come_first_in_the_modules_order_then_float_buffers(make: Callable[[], Classifier]) -> None:
    model = make()
    parameters = [name for name, _ in model.named_parameters()]
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    flat = FlatModel(model)
    assert [entry.name for entry in flat.entries] == parameters + buffers
    assert [entry.is_buffer for entry in flat.entries] == [False] * len(parameters) + [True] * len(buffers)
    assert [entry.start for entry in flat.entries] == [0, *(entry.stop for entry in flat.entries[:-1])]
    assert flat.entries[-1].stop == len(flat.vector)


@models
def test_the_modules_tensors_are_views(make: Callable[[], Classifier]) -> None:
    model = make().eval()
    flat = FlatModel(model)
    start = flat.vector.data_ptr()
    own = dict(model.state_dict())
    for entry in flat.entries:
        assert own[entry.name].data_ptr() == start + 4 * entry.start
    before = model(random_images)
    flat.vector.mul_(0.5)
    halved = make().eval()
    with torch.no_grad():
        for tensor in halved.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(0.5)
    assert torch.equal(model(random_images), halved(random_images))
    assert not torch.equal(model(random_images), before)


def test_an_optimizer_step_arrives_in_the_vector() -> None:
    flat = FlatModel(transformer())
    scope = flat.scope("head")
    scope.prepare_training()
    before = flat.vector.clone()
    flat.module(random_images).sum().backward()
    torch.optim.SGD(scope.parameters, lr=0.1).step()
    changed = (flat.vector != before).nonzero().flatten()
    weights = next(entry for entry in flat.entries if entry.name == "head.weight")
    assert len(changed) and changed.min() >= weights.start and bool((changed < len(flat.vector)).all())


# ------------------------------------------------------------------------------------------------ scopes


@pytest.mark.parametrize(
    ("train", "prefixes"),
    [
        ("head", ["head."]),
        ("backbone", ["backbone."]),
        ("all", ["backbone.", "head."]),
        (BlocksScope(blocks=(1,)), ["backbone.blocks.1."]),
        (BlocksScope(blocks=(0, 3), head=True), ["backbone.blocks.0.", "backbone.blocks.3.", "head."]),
    ],
)
@models
def test_a_scope_has_exactly_its_names(make: Callable[[], Classifier], train: Train, prefixes: list[str]) -> None:
    flat = FlatModel(make())
    scope = flat.scope(train)
    expected = [entry for entry in flat.entries if any(entry.name.startswith(prefix) for prefix in prefixes)]
    assert scope.entries == expected
    assert scope.size == sum(entry.stop - entry.start for entry in expected)
    assert [id(one) for one in scope.parameters] == [
        id(flat.module.get_parameter(entry.name)) for entry in expected if not entry.is_buffer
    ]


def test_block_1_is_not_block_10() -> None:
    backbone = ViT(ViTShape(8, 8, width=4, depth=11, heads=1, hidden=4))
    flat = FlatModel(Classifier(backbone, make_head(4, 2, None), ["a", "b"]))
    names = {entry.name.split(".")[2] for entry in flat.scope(BlocksScope(blocks=(1,))).entries}
    assert names == {"1"}


def test_neighbours_are_one_range() -> None:
    flat = FlatModel(transformer())
    assert flat.scope("all").ranges == [(0, len(flat.vector))]
    assert len(flat.scope("head").ranges) == len(flat.scope("backbone").ranges) == 1
    assert len(flat.scope(BlocksScope(blocks=(0, 1))).ranges) == 1
    assert len(flat.scope(BlocksScope(blocks=(0, 2))).ranges) == 2
    assert len(FlatModel(convolutional()).scope("backbone").ranges) == 2  # weights, and behind the head's statistics


@given(train=trains, seed=st.integers(0, 1000))
def test_what_is_written_is_read_and_nothing_else_changes(train: Train, seed: int) -> None:
    flat = FlatModel(transformer(hidden=5))
    scope = flat.scope(train)
    before = flat.vector.clone()
    first = scope.read()
    values = torch.randn(scope.size, generator=torch.Generator().manual_seed(seed))
    scope.write(values)
    assert torch.equal(scope.read(), values)
    inside = torch.zeros(len(before), dtype=torch.bool)
    for entry in scope.entries:
        inside[entry.start : entry.stop] = True
    assert torch.equal(flat.vector[~inside], before[~inside]) and torch.equal(flat.vector[inside], values)
    scope.write(first)
    assert torch.equal(flat.vector, before)


def test_a_mask_covers_the_first_part_and_dense_layers_come_behind_it() -> None:
    model = FlatModel(transformer())
    scope, whole = model.scope("all", dense=("norm", "head")), model.scope("all")
    names = [entry.name for entry in scope.entries]
    assert sorted(names) == sorted(entry.name for entry in whole.entries)
    assert names == [*scope.sieved, *scope.dense]
    assert scope.dense == [name for name in whole.named if "norm" in name or name.startswith("head.")]
    expected = torch.cat([dict(model.module.named_parameters())[name].detach().flatten() for name in names])
    assert torch.equal(scope.read(), expected)
    assert scope.sieved_weights == sum(model.parameters[name].numel() for name in scope.sieved)
    scope.write(torch.arange(scope.size, dtype=torch.float32))
    assert torch.equal(scope.read(), torch.arange(scope.size, dtype=torch.float32))
    chosen = model.scope("all", only=("mlp",), dense=("head",))
    assert chosen.dense == ["head.weight", "head.bias"] and all("mlp" in name for name in chosen.sieved)
    for train, only, dense, reason in (
        ("backbone", None, ("head",), "not trained: head; `train` has tokens"),
        ("head", None, ("head",), r"leaves nothing for the mask to cover; `train` has head"),
        ("backbone", ("head",), ("norm",), "leaves nothing to train"),
    ):
        with pytest.raises(InputError, match=reason):
            model.scope(train, only, dense)


def test_what_was_read_is_a_copy() -> None:
    flat = FlatModel(transformer())
    for train in ("head", "all"):
        values = flat.scope(train).read()  # type: ignore[arg-type]
        before = values.clone()
        flat.vector.add_(1)
        assert torch.equal(values, before)


# ---------------------------------------------------------------------------------------------- training


@given(train=trains)
def test_gradients_for_what_is_in_scope_and_nothing_else(train: Train) -> None:
    flat = FlatModel(transformer())
    scope = flat.scope(train)
    flat.scope("backbone").prepare_training()  # what an earlier phase has left
    scope.prepare_training()
    names = {entry.name for entry in scope.entries}
    assert {name for name, one in flat.module.named_parameters() if one.requires_grad} == names
    flat.module(random_images).square().sum().backward()
    assert {name for name, one in flat.module.named_parameters() if one.grad is not None} == names


def training(module: nn.Module) -> set[str]:
    """The names of the layers (not of what contains them) in training mode."""
    return {name for name, one in module.named_modules() if one.training and not list(one.children())}


def test_only_what_is_trained_is_in_training_mode() -> None:
    flat = FlatModel(convolutional())
    backbone = {f"backbone.{part}.{layer}" for part in ("first", "second") for layer in (0, 1, 2)}
    head = {"head.0", "head.1", "head.2"}  # the last of each part of the backbone and the middle one here are dropout
    for train, expected in (("head", head), ("backbone", backbone), ("all", backbone | head)):
        flat.scope(train).prepare_training()  # type: ignore[arg-type]
        assert training(flat.module) == expected


def test_only_the_trained_blocks_are_in_training_mode() -> None:
    flat = FlatModel(transformer())
    flat.scope(BlocksScope(blocks=(2,))).prepare_training()
    assert {name.split(".")[2] for name in training(flat.module)} == {"2"}


def test_a_scope_is_prepared_again_whatever_came_between() -> None:
    flat = FlatModel(convolutional())
    scope, other = flat.scope("head"), flat.scope("backbone")

    def flags() -> tuple[list[bool], list[bool]]:
        return [one.training for one in flat.module.modules()], [one.requires_grad for one in flat.module.parameters()]

    scope.prepare_training()
    expected = flags()
    for disturb in (flat.module.eval, flat.module.train, flat.module.requires_grad_, other.prepare_training):
        disturb()  # type: ignore[operator]
        assert flags() != expected
        scope.prepare_training()
        assert flags() == expected


def test_dropout_works_in_the_trained_part_only() -> None:
    flat = FlatModel(convolutional())

    def is_random(module: nn.Module, inputs: Tensor) -> bool:
        return not torch.equal(module(inputs), module(inputs))

    features = torch.randn(4, 6)
    flat.scope("head").prepare_training()
    assert not is_random(flat.module.backbone, random_images) and is_random(flat.module.head, features)
    flat.scope("backbone").prepare_training()
    assert is_random(flat.module.backbone, random_images) and not is_random(flat.module.head, features)


def test_batch_statistics_live_in_the_vector() -> None:
    flat = FlatModel(convolutional())
    statistics = [entry.name for entry in flat.entries if entry.is_buffer]
    assert statistics == [
        f"backbone.{part}.1.running_{what}" for part in ("first", "second") for what in ("mean", "var")
    ]
    before = {name: tensor.clone() for name, tensor in flat.tensors().items()}
    flat.scope("all").prepare_training()
    flat.module(random_images)
    changed = {name for name, tensor in flat.tensors().items() if not torch.equal(tensor, before[name])}
    assert changed == set(statistics)
    own = dict(flat.module.named_buffers())
    assert all(torch.equal(own[name], flat.tensors()[name]) for name in statistics)


def test_frozen_batch_statistics_stand_still() -> None:
    flat = FlatModel(convolutional())
    before = flat.vector.clone()
    flat.scope("head").prepare_training()
    flat.module(random_images)
    assert torch.equal(flat.vector, before)


def test_writing_the_vector_back_resets_batch_statistics() -> None:
    flat = FlatModel(convolutional())
    scope = flat.scope("all")
    before = scope.read()
    flat.module.train()
    flat.module(random_images)
    assert not torch.equal(scope.read(), before)
    scope.write(before)
    fresh = FlatModel(convolutional())
    assert torch.equal(flat.module.eval()(random_images), fresh.module.eval()(random_images))
