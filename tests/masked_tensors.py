"""Parameters of many shapes, gradients for them, and masks of every kind, for tests of optimizers."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fedsieve.sieve.mask import Mask

SHAPES = {"one": (1,), "single": (), "odd": (7, 13), "vector": (67,), "patches": (5, 3, 4, 4), "wide": (33, 129)}
Parameters = dict[str, nn.Parameter]


def draw(seed: int = 0, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Parameters:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def gradients(steps: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def give(parameters: Parameters, gradient: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.grad = gradient[name].clone()


def mask_of(active: dict[str, Tensor]) -> Mask:
    shapes = {name: tuple(one.shape) for name, one in active.items()}
    return Mask.pack(shapes, torch.cat([one.flatten() for one in active.values()]))


def random_mask(density: float, seed: int = 2, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Mask:
    generator = torch.Generator().manual_seed(seed)
    return mask_of({name: torch.rand(shape, generator=generator) < density for name, shape in shapes.items()})


def row_mask(shapes: dict[str, tuple[int, ...]] = SHAPES) -> Mask:
    """Every third row of tensors that have rows, nothing of the others."""
    active = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes.items()}
    for one in active.values():
        if one.ndim > 1:
            one[::3] = True
    return mask_of(active)


def mixed_mask() -> Mask:
    """All kinds of selections side by side."""
    sparse, dense, rows = random_mask(0.2), random_mask(0.9), row_mask()
    kinds = {"one": sparse, "single": Mask.full(SHAPES), "odd": rows, "vector": dense, "patches": sparse, "wide": dense}
    return mask_of({name: kinds[name][name] for name in SHAPES})


MASKS: dict[str, Callable[[], Mask]] = {
    "single weights": lambda: random_mask(0.15),
    "mostly active": lambda: random_mask(0.85),
    "rows": row_mask,
    "mixed": mixed_mask,
    "empty": lambda: Mask.empty(SHAPES),
}


def same(one: Parameters, other: Parameters) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


REDRAWN = {
    "single weights": lambda: [random_mask(0.2, seed) for seed in range(4)],
    "mostly active": lambda: [random_mask(0.9, seed) for seed in range(4)],
    "rows and others": lambda: [row_mask(), random_mask(0.2), Mask.empty(SHAPES), row_mask(), Mask.full(SHAPES)],
    "union grows to most": lambda: [random_mask(0.6, 0), random_mask(0.6, 1), random_mask(0.02, 2), mixed_mask()],
}
