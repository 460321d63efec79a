"""Certificates and keys: what TLS and Flower accept, and nobody else can read."""

import shutil
import socket
import ssl
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fedsieve.errors import InputError
from fedsieve.federation.keys import (
    fingerprint,
    make_certificates,
    make_key,
    public_bytes,
    read_private_key,
    read_public_key,
)


def shake_hands(folder: Path, authority: Path, name: str) -> str:
    """What a client that believes an authority gets from a server with the folder's certificate."""
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    there.load_cert_chain(folder / "server.crt", folder / "server.key")
    here = ssl.create_default_context(cafile=str(authority))
    here.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 does
    client, server = socket.socketpair()

    def serve() -> None:
        try:
            with there.wrap_socket(server, server_side=True) as connection:
                connection.sendall(b"hello")
        except OSError:
            server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with here.wrap_socket(client, server_hostname=name) as connection:
            return connection.recv(5).decode()
    finally:
        client.close()
        thread.join()


def test_a_server_is_known_by_its_names_and_authority_only(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        make_certificates(tmp_path / name, ["fl.example.org", "10.0.0.7", "::1"])
    one, other = tmp_path / "one", tmp_path / "other"
    for name in ("fl.example.org", "10.0.0.7", "::1"):
        assert shake_hands(one, one / "ca.crt", name) == "hello"
    for authority, name in ((one / "ca.crt", "example.org"), (one / "ca.crt", "10.0.0.8"), (other / "ca.crt", "::1")):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(one, authority, name)


def test_what_is_secret_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"])
    make_key(tmp_path / "hospital-3")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == {"ca.key", "server.key", "hospital-3"}


def test_a_key_and_its_public_half(tmp_path: Path) -> None:
    public = make_key(tmp_path / "hospital-3")
    assert public.name == "hospital-3.pub"
    expected = read_private_key(tmp_path / "hospital-3").public_key()
    assert public_bytes(read_public_key(public)) == public_bytes(expected)
    asymmetric = pytest.importorskip("flwr.supercore.primitives.asymmetric")
    assert asymmetric.public_key_to_bytes(expected) == public_bytes(expected)
    assert public_bytes(asymmetric.bytes_to_public_key(public_bytes(expected))) == public_bytes(expected)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_fingerprints_are_those_of_ssh(tmp_path: Path) -> None:
    public = make_key(tmp_path / "hospital-3")
    told = subprocess.run(["ssh-keygen", "-l", "-f", str(public)], capture_output=True, text=True, check=True).stdout
    assert fingerprint(read_public_key(public)) == told.split()[1]


def test_keys_that_are_there_are_not_replaced(tmp_path: Path) -> None:
    public = make_key(tmp_path / "one")
    before = public.read_bytes()
    with pytest.raises(InputError, match=r"one\.pub is there already"):
        make_key(tmp_path / "one")
    public.unlink()
    with pytest.raises(InputError, match="one is there already"):
        make_key(tmp_path / "one")
    assert not public.exists() and before


def test_files_that_are_no_keys(tmp_path: Path) -> None:
    public = make_key(tmp_path / "one")
    other = ed25519.Ed25519PrivateKey.generate()
    (tmp_path / "other").write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    (tmp_path / "other.pub").write_bytes(other.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    (tmp_path / "text").write_text("this is\nno key")
    for read, name, reason in (
        (read_private_key, "none", r"cannot be read \(No such file"),
        (read_private_key, "text", "is no private key"),
        (read_private_key, public.name, "is no private key"),
        (read_private_key, "other", "is a key of another kind"),
        (read_public_key, "none.pub", "cannot be read"),
        (read_public_key, "text", "is no public key"),
        (read_public_key, "one", "is no public key"),
        (read_public_key, "other.pub", "is a key of another kind"),
    ):
        with pytest.raises(InputError, match=reason) as caught:
            read(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["ümlaut.example", ""])
def test_names_that_no_certificate_can_have(tmp_path: Path, host: str) -> None:
    with pytest.raises(InputError, match="is neither a name nor an address"):
        make_certificates(tmp_path, [host])
    assert not list(tmp_path.iterdir())
