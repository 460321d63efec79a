"""Certificates and keys of a federation over Flower.

The server has a certificate authority of its own, so that nodes accept no other server. Each node has a key pair like
those of ssh; the public half is registered at the server.
"""

import datetime
import hashlib
import ipaddress
import os
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import NameOID

from fedsieve.errors import InputError

CURVE = ec.SECP384R1()  # of Flower's keys
VALID = datetime.timedelta(days=3650)
EARLIER = datetime.timedelta(days=1)  # clocks differ


def write_new(path: Path, content: bytes, is_private: bool = False) -> None:
    """Write a file that must not be there yet; a private one can be read by its owner only."""
    try:
        with os.fdopen(
            os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if is_private else 0o644), "wb"
        ) as file:
            file.write(content)
    except FileExistsError:
        raise InputError(f"{path} is there already; use another name, or delete it") from None
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror})") from None


# The server's.


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """An authority (ca.crt, ca.key), and a certificate for the names and addresses of the server (server.crt, .key)."""
    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedsieve federation")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedsieve server")])
    names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    signing = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    ca = (
        _certificate(issuer, issuer, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signing, critical=True)
        .sign(authority, hashes.SHA256())
    )
    certificate = (
        _certificate(issuer, subject, own.public_key())
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),  # Python 3.13 asks for it
            critical=False,
        )
        .sign(authority, hashes.SHA256())
    )
    for name, key in (("ca.key", authority), ("server.key", own)):
        write_new(folder / name, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), is_private=True)
    for name, one in (("ca.crt", ca), ("server.crt", certificate)):
        write_new(folder / name, one.public_bytes(Encoding.PEM))


def _certificate(issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _alternative(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    with suppress(ValueError):
        if host.strip():
            return x509.DNSName(host)
    raise InputError(f"--host '{host}' is neither a name nor an address; use one such as fl.example.org")


# Nodes'.


def make_key(path: Path) -> Path:
    """A node's private key at `path`, and its public one beside it, with the ending .pub."""
    key = ec.generate_private_key(CURVE)
    public = path.with_name(f"{path.name}.pub")
    if public.exists():
        raise InputError(f"{public} is there already; use another name, or delete it")
    write_new(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), is_private=True)
    write_new(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return public


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise InputError(f"--key {path} cannot be read ({error.strerror}); make one: fedsieve relay key NAME") from None
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(
            f"--key {path} is no private key ({_first(error)}); make one: fedsieve relay key NAME"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"--key {path} is a key of another kind; make one: fedsieve relay key NAME")
    return key


def read_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    try:
        key = load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); give a node's public key, NAME.pub") from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path} is no public key ({_first(error)}); give a node's public key, NAME.pub") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != CURVE.name:
        raise InputError(f"{path} is a key of another kind; give one of `fedsieve relay key`")
    return key


def public_bytes(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key as Flower has it."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """A short text by which people compare keys, as `ssh-keygen -l` prints it."""
    _, blob, *_ = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()
    return f"SHA256:{b64encode(hashlib.sha256(b64decode(blob)).digest()).decode().rstrip('=')}"


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:80]
