"""Randomness is addressed, not consumed.

Each random choice has an address, such as `(seed, "batches", phase, round, client, epoch)`, and a
generator of its own seeded from it. So there is no generator state to save, a result does not
depend on the order in which clients run, and resuming is starting at a later round.
"""

import hashlib

import numpy as np
import torch

Address = int | str


def seed_at(seed: int, *address: Address) -> int:
    """A 63-bit seed that is a hash of the address; any change of any part gives an unrelated one."""
    digest = hashlib.blake2b(repr((seed, *address)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def torch_generator(seed: int, *address: Address) -> torch.Generator:
    return torch.Generator().manual_seed(seed_at(seed, *address))


def numpy_generator(seed: int, *address: Address) -> np.random.Generator:
    return np.random.default_rng(seed_at(seed, *address))


def seed_layers(seed: int, *address: Address) -> None:
    """Seed torch's global generators, from which layers such as dropout draw.

    Only those in use: `torch.manual_seed` also keeps a call for each device that may be there later, which takes
    longer than training a head.
    """
    torch.default_generator.manual_seed(seed_at(seed, *address))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed_at(seed, *address))
