"""SparseSGDM against torch.optim.SGD, and against loops over dense tensors that anyone can check."""

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsieve.errors import InputError
from fedsieve.sieve.mask import Mask, shapes_of
from fedsieve.sieve.sgdm import SparseSGDM
from fedsieve.sieve.weight_selection import Selection
from masked_tensors import (
    MASKS,
    REDRAWN,
    SHAPES,
    Parameters,
    draw,
    give,
    gradients,
    mask_of,
    mixed_mask,
    random_mask,
    row_mask,
    same,
)

OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.03, "weight_decay": 0.01},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.013, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02},
    {"lr": 0.1, "momentum": 0.7, "nesterov": True, "weight_decay": 0.05},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("clip_norm", [None, 3.0, 1e6])
@pytest.mark.parametrize("full", [True, False])
def test_with_a_full_mask_it_is_sgd_to_the_last_bit(
    options: dict[str, Any], clip_norm: float | None, full: bool
) -> None:
    ours, theirs = draw(), draw()
    optimizer = SparseSGDM(ours.items(), Mask.full(SHAPES) if full else None, clip_norm=clip_norm, **options)
    reference = torch.optim.SGD(theirs.values(), **options)
    for gradient in gradients(12):
        give(ours, gradient), give(theirs, gradient)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(theirs.values(), clip_norm)
        optimizer.step(), reference.step()
        assert same(ours, theirs)
    assert not same(ours, draw())


def dense_masked_sgd(mask: Mask, options: dict[str, Any], steps: int) -> tuple[Parameters, torch.optim.SGD]:
    parameters = draw()
    reference = torch.optim.SGD(parameters.values(), **options)
    before = {name: one.detach().clone() for name, one in parameters.items()}
    for gradient in gradients(steps):
        give(parameters, {name: one * mask[name] for name, one in gradient.items()})
        reference.step()
        for name, one in parameters.items():
            one.data = torch.where(mask[name], one.data, before[name])
    return parameters, reference


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", MASKS)
def test_active_weights_are_those_of_dense_masked_sgd(options: dict[str, Any], kind: str) -> None:
    mask, ours = MASKS[kind](), draw()
    optimizer = SparseSGDM(ours.items(), mask, **options)
    for gradient in gradients(8):
        give(ours, gradient)
        optimizer.step()
    theirs, reference = dense_masked_sgd(mask, options, 8)
    assert same(ours, theirs)
    for name, before in draw().items():
        assert torch.equal(ours[name].view(torch.int32)[~mask[name]], before.view(torch.int32)[~mask[name]])
    if options.get("momentum") and mask.active:
        state = optimizer.export_momentum()
        assert torch.equal(state["mask"], mask.bits)
        buffers = [reference.state[theirs[name]]["momentum_buffer"][mask[name]] for name in SHAPES]
        assert torch.equal(state["momentum"], torch.cat(buffers))


@given(st.floats(0, 1), st.integers(0, 10_000), st.integers(1, 70), st.integers(1, 9))
def test_any_density_and_size(density: float, seed: int, rows: int, columns: int) -> None:
    shapes = {"weight": (rows, columns)}
    mask, ours, theirs = random_mask(density, seed, shapes), draw(seed, shapes), draw(seed, shapes)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    optimizer, reference = SparseSGDM(ours.values(), mask, **options), torch.optim.SGD(theirs.values(), **options)
    for gradient in gradients(3, shapes):
        give(ours, gradient), give(theirs, gradient)
        optimizer.step(), reference.step()
    active = mask["weight"]
    assert torch.equal(ours["weight"][active], theirs["weight"][active])
    assert torch.equal(ours["weight"][~active], draw(seed, shapes)["weight"][~active])


def test_each_mask_gets_its_cheapest_selection() -> None:
    rows = torch.zeros(6, 4, dtype=torch.bool)
    rows[[1, 4]] = True
    selection = Selection.of(rows)
    assert selection is not None and selection.rows and selection.index is not None
    assert selection.index.tolist() == [1, 4] and selection.index.dtype == torch.int32
    assert Selection.of(torch.zeros(6, 4, dtype=torch.bool)) is None
    assert Selection.of(torch.ones(6, 4, dtype=torch.bool)) == Selection()
    nearly = torch.ones(6, 4, dtype=torch.bool)
    nearly[2, 3] = False
    selection = Selection.of(nearly)
    assert selection is not None and selection.held is not None and selection.index is None
    assert selection.held.tolist() == [11]
    rows[0, 0] = True
    selection = Selection.of(rows)
    assert selection is not None and selection.index is not None and not selection.rows
    assert selection.index.tolist() == [0, 4, 5, 6, 7, 16, 17, 18, 19]
    vector = Selection.of(torch.tensor([True, False, False]))
    assert vector is not None and not vector.rows


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_frozen_weights_survive_a_gradient_that_is_not_a_number(decay: float) -> None:
    for kind in MASKS:
        mask, ours = MASKS[kind](), draw()
        optimizer = SparseSGDM(ours.items(), mask, lr=0.1, momentum=0.9, clip_norm=1.0, weight_decay=decay)
        for gradient in gradients(2):
            give(ours, {name: torch.full_like(one, torch.nan) for name, one in gradient.items()})
            optimizer.step()
        for name, before in draw().items():
            assert torch.equal(ours[name][~mask[name]], before[~mask[name]])


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"rescale": True}, {"weight_decay": 0.1}])
def test_gradients_are_left_alone(options: dict[str, Any]) -> None:
    ours, gradient = draw(), next(gradients(1))
    optimizer = SparseSGDM(ours.items(), mixed_mask(), lr=0.1, momentum=0.9, **options)
    give(ours, gradient)
    for _ in range(3):
        optimizer.step()
        assert all(torch.equal(ours[name].grad, gradient[name]) for name in SHAPES)  # type: ignore[arg-type]


def test_the_norm_counts_active_gradients_after_rescaling() -> None:
    mask, ours, theirs = mixed_mask(), draw(), draw()
    optimizer = SparseSGDM(ours.items(), mask, lr=0.1, momentum=0.9, clip_norm=2.0, rescale=True)
    reference = torch.optim.SGD(theirs.values(), lr=0.1, momentum=0.9)
    for gradient in gradients(5):
        give(ours, gradient)
        give(theirs, {name: one / mask.density * mask[name] for name, one in gradient.items()})
        assert nn.utils.clip_grad_norm_(theirs.values(), 2.0) > 2
        optimizer.step(), reference.step()
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


def test_rescaling_alone_is_exact() -> None:
    mask, ours, theirs = random_mask(0.3), draw(), draw()
    optimizer, reference = (
        SparseSGDM(ours.items(), mask, lr=0.1, rescale=True),
        torch.optim.SGD(theirs.values(), lr=0.1),
    )
    for gradient in gradients(3):
        give(ours, gradient)
        give(theirs, {name: one / mask.density * mask[name] for name, one in gradient.items()})
        optimizer.step(), reference.step()
    assert same(ours, theirs)


def bytes_of(thing: Any, seen: set[int]) -> int:
    """All tensors that can be reached from an object, each once."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return thing.untyped_storage().nbytes()
    if isinstance(thing, dict):
        return sum(bytes_of(one, seen) for one in thing.values())
    if isinstance(thing, (list, tuple, set)):
        return sum(bytes_of(one, seen) for one in thing)
    return bytes_of(vars(thing), seen) if hasattr(thing, "__dict__") and not callable(thing) else 0


@pytest.mark.parametrize("structure", ["unstructured", "rows", "uneven"])
def test_memory_at_ninety_percent_sparsity(structure: str) -> None:
    shapes = {"first": (400, 300), "second": (300, 400), "bias": (400,)}
    parameters, generator = draw(shapes=shapes), torch.Generator().manual_seed(3)
    active = {name: torch.rand(shape, generator=generator) < 0.1 for name, shape in shapes.items()}
    if structure == "rows":
        active = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes.items()}
        active["first"][:40], active["second"][5:35] = True, True
    if structure == "uneven":  # nearly all in one part of one tensor, at the worst density for a single index
        active = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes.items()}
        active["first"] = torch.rand(shapes["first"], generator=generator) < 0.19
        active["bias"] = torch.rand(shapes["bias"], generator=generator) < 0.68
    mask = mask_of(active)
    assert mask.density == pytest.approx(0.1, rel=0.05)
    optimizer = SparseSGDM(parameters.items(), mask, lr=0.1, momentum=0.9)
    give(parameters, next(gradients(1, shapes)))
    optimizer.step()
    seen = {id(one) for one in parameters.values()}
    own = bytes_of({key: value for key, value in vars(optimizer).items() if key != "state"}, seen)
    own += bytes_of(dict(optimizer.state), seen)
    assert 0.1 * 4 * mask.size * 0.9 < own <= 0.21 * 4 * mask.size * mask.density / 0.1
    if structure == "rows":
        assert own < 0.11 * 4 * mask.size
    without = SparseSGDM(parameters.items(), mask, lr=0.1)
    without.step()
    assert not without.state


def naive(masks: list[Mask], policy: str, momentum: float, dampening: float = 0.0, decay: float = 0.0) -> Parameters:
    """Five steps with each mask, v and the mask being dense: Algorithm 1 if "leak"."""
    parameters, velocity = draw(), {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    stream = gradients(5 * len(masks))
    for before, mask in zip([None, *masks], masks, strict=False):
        for name in SHAPES:
            velocity[name] *= 1 if policy == "leak" else 0 if policy == "reset" else mask[name]
        nothing_kept = policy == "carry" and before is not None and before.active == 0
        fresh = before is None or policy == "reset" or nothing_kept
        for _ in range(5):
            for name, gradient in next(stream).items():
                step = (gradient + decay * parameters[name].detach()) * mask[name]
                velocity[name] = momentum * velocity[name] + (1 if fresh else 1 - dampening) * step
                parameters[name].data -= 0.1 * velocity[name]
            fresh = False
    return parameters


@pytest.mark.parametrize("kind", [*MASKS, "full"])
@pytest.mark.parametrize("clip_norm", [None, 2.0])
@pytest.mark.parametrize("way", ["penalty", "correction", "both"])
def test_a_penalty_is_clipped_and_a_correction_is_not(kind: str, clip_norm: float | None, way: str) -> None:
    """Against dense tensors: g + mu (w - anchor) of the active weights, clipped, + c, then SGD with momentum."""
    mask = Mask.full(SHAPES) if kind == "full" else MASKS[kind]()
    anchor, shift = ({name: one.detach() for name, one in draw(seed).items()} for seed in (5, 6))
    mu, moves = (0.3 if way != "correction" else 0.0), (1.0 if way != "penalty" else 0.0)
    ours, theirs = draw(), {name: one.detach().clone() for name, one in draw().items()}
    optimizer = SparseSGDM(
        ours.items(),
        mask,
        lr=0.1,
        momentum=0.9,
        weight_decay=0.01,
        clip_norm=clip_norm,
        penalty=(lambda name, own, select: mu * (own - select(anchor[name]))) if mu else None,
        correction=(lambda name, select: moves * select(shift[name])) if moves else None,
    )
    velocity = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for gradient in gradients(8):
        give(ours, gradient)
        optimizer.step()
        pulled = {name: (one + mu * (theirs[name] - anchor[name])) * mask[name] for name, one in gradient.items()}
        norm = torch.cat([one.flatten() for one in pulled.values()]).norm()
        shrink = 1.0 if clip_norm is None else min(1.0, clip_norm / (float(norm) + 1e-6))
        for name, one in pulled.items():
            step = (shrink * one + moves * shift[name] + 0.01 * theirs[name]) * mask[name]
            velocity[name] = 0.9 * velocity[name] + step
            theirs[name] -= 0.1 * velocity[name]
    for name in SHAPES:
        torch.testing.assert_close(ours[name].detach(), theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", REDRAWN)
@pytest.mark.parametrize("policy", ["reset", "carry", "leak"])
@pytest.mark.parametrize("settings", [{}, {"dampening": 0.4, "weight_decay": 0.1}])
@pytest.mark.parametrize("cut", [False, True])
def test_a_redrawn_mask(kind: str, policy: Any, settings: dict[str, float], cut: bool) -> None:
    """`cut`: a new optimizer for each mask, with the momentum handed over as a file would."""
    masks, ours = REDRAWN[kind](), draw()
    stream = gradients(5 * len(masks))
    optimizer = SparseSGDM(ours.items(), masks[0], lr=0.1, momentum=0.9, **settings)
    for number, mask in enumerate(masks):
        if number and cut:
            state = {name: one.clone() for name, one in optimizer.export_momentum().items()}
            optimizer = SparseSGDM(ours.items(), mask, lr=0.1, momentum=0.9, **settings)
            optimizer.import_momentum(state, policy)
        elif number:
            optimizer.set_mask(mask, policy)
        for _ in range(5):
            give(ours, next(stream))
            optimizer.step()
    expected = naive(masks, policy, 0.9, settings.get("dampening", 0.0), settings.get("weight_decay", 0.0))
    for name in SHAPES:
        torch.testing.assert_close(ours[name], expected[name], rtol=2e-6, atol=1e-6)


def test_leak_moves_frozen_weights_and_carry_does_not() -> None:
    first, second = random_mask(0.5, 0), random_mask(0.5, 1)
    left = first - second
    for policy, moves in (("carry", False), ("leak", True)):
        ours = draw()
        optimizer = SparseSGDM(ours.items(), first, lr=0.1, momentum=0.9)
        give(ours, next(gradients(1)))
        optimizer.step()
        optimizer.set_mask(second, policy)  # type: ignore[arg-type]
        before = {name: one.detach().clone() for name, one in ours.items()}
        optimizer.step()
        for name, one in ours.items():
            assert bool((one != before[name])[left[name]].all()) is moves or not left[name].any()


@pytest.mark.parametrize("moved", [0.2, 0.9, 1.0])
@pytest.mark.parametrize("cut", [False, True])
def test_leak_goes_on_where_no_gradient_is_computed_any_more(moved: float, cut: bool) -> None:
    """However much of the tensor has momentum: it decays to nothing, as in a dense loop."""
    first = random_mask(moved)
    rest = mask_of({name: torch.full(shape, name != "wide") for name, shape in SHAPES.items()})
    ours, expected, velocity = draw(), draw()["wide"].detach(), torch.zeros(SHAPES["wide"])
    optimizer = SparseSGDM(ours.items(), first, lr=0.1, momentum=0.5, weight_decay=0.1)
    for number, gradient in enumerate(gradients(6)):
        give(ours, gradient)
        if number == 2 and cut:
            state = optimizer.export_momentum()
            optimizer = SparseSGDM(ours.items(), rest, lr=0.1, momentum=0.5, weight_decay=0.1)
            optimizer.import_momentum(state, "leak")
        elif number == 2:
            optimizer.set_mask(rest, "leak")
        if number >= 2:
            ours["wide"].grad = None  # as `only_active` does it
        optimizer.step()
        step = (gradient["wide"] + 0.1 * expected) * first["wide"] if number < 2 else 0
        velocity = 0.5 * velocity + step
        expected = expected - 0.1 * velocity
        torch.testing.assert_close(ours["wide"], expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_run_cut_in_two_is_the_uncut_one(options: dict[str, Any]) -> None:
    for mask in (None, mixed_mask()):
        whole, cut = draw(), draw()
        uncut, optimizer = SparseSGDM(whole.items(), mask, **options), SparseSGDM(cut.items(), mask, **options)
        assert optimizer.export_momentum() == {}
        for number, gradient in enumerate(gradients(8)):
            if number == 4:
                state = optimizer.export_momentum()
                assert bool(state) is ("momentum" in options)
                optimizer = SparseSGDM(cut.items(), mask, **options)
                optimizer.import_momentum(state, "carry")
            give(whole, gradient), give(cut, gradient)
            uncut.step(), optimizer.step()
        assert same(whole, cut)


def test_an_imported_momentum_must_fit() -> None:
    ours = draw()
    optimizer = SparseSGDM(ours.items(), None, lr=0.1, momentum=0.9)
    give(ours, next(gradients(1)))
    optimizer.step()
    state = optimizer.export_momentum()
    with pytest.raises((ValueError, RuntimeError)):
        optimizer.import_momentum({**state, "momentum": state["momentum"][1:]}, "carry")
    with pytest.raises(ValueError, match="bytes of bits"):
        optimizer.import_momentum({**state, "mask": state["mask"][1:]}, "carry")
    with pytest.raises(ValueError, match="one of reset, carry, leak, not keep"):
        optimizer.set_mask(None, "keep")  # type: ignore[arg-type]


def test_state_dict_round_trip() -> None:
    whole, cut, mask = draw(), draw(), mixed_mask()
    options = OPTIONS[3]
    uncut, optimizer = SparseSGDM(whole.items(), mask, **options), SparseSGDM(cut.items(), mask, **options)
    for number, gradient in enumerate(gradients(8)):
        if number == 4:
            state = optimizer.state_dict()
            optimizer = SparseSGDM(cut.items(), mask, lr=9.0, momentum=0.1)
            optimizer.load_state_dict(state)
        give(whole, gradient), give(cut, gradient)
        uncut.step(), optimizer.step()
    assert same(whole, cut)


def test_a_state_of_another_mask_is_refused() -> None:
    shapes = {"weight": (4, 5), "bias": (4,)}
    one = mask_of({"weight": torch.arange(20).view(4, 5) < 7, "bias": torch.arange(4) < 2})
    other = mask_of({"weight": torch.arange(20).view(4, 5) >= 13, "bias": torch.arange(4) < 2})
    assert one.counts() == other.counts()

    def stepped(mask: Mask | None) -> SparseSGDM:
        parameters = draw(shapes=shapes)
        optimizer = SparseSGDM(parameters.items(), mask, lr=0.1, momentum=0.9)
        give(parameters, next(gradients(1, shapes)))
        optimizer.step()
        return optimizer

    for mask in (one, None, Mask.full(shapes)):
        with pytest.raises(InputError, match="belongs to another mask"):
            stepped(other).load_state_dict(stepped(mask).state_dict())
    stepped(other).load_state_dict(stepped(other).state_dict())
    stepped(None).load_state_dict(stepped(Mask.full(shapes)).state_dict())
    leaking = stepped(one)
    leaking.set_mask(other, "leak")  # its momentum lies at the weights of both masks
    with pytest.raises(InputError, match="belongs to another mask"):
        stepped(other).load_state_dict(leaking.state_dict())

    theirs = torch.optim.SGD(draw(shapes=shapes).values(), lr=0.1, momentum=0.9)
    stepped(None).load_state_dict(theirs.state_dict())
    with pytest.raises(InputError, match="belongs to another mask"):
        stepped(one).load_state_dict(theirs.state_dict())


def test_parameters_are_matched_by_name_or_by_order() -> None:
    mask, by_name, by_order = random_mask(0.3), draw(), draw()
    extra = nn.Parameter(torch.ones(3))
    reordered = [("unknown", extra), *reversed(by_name.items())]
    named, ordered = SparseSGDM(reordered, mask, lr=0.1), SparseSGDM(list(by_order.values()), mask, lr=0.1)
    gradient = next(gradients(1))
    give(by_name, gradient), give(by_order, gradient)
    extra.grad = torch.ones(3)
    named.step(), ordered.step()
    assert same(by_name, by_order) and torch.equal(extra, torch.ones(3))
    with pytest.raises(InputError, match="odd is 7 x 13 in it, and 7 x 12 here"):
        SparseSGDM([("odd", nn.Parameter(torch.ones(7, 12)))], mask, lr=0.1)
    with pytest.raises(InputError, match="single is a single number in it, and 7 x 13 here"):
        SparseSGDM([by_name["one"], by_name["odd"]], mask, lr=0.1)
    with pytest.raises(InputError, match="no odd here"):
        SparseSGDM([by_name["one"], by_name["single"]], mask, lr=0.1)
    with pytest.raises(InputError, match="no parameter 6 in it"):
        SparseSGDM([*by_name.values(), extra], mask, lr=0.1)
    with pytest.raises(InputError, match="nor any other"):
        SparseSGDM([("model.odd", by_name["odd"])], mask, lr=0.1)


def test_groups_have_settings_of_their_own() -> None:
    ours, theirs = draw(), draw()

    def groups(of: Parameters) -> list[dict[str, Any]]:
        return [{"params": [of["odd"], of["wide"]], "lr": 0.5}, {"params": [of["vector"]], "momentum": 0.0}]

    optimizer, reference = SparseSGDM(groups(ours), lr=0.1, momentum=0.9), torch.optim.SGD(groups(theirs), 0.1, 0.9)
    for gradient in gradients(3):
        give(ours, gradient), give(theirs, gradient)
        optimizer.step(), reference.step()
    assert same(ours, theirs)


def test_a_sparse_gradient_of_rows_is_taken_as_the_dense_one() -> None:
    shapes = {"weight": (9, 5)}
    mask, options = row_mask(shapes), {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "clip_norm": 0.5}
    for other in (mask, random_mask(0.4, 0, shapes), Mask.full(shapes)):  # the last two: rows are not what it wants
        sparse, dense = draw(shapes=shapes), draw(shapes=shapes)
        ours, theirs = SparseSGDM(sparse.items(), other, **options), SparseSGDM(dense.items(), other, **options)
        for gradient in gradients(4, shapes):
            rows = torch.tensor([0, 3, 6])
            values = gradient["weight"][rows]
            only_rows = torch.sparse_coo_tensor(rows[None], values, (9, 5), is_coalesced=True, check_invariants=False)
            sparse["weight"].grad, dense["weight"].grad = only_rows, only_rows.to_dense()
            ours.step(), theirs.step()
            assert torch.equal(sparse["weight"].grad.values(), gradient["weight"][rows])  # type: ignore[union-attr]
        assert same(sparse, dense)


def test_missing_gradients_and_closures() -> None:
    ours = draw()
    optimizer = SparseSGDM(ours.items(), random_mask(0.5), lr=0.1, momentum=0.9, clip_norm=1.0)
    optimizer.step()
    assert same(ours, draw()) and not optimizer.export_momentum()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (ours["wide"] ** 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == (draw()["wide"] ** 2).sum()
    assert not torch.equal(ours["wide"], draw()["wide"]) and torch.equal(ours["odd"], draw()["odd"])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_forgotten_as_by_sgd(set_to_none: bool) -> None:
    ours, theirs = draw(), draw()
    for parameters in (ours, theirs):
        give(parameters, next(gradients(1)))
        parameters["odd"].grad = None
    SparseSGDM(ours.items(), random_mask(0.5), lr=0.1).zero_grad(set_to_none)
    torch.optim.SGD(theirs.values(), lr=0.1).zero_grad(set_to_none)
    for name, parameter in theirs.items():
        ours_left = ours[name].grad
        assert (ours_left is None) == (parameter.grad is None)
        assert ours_left is None or not ours_left.any()


def test_descend_is_step_without_hooks() -> None:
    one, other, called = draw(), draw(), []
    stepping, descending = (SparseSGDM(own.items(), mixed_mask(), lr=0.1, momentum=0.9) for own in (one, other))
    for optimizer in (stepping, descending):
        optimizer.register_step_post_hook(lambda which, *_: called.append(which))
    for gradient in gradients(3):
        give(one, gradient)
        give(other, gradient)
        stepping.step()
        descending.descend()
    assert same(one, other) and not same(one, draw()) and called == [stepping] * 3


def test_training_does_not_wait_for_torch_to_import_its_compiler() -> None:
    """Which takes as long as to import torch itself."""
    code = """
        import sys, torch
        from fedsieve import SparseSGDM
        layer = torch.nn.Linear(3, 2)
        optimizer = SparseSGDM(layer.named_parameters(), lr=0.1, clip_norm=1.0)
        for _ in range(2):
            optimizer.zero_grad()
            layer(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        sys.exit("torch._dynamo" in sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"lr": 1.0, "momentum": -1.0}, {"lr": 1.0, "nesterov": True}])
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"negative|nesterov"):
        SparseSGDM(draw().items(), **wrong)


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="clip"):
        SparseSGDM(draw().items(), lr=0.1, clip=1.0)  # type: ignore[call-arg]


def test_parameters_in_another_memory_order_are_refused() -> None:
    layer = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    mask = Mask.full(shapes_of(layer.named_parameters()))
    with pytest.raises(ValueError, match="contiguous"):
        SparseSGDM(layer.named_parameters(), mask, lr=0.1)
