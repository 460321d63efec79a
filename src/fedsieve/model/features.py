"""What does not change is never computed twice: outputs of a frozen backbone, or of its first blocks, are cached.

*Depth* is how much of the network stands still, counted from the images: 0 is nothing, k the first k blocks of a
ViT (with the patches and tokens before them), and one more than there are blocks is the whole backbone, whose
output are the features.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from xxhash import xxh3_128

from fedsieve.data.load import Samples
from fedsieve.data.transform import Transform
from fedsieve.files.cache import cached_array, size_limit, too_large
from fedsieve.model.backbone import describe
from fedsieve.model.classifier import Classifier, Tail
from fedsieve.model.given_module import GivenBackbone
from fedsieve.model.precision import Precision, forward
from fedsieve.model.vit import ViT

VERSION = 4  # to be raised when transforms or networks compute something else from the same settings
BLOCK = 1000  # rows that are written at a time


def feature_depth(model: Classifier) -> int:
    """The depth at which only the head is left."""
    return 1 + len(getattr(model.backbone, "blocks", ()))


def images_at_once(device: str) -> int:
    """How many images a network is given at a time where none are trained on.

    On a CPU few enough for its caches to hold what is computed of them, on a GPU enough to keep it busy. Always the
    same, so that the same images have the same outputs to the last bit.
    """
    return 100 if device == "cpu" else 500


def frozen_depth(model: Classifier, active: Iterable[str]) -> int:
    """How much stands still when the tensors with these names may change."""
    if not isinstance(model.backbone, ViT):
        return 0 if any(name.startswith("backbone.") for name in active) else feature_depth(model)
    return min((_depth_of(name, len(model.backbone.blocks)) for name in active), default=feature_depth(model))


def _depth_of(name: str, blocks: int) -> int:
    """How many blocks are computed before the tensor takes part."""
    part, _, rest = name.removeprefix("backbone.").partition(".")
    if name.startswith("head."):
        return blocks + 1
    if part == "blocks":
        return int(rest.split(".")[0])
    return blocks if part == "norm" else 0


def network_behind(model: Classifier, depth: int) -> nn.Module:
    """The network that is left to compute behind the frozen part."""
    if depth == 0:
        return model
    return model.head if depth == feature_depth(model) else Tail(model, depth)


def frozen_part(model: Classifier, depth: int) -> Callable[[Tensor], Tensor]:
    """Images to what `network_behind` takes, one vector per image."""
    if depth == feature_depth(model):
        return model.backbone
    assert isinstance(model.backbone, ViT)
    backbone = model.backbone
    return lambda images: backbone.first_blocks(images, depth).flatten(1)


def _row_width(model: Classifier, depth: int) -> int:
    if not isinstance(model.backbone, ViT) or depth >= len(model.backbone.blocks):
        return model.backbone.width
    shape = model.backbone.shape
    return (shape.positions + shape.registers) * shape.width


def too_large_to_keep(model: Classifier, depth: int, samples: int) -> str | None:
    """Why so many outputs would not leave room in the cache; features always do, tokens of large images may not."""
    needed = 4 * _row_width(model, depth) * samples
    return too_large(needed, 2 * needed) if depth < feature_depth(model) and 2 * needed > size_limit() else None


def frozen_fingerprint(model: Classifier, depth: int) -> str:
    """A hash of the backbone's shape and of its weights up to this depth."""
    digest = xxh3_128(json.dumps(describe(model.backbone), sort_keys=True, default=str).encode())
    blocks = feature_depth(model) - 1
    for name, tensor in model.backbone.state_dict().items():
        if depth > blocks or _depth_of(name, blocks) < depth:
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy())
    if isinstance(model.backbone, GivenBackbone):  # its code is not ours, and weights do not tell what it computes
        digest.update(model.backbone.probe())
    return digest.hexdigest()


@torch.no_grad()
def batch_outputs(model: Classifier, depth: int, images: Tensor, precision: Precision = "float32") -> Tensor:
    """The output at `depth` for `images_at_once` images or, at the end, fewer; one row each."""
    model.eval()
    return forward(frozen_part(model, depth), images, precision).float().cpu().contiguous()


def frozen_outputs(
    model: Classifier,
    depth: int,
    fingerprint: str,
    samples: Samples,
    positions: np.ndarray | None,
    transform: Transform,
    device: str,
    compute: Callable[[Iterable[int]], Iterator[np.ndarray]],
    precision: Precision = "float32",
    is_compiled: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> Tensor:
    """The output at `depth` for the samples at `positions` (None: all) in their evaluation view, one row each.

    They are taken from the cache, or from `compute`, which gives the rows of the batches that begin at some numbers;
    `note` hears why they could not be kept.
    """
    count, columns = len(samples) if positions is None else len(positions), _row_width(model, depth)
    if not count:
        return torch.empty(0, columns)

    def blocks(first: int) -> Iterator[np.ndarray]:
        block: list[np.ndarray] = []
        starts = range(first, count, images_at_once(device))
        for start, rows in zip(starts, compute(starts), strict=True):
            block.append(rows.reshape(-1, columns).copy())
            done = start + len(block[-1])
            progress(done, count)
            if done % BLOCK == 0 or done == count:
                yield np.concatenate(block)
                block.clear()

    key = {
        "version": VERSION,
        "backbone": fingerprint,
        "data": samples.fingerprint,
        "transform": transform.key,
        "torch": [torch.__version__, device, torch.get_num_threads()],  # the last bits depend on them
    }
    if precision != "float32":
        key["precision"] = precision
    if is_compiled:
        key["compile"] = True
    if depth < feature_depth(model):
        key["depth"] = depth
    if positions is not None:
        key["positions"] = xxh3_128(positions.astype(np.int64).tobytes()).hexdigest()
    array = cached_array(key, count, columns, blocks, note)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mapped file is read-only, which is as it should be
        return torch.from_numpy(array)
