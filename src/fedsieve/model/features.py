"""A frozen backbone is never computed twice: its features are kept in the cache on disk."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from fedsieve.cache import cached_array
from fedsieve.data.load import Samples
from fedsieve.data.transform import Transform
from fedsieve.model.backbone import describe
from fedsieve.model.classifier import Classifier

VERSION = 1  # to be raised when transforms or networks compute something else from the same settings
BATCH = 250  # fixed, so that the same image has the same feature to the last bit
BATCHES_PER_BLOCK = 4


def backbone_fingerprint(model: Classifier) -> str:
    """A hash of the backbone's shape and weights."""
    digest = hashlib.sha256(json.dumps(describe(model.backbone), sort_keys=True, default=str).encode())
    for name, tensor in model.backbone.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy())
    return digest.hexdigest()


@torch.no_grad()
def features(
    model: Classifier,
    samples: Samples,
    transform: Transform,
    device: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """The features (N, width) of all samples in their evaluation view."""

    def compute(first: int) -> Iterator[np.ndarray]:
        model.eval()
        for start in range(first, len(samples), BATCH * BATCHES_PER_BLOCK):
            block = samples.images[start : start + BATCH * BATCHES_PER_BLOCK].split(BATCH)
            parts = [model.backbone(transform.evaluation(images.to(device))).float().cpu() for images in block]
            progress(min(len(samples), start + BATCH * BATCHES_PER_BLOCK), len(samples))
            yield torch.cat(parts).numpy()

    key = {
        "version": VERSION,
        "backbone": backbone_fingerprint(model),
        "data": samples.fingerprint,
        "transform": transform.key,
        "torch": [torch.__version__, device, torch.get_num_threads()],  # the last bits depend on them
    }
    array = cached_array(key, len(samples), model.backbone.width, compute)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mapped file is read-only, which is as it should be
        return torch.from_numpy(array).to(device)
