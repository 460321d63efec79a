"""The folder of a SuperLink: its certificates, the keys of the nodes that may come, and the server's secret."""

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from fedsieve.errors import InputError
from fedsieve.federation.keys import make_certificates, public_bytes, read_public_key, write_new

TOKEN = "token"  # without it nobody starts runs or registers keys, not even on the same machine
TOKEN_HEADER = "x-fedsieve-token"
NODES = "nodes"  # NAME.pub of each node that may come


class SuperLinkFolder:
    def __init__(self, path: Path) -> None:
        """InputError if it is none."""
        self.path = path
        if not (path / TOKEN).is_file():
            raise InputError(
                f"{path} is no folder of a SuperLink; make one: fedsieve superlink make {path} --host NAME"
            )

    @staticmethod
    def make(path: Path, hosts: Sequence[str]) -> "SuperLinkFolder":
        """A new one, with a certificate for these names or addresses of the server."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{path} is there already; give a new or an empty folder")
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        try:
            make_certificates(path, hosts)
            (path / NODES).mkdir()
            write_new(path / TOKEN, secrets.token_hex(32).encode(), is_private=True)
        except BaseException:
            shutil.rmtree(path)
            if not is_new:
                path.mkdir()
            raise
        return SuperLinkFolder(path)

    @property
    def token(self) -> str:
        try:
            return (self.path / TOKEN).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{self.path / TOKEN} cannot be read ({error}); run as the user who made it") from None

    @property
    def files(self) -> tuple[Path, Path, Path]:
        """The authority's certificate, the server's, and its key."""
        return self.path / "ca.crt", self.path / "server.crt", self.path / "server.key"

    def nodes(self) -> dict[str, bytes]:
        """The registered keys by name, as Flower has them."""
        found = {}
        for path in sorted((self.path / NODES).glob("*.pub")):
            try:
                found[path.name.removesuffix(".pub")] = public_bytes(read_public_key(path))
            except InputError:  # being written, or removed
                continue
        return found

    def add(self, key: Path) -> str:
        """Register a public key; the name of its file is the node's. A running SuperLink notices."""
        name, new = key.name.removesuffix(".pub"), public_bytes(read_public_key(key))
        if not name or name.startswith("."):
            raise InputError(f"{key}: call the file NAME.pub, by the node's name")
        for other, known in self.nodes().items():
            if known == new and other != name:
                raise InputError(f"{key} is the key of {other} already; each node has its own")
            if other == name and known != new:
                raise InputError(
                    f"{name} has another key; remove it first: fedsieve superlink remove {self.path} {name}"
                )
        path = self.path / NODES / f"{name}.pub"
        if not path.exists():
            write_new(path, key.read_bytes())
        return name

    def remove(self, name: str) -> None:
        if name not in self.nodes():
            known = ", ".join(self.nodes()) or "there are none"
            raise InputError(f"no node is called {name}; the registered ones: {known}")
        (self.path / NODES / f"{name}.pub").unlink()
