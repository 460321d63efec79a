"""Secure aggregation: the server learns the sum of a round's updates, and nothing else about any of them.

Pairwise masking after Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS
2017, for a server that follows the protocol but is curious, and clients that all stay to the end of the round. Each
pair of clients i < j agrees on a stream of pseudo-random numbers s_ij; client i sends, modulo 2^64,

    y_i = x_i + sum_{j > i} s_ij - sum_{j < i} s_ji,    so that    sum_i y_i = sum_i x_i.

One message alone, or the sum of any but all of them, cannot be told from uniform noise without the clients' keys.
These come from the operating system's randomness and never from an experiment's seed: whoever knows the seed must not
know the noise. What is random here cancels exactly, so results stay reproducible.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

PIECE = 1 << 16  # entries of a stream made at a time: half a megabyte stays in the processor's cache


class SecureError(Exception):
    """Someone departed from the protocol; going on would reveal an update or give a wrong sum."""


class FixedPointError(OverflowError):
    """A value is too large for fixed point, or not finite."""


@dataclass(frozen=True)
class Roster:
    """A round's clients and their public keys, as the server relays them; `context` names the phase and round."""

    context: str
    keys: Mapping[int, bytes]

    @property
    def digest(self) -> int:
        """SHA-256 of all of it, cut to 53 bits, so that it can travel as a float64."""
        content = json.dumps([self.context, [(client, self.keys[client].hex()) for client in sorted(self.keys)]])
        return int.from_bytes(hashlib.sha256(content.encode()).digest()) >> (256 - 53)


class Participant:
    """One client's side of one round; its private key serves once and is then forgotten."""

    def __init__(self, client: int, private_key: bytes | None = None) -> None:
        """With a new key, or with one that was made where the client was told to take part."""
        self.client = client
        own = X25519PrivateKey.generate() if private_key is None else X25519PrivateKey.from_private_bytes(private_key)
        self._private: X25519PrivateKey | None = own
        self.public_key = self._private.public_key().public_bytes_raw()

    def private_key(self) -> bytes:
        """For a simulation, in which another process does what this client does."""
        assert self._private is not None
        return self._private.private_bytes_raw()

    def masked(self, values: Tensor, roster: Roster) -> Tensor:
        """values + sum_{j > i} s_ij - sum_{j < i} s_ji modulo 2^64, for i this client and j the others of the roster.

        Values and result are int64 vectors. A refused roster leaves the private key unused.
        """
        if values.dtype != torch.int64 or values.dim() != 1:
            raise SecureError(f"what is sent must be a vector of int64, not {values.dtype} of {tuple(values.shape)}")
        self._check(roster)
        streams = [
            (np.add if peer > self.client else np.subtract, stream(self.stream_key(peer, roster)))
            for peer in roster.keys
            if peer != self.client
        ]
        self._private = None
        message = values.cpu().numpy().view(np.uint64).copy()  # unsigned: its wrap-around is defined
        zeros, noise = memoryview(bytes(8 * PIECE)), bytearray(8 * PIECE + 15)  # 15: what update_into asks for
        for start in range(0, len(message), PIECE):
            piece = message[start : start + PIECE]
            for add_or_subtract, source in streams:
                source.update_into(zeros[: piece.nbytes], noise)
                add_or_subtract(piece, np.frombuffer(noise, "<u8", len(piece)), out=piece)
        return torch.from_numpy(message.view(np.int64))

    def stream_key(self, peer: int, roster: Roster) -> bytes:
        """The 32 bytes that only this client and `peer` know: HKDF-SHA256 of their X25519 shared secret.

        Its info is the context and both public keys, the lower client's first: the same on both sides, and
        different for every pair, round and phase.
        """
        if self._private is None:
            raise SecureError(f"client {self.client}: this round's key was used already; each round needs a new one")
        try:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(roster.keys[peer]))
        except ValueError:  # not 32 bytes, or a point whose shared secret is known to everyone
            raise SecureError(f"client {self.client}: the public key of client {peer} is not valid") from None
        first, second = sorted((self.client, peer))
        info = roster.context.encode() + roster.keys[first] + roster.keys[second]
        return HKDF(SHA256(), length=32, salt=None, info=info).derive(secret)

    def _check(self, roster: Roster) -> None:
        if roster.keys.get(self.client) != self.public_key:
            raise SecureError(f"client {self.client}: the roster lacks it, or has another key for it")
        if len(roster.keys) < 2:
            raise SecureError(f"client {self.client} is alone in the roster: the sum would be its own update")
        if len(set(roster.keys.values())) < len(roster.keys):  # equal streams can cancel within one message
            raise SecureError(f"client {self.client}: two clients of the roster have the same key")


def stream(key: bytes) -> CipherContext:
    """AES-256 in counter mode from 0: encrypting zeros gives the stream. A key that is used once needs no nonce."""
    return Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()


class ZeroSum:
    """The server's side of one round: `add` each client's message as it arrives, then `finish` gives the exact sum."""

    def __init__(self, roster: Roster, size: int) -> None:
        self.digest = roster.digest
        self.missing = set(roster.keys)
        self.added: set[int] = set()
        self.sum = np.zeros(size, np.uint64)

    def add(self, client: int, roster_digest: int, masked: Tensor) -> None:
        if client not in self.missing:
            why = "has sent its message already" if client in self.added else "is not in this round's roster"
            raise SecureError(f"client {client} {why}")
        if roster_digest != self.digest:
            raise SecureError(f"client {client} used another roster: the noise would not cancel")
        if masked.dtype != torch.int64 or masked.shape != self.sum.shape:
            found = f"{masked.dtype} of {tuple(masked.shape)}"
            raise SecureError(f"client {client} sent {found} instead of int64 of {self.sum.shape}")
        self.sum += masked.cpu().numpy().view(np.uint64)
        self.missing.remove(client)
        self.added.add(client)

    def finish(self) -> Tensor:
        """sum_i y_i = sum_i x_i modulo 2^64, as int64."""
        if self.missing:
            names = ", ".join(map(str, sorted(self.missing)))
            raise SecureError(f"no message from client {names}: without all of the round's, the sum is noise")
        return torch.from_numpy(self.sum.view(np.int64))


def to_fixed_point(values: Tensor, bits: int, clients: int) -> Tensor:
    """round(values * 2^bits) as int64; refused unless a sum over `clients` such vectors fits into int64 as well."""
    scaled = (values.double() * 2.0**bits).round_()
    largest = max(-float(scaled.min()), float(scaled.max())) if len(scaled) else 0.0
    limit = (2**63 - 1) // clients  # an int: Python compares it exactly, as float64 it would round up to 2^63
    if not largest <= limit:  # also when it is not a number
        raise FixedPointError(
            f"a value of size {largest / 2.0**bits:.6g} exceeds the {limit / 2.0**bits:.6g} that fixed point with "
            f"{bits} fractional bits leaves to each of {clients} clients"
        )
    return scaled.long()


def from_fixed_point(total: Tensor, bits: int) -> Tensor:
    """total / 2^bits, as float64."""
    return total.double().mul_(2.0**-bits)
