"""SparseAdamW against torch.optim.AdamW, with masks by hand."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsieve.errors import InputError
from fedsieve.sieve.adamw import SparseAdamW
from fedsieve.sieve.mask import Mask
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
    {"lr": 1e-3},
    {"lr": 0.01, "weight_decay": 0.0},
    {"lr": 0.03, "weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-4},
    {"lr": 0.1, "betas": (0.0, 0.9)},
    {"lr": 0.1, "betas": (0.9, 0.0)},
]


def torch_adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, foreach=False, **options)


def schedule(step: int, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5 if step % 3 == 2 else 1.1


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("clip_norm", [None, 3.0])
@pytest.mark.parametrize("full", [True, False])
def test_with_a_full_mask_it_is_adamw_to_the_last_bit(
    options: dict[str, Any], clip_norm: float | None, full: bool
) -> None:
    """With a learning rate that changes, and a tensor that some steps leave out."""
    ours, theirs = draw(), draw()
    optimizer = SparseAdamW(ours.items(), Mask.full(SHAPES) if full else None, clip_norm=clip_norm, **options)
    reference = torch_adamw(theirs.values(), **options)
    for number, gradient in enumerate(gradients(12)):
        give(ours, gradient), give(theirs, gradient)
        if number % 4 == 0:
            ours["odd"].grad = theirs["odd"].grad = None
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(theirs.values(), clip_norm)
        optimizer.step(), reference.step()
        schedule(number, optimizer, reference)
        assert same(ours, theirs)
    assert not same(ours, draw())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", MASKS)
def test_active_weights_are_those_of_dense_masked_adamw(options: dict[str, Any], kind: str) -> None:
    mask, ours, theirs, before = MASKS[kind](), draw(), draw(), draw()
    optimizer, reference = SparseAdamW(ours.items(), mask, **options), torch_adamw(theirs.values(), **options)
    for number, gradient in enumerate(gradients(8)):
        give(ours, gradient)
        give(theirs, {name: one * mask[name] for name, one in gradient.items()})
        optimizer.step(), reference.step()
        schedule(number, optimizer, reference)
        for name, one in theirs.items():
            one.data = torch.where(mask[name], one.data, before[name])
    assert same(ours, theirs)
    for name in SHAPES:
        assert torch.equal(ours[name].view(torch.int32)[~mask[name]], before[name].view(torch.int32)[~mask[name]])
    state = optimizer.export_momentum()
    assert bool(state) == bool(mask.active)
    if state:
        assert torch.equal(state["mask"], mask.bits) and state["step"].tolist() == [8]
        for moment in ("exp_avg", "exp_avg_sq"):
            kept = [reference.state[theirs[name]][moment][mask[name]] for name in SHAPES]
            assert torch.equal(state[moment], torch.cat(kept))


@given(st.floats(0, 1), st.integers(0, 10_000), st.integers(1, 70), st.integers(1, 9), st.floats(0, 0.999))
def test_any_density_and_size(density: float, seed: int, rows: int, columns: int, beta: float) -> None:
    shapes = {"weight": (rows, columns)}
    mask, ours, theirs = random_mask(density, seed, shapes), draw(seed, shapes), draw(seed, shapes)
    options: dict[str, Any] = {"lr": 0.1, "betas": (beta, 0.99), "weight_decay": 0.01}
    optimizer, reference = SparseAdamW(ours.values(), mask, **options), torch_adamw(theirs.values(), **options)
    for gradient in gradients(3, shapes):
        give(ours, gradient), give(theirs, gradient)
        optimizer.step(), reference.step()
    active = mask["weight"]
    assert torch.equal(ours["weight"][active], theirs["weight"][active])
    assert torch.equal(ours["weight"][~active], draw(seed, shapes)["weight"][~active])


def test_frozen_weights_survive_a_gradient_that_is_not_a_number() -> None:
    for kind in MASKS:
        mask, ours = MASKS[kind](), draw()
        optimizer = SparseAdamW(ours.items(), mask, lr=0.1, clip_norm=1.0)
        for gradient in gradients(2):
            give(ours, {name: torch.full_like(one, torch.nan) for name, one in gradient.items()})
            optimizer.step()
        for name, before in draw().items():
            assert torch.equal(ours[name][~mask[name]], before[~mask[name]])


@pytest.mark.parametrize("kind", [*MASKS, "full"])
def test_gradients_are_rescaled_penalized_clipped_and_corrected_in_this_order(kind: str) -> None:
    mask = Mask.full(SHAPES) if kind == "full" else MASKS[kind]()
    anchor, shift = ({name: one.detach() for name, one in draw(seed).items()} for seed in (5, 6))
    ours, theirs, before = draw(), draw(), draw()
    optimizer = SparseAdamW(
        ours.items(),
        mask,
        lr=0.01,
        clip_norm=2.0,
        rescale=True,
        penalty=lambda name, own, select: 0.3 * (own - select(anchor[name])),
        correction=lambda name, select: select(shift[name]),
    )
    reference = torch_adamw(theirs.values(), lr=0.01)
    for gradient in gradients(8):
        give(ours, gradient)
        for name, one in theirs.items():
            whole = gradient[name] / max(mask.density, 1e-9) + 0.3 * (one.detach() - anchor[name])
            one.grad = whole * mask[name]
        nn.utils.clip_grad_norm_(theirs.values(), 2.0)
        for name, one in theirs.items():
            one.grad += shift[name] * mask[name]
        optimizer.step(), reference.step()
        for name, one in theirs.items():
            one.data = torch.where(mask[name], one.data, before[name])
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


def naive(masks: list[Mask], policy: str, lr: float, decay: float) -> dict[str, Tensor]:
    """Five steps with each mask, dense in float64; each weight counts the steps since it became active."""
    weights = {name: one.detach().double() for name, one in draw().items()}
    m, v, t = ({name: torch.zeros_like(one) for name, one in weights.items()} for _ in range(3))
    stream = gradients(5 * len(masks))
    for mask in masks:
        for one in (m, v, t):
            for name in SHAPES:
                one[name] *= mask[name] if policy == "carry" else 0
        for _ in range(5):
            for name, gradient in next(stream).items():
                g, active = gradient.double(), mask[name]
                t[name] += active
                m[name] = (0.9 * m[name] + 0.1 * g) * active
                v[name] = (0.99 * v[name] + 0.01 * g**2) * active
                mean = m[name] / (1 - 0.9 ** t[name].clamp(min=1))
                root = (v[name] / (1 - 0.99 ** t[name].clamp(min=1))).sqrt() + 1e-8
                weights[name] -= active * lr * (decay * weights[name] + mean / root)
    return weights


@pytest.mark.parametrize("kind", REDRAWN)
@pytest.mark.parametrize("policy", ["reset", "carry"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_redrawn_mask(kind: str, policy: Any, cut: bool) -> None:
    """`cut`: a new optimizer for each mask, with the moments handed over as a file would."""
    masks, ours = REDRAWN[kind](), draw()
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    stream, optimizer = gradients(5 * len(masks)), SparseAdamW(ours.items(), masks[0], **options)
    for number, mask in enumerate(masks):
        if number and cut:
            state = {name: one.clone() for name, one in optimizer.export_momentum().items()}
            optimizer = SparseAdamW(ours.items(), mask, **options)
            optimizer.import_momentum(state, policy)
        elif number:
            optimizer.set_mask(mask, policy)
        for _ in range(5):
            give(ours, next(stream))
            optimizer.step()
    for name, expected in naive(masks, policy, 0.01, 0.1).items():
        torch.testing.assert_close(ours[name].double(), expected, rtol=2e-5, atol=1e-6)


def test_newly_active_weights_take_the_steps_of_an_adamw_that_starts_with_them() -> None:
    """And those that stay active take the steps of one that began with them."""
    first, second, ours = random_mask(0.5, 0), random_mask(0.5, 1), draw()
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.01}
    optimizer = SparseAdamW(ours.items(), first, **options)
    old, new = draw(), draw()
    from_the_start, late = torch_adamw(old.values(), **options), torch_adamw(new.values(), **options)
    for number, gradient in enumerate(gradients(30)):
        if number == 20:
            optimizer.set_mask(second, "carry")
        give(ours, gradient), give(old, gradient), give(new, gradient)
        optimizer.step(), from_the_start.step()
        if number >= 20:
            late.step()
    for name in SHAPES:
        stays, begins = first[name] & second[name], second[name] & ~first[name]
        torch.testing.assert_close(ours[name][stays], old[name][stays], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours[name][begins], new[name][begins], rtol=1e-5, atol=1e-6)


def test_steps_are_counted_for_each_weight_only_where_they_differ() -> None:
    ours, one, other = draw(), random_mask(0.3, 0), random_mask(0.3, 1)
    optimizer = SparseAdamW(ours.items(), one, lr=0.01)

    def step() -> dict[str, Tensor]:
        give(ours, next(gradients(1)))
        optimizer.step()
        return optimizer.export_momentum()

    assert step()["step"].tolist() == [1]
    optimizer.set_mask(one, "carry")
    kept = step()
    assert kept["step"].tolist() == [2]
    optimizer.set_mask(other, "carry")
    after = step()
    assert kept["step"].tolist() == [2]  # an exported state does not change with later steps
    positions = torch.cat([(one[name][other[name]]).flatten() for name in SHAPES])
    assert torch.equal(after["step"], torch.where(positions, 3.0, 1.0))
    optimizer.set_mask(one, "reset")
    assert step()["step"].tolist() == [1]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("way", ["export", "state_dict", "same mask"])
def test_a_run_cut_in_two_is_the_uncut_one(options: dict[str, Any], way: str) -> None:
    for mask in (None, mixed_mask()):
        whole, cut = draw(), draw()
        uncut, optimizer = SparseAdamW(whole.items(), mask, **options), SparseAdamW(cut.items(), mask, **options)
        assert optimizer.export_momentum() == {}
        for number, gradient in enumerate(gradients(8)):
            if number == 4:
                old = optimizer
                if way == "same mask":
                    optimizer.set_mask(mask, "carry")
                else:
                    optimizer = SparseAdamW(cut.items(), mask, **options)
                if way == "export":
                    optimizer.import_momentum(old.export_momentum(), "carry")
                elif way == "state_dict":
                    optimizer.load_state_dict(old.state_dict())
            give(whole, gradient), give(cut, gradient)
            uncut.step(), optimizer.step()
        assert same(whole, cut)


def test_a_state_is_laid_out_by_its_mask() -> None:
    mask, parameters = mixed_mask(), draw()
    theirs = torch_adamw((reference := draw()).values(), lr=0.01)
    give(reference, next(gradients(1)))
    theirs.step()
    with pytest.raises(InputError, match="belongs to another mask"):
        SparseAdamW(parameters.items(), mask, lr=0.01).load_state_dict(theirs.state_dict())
    ours = SparseAdamW(reference.items(), lr=0.5)
    ours.load_state_dict(deepcopy(theirs.state_dict()))  # goes on where torch's left off
    copy = {name: nn.Parameter(one.detach().clone()) for name, one in reference.items()}
    goes_on = torch_adamw(copy.values(), lr=0.5)
    goes_on.load_state_dict(theirs.state_dict())
    for gradient in gradients(2):
        give(reference, gradient), give(copy, gradient)
        ours.step(), goes_on.step()
    assert same(reference, copy)


def test_leak_is_for_sgd() -> None:
    optimizer = SparseAdamW(draw().items(), lr=0.01)
    with pytest.raises(ValueError, match="one of reset, carry, not leak"):
        optimizer.set_mask(random_mask(0.5), "leak")
    with pytest.raises(ValueError, match="one of reset, carry, not leak"):
        optimizer.import_momentum({}, "leak")


def test_a_sparse_gradient_of_rows_is_taken_as_the_dense_one() -> None:
    shapes = {"weight": (9, 5)}
    for mask in (row_mask(shapes), random_mask(0.4, 0, shapes), Mask.full(shapes)):
        sparse, dense = draw(shapes=shapes), draw(shapes=shapes)
        ours, theirs = (SparseAdamW(own.items(), mask, lr=0.01, clip_norm=0.5) for own in (sparse, dense))
        for gradient in gradients(4, shapes):
            rows = torch.tensor([0, 3, 6])
            values = gradient["weight"][rows]
            only_rows = torch.sparse_coo_tensor(rows[None], values, (9, 5), is_coalesced=True, check_invariants=False)
            sparse["weight"].grad, dense["weight"].grad = only_rows, only_rows.to_dense()
            ours.step(), theirs.step()
            assert torch.equal(only_rows.values(), gradient["weight"][rows])
        assert same(sparse, dense)


@pytest.mark.parametrize("structure", ["weights", "rows"])
def test_memory_at_ninety_percent_sparsity(structure: str) -> None:
    """Of 8 bytes for each weight: moments of a tenth, and for single weights their positions in 4 bytes."""
    shapes: dict[str, tuple[int, ...]] = {"first": (400, 300), "second": (300, 400)}
    active = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes.items()}
    active["first"][:40], active["second"][5:35] = True, True
    mask = mask_of(active) if structure == "rows" else random_mask(0.1, shapes=shapes)
    parameters = draw(shapes=shapes)
    optimizer = SparseAdamW(parameters.items(), mask, lr=0.1)
    give(parameters, next(gradients(1, shapes)))
    optimizer.step()
    held = [one for state in optimizer.state.values() for one in state.values()]
    held += [selection.index for selection in optimizer._selections.values() if selection is not None]
    taken = sum(one.untyped_storage().nbytes() for one in held)
    assert taken <= (0.11 if structure == "rows" else 0.155) * 8 * mask.size


def test_groups_have_settings_of_their_own() -> None:
    ours, theirs = draw(), draw()

    def groups(of: Parameters) -> list[dict[str, Any]]:
        return [{"params": [of["odd"], of["wide"]], "lr": 0.5}, {"params": [of["vector"]], "betas": (0.5, 0.6)}]

    optimizer, reference = SparseAdamW(groups(ours), lr=0.1), torch_adamw(groups(theirs), lr=0.1)
    for gradient in gradients(3):
        give(ours, gradient), give(theirs, gradient)
        optimizer.step(), reference.step()
    assert same(ours, theirs)


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"lr": 1.0, "betas": (1.0, 0.9)}, {"lr": 1.0, "eps": -1.0}])
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"negative|from 0 to below 1"):
        SparseAdamW(draw().items(), **wrong)
