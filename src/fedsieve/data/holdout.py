"""Setting samples aside so that each class keeps its share."""

import numpy as np


def stratified(labels: np.ndarray, held: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Sorted positions of (the rest, `held` samples), each class in proportion (largest remainder)."""
    classes, sizes = np.unique(labels, return_counts=True)
    exact = sizes * held / max(1, len(labels))
    counts = np.floor(exact).astype(int)
    for index in np.argsort(counts - exact, kind="stable")[: held - counts.sum()]:
        counts[index] += 1
    chosen = [generator.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(classes, counts, strict=True)]
    mask = np.zeros(len(labels), dtype=bool)
    if chosen:
        mask[np.concatenate(chosen)] = True
    return np.flatnonzero(~mask), np.flatnonzero(mask)
