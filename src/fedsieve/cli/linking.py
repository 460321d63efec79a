"""`fedsieve superlink` and `fedsieve relay`: how a federation's messages travel over Flower (docs/federation.md)."""

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsieve.cli.arguments import console, reachable
from fedsieve.errors import InputError

superlink_app = typer.Typer(help="The SuperLink of a federation, where nodes and server meet (docs/federation.md).")
relay_app = typer.Typer(help="Carries messages between a SuperLink and a node (docs/federation.md).")

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", callback=reachable, help="The SuperLink's folder.")]


@superlink_app.command("make")
def make(
    folder: FolderArgument,
    host: Annotated[
        list[str], typer.Option(metavar="NAME", help="A name or address under which nodes reach it; repeatable.")
    ],
) -> None:
    """Make a folder with certificates, for nodes to know the server by, and the server's secrets."""
    from fedsieve.federation.superlink_folder import SuperLinkFolder

    made = SuperLinkFolder.make(folder, host)
    _print(f"written to {folder}; give {made.files[0]} to the owners of the nodes, and keep the rest secret")


@superlink_app.command("add")
def add(
    folder: FolderArgument,
    keys: Annotated[list[Path], typer.Argument(metavar="NAME.pub", help="Public keys of nodes, by their names.")],
) -> None:
    """Register nodes' keys; a running SuperLink notices within seconds."""
    from fedsieve.federation.keys import fingerprint, read_public_key
    from fedsieve.federation.superlink_folder import SuperLinkFolder

    link = SuperLinkFolder(folder)
    for key in keys:
        _print(f"{link.add(key)} may join, with the key {fingerprint(read_public_key(key))}")


@superlink_app.command("remove")
def remove(folder: FolderArgument, names: Annotated[list[str], typer.Argument(metavar="NAME")]) -> None:
    """Take back the registration of nodes."""
    from fedsieve.federation.superlink_folder import SuperLinkFolder

    link = SuperLinkFolder(folder)
    for name in names:
        link.remove(name)
        _print(f"{name} may not join any more")


@superlink_app.command("start")
def start_superlink(
    folder: FolderArgument,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The address for nodes; 0.0.0.0: any.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="For nodes.")] = 9092,
    server_port: Annotated[int, typer.Option(min=0, max=65535, help="For `fedsieve run`, on this machine.")] = 9091,
    megabytes: Annotated[int, typer.Option(min=1, help="At most so many MB from a node in a minute.")] = 10_000,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No encryption and no authentication, for tests on one machine only.")
    ] = False,
) -> None:
    """Serve nodes and the server until Ctrl-C."""
    from fedsieve.federation.links import needs_flower
    from fedsieve.federation.superlink_folder import SuperLinkFolder

    link = SuperLinkFolder(folder)
    with needs_flower("superlink"):
        import flwr.superlink  # noqa: F401 (here one is told if it is missing)
        import uvicorn  # noqa: F401
    from fedsieve.federation.superlink import serve

    if insecure:
        _print("warning: --insecure: anybody who reaches this port can read and forge all messages")
    serve(link, (host, port), server_port, insecure, megabytes, _print)


@relay_app.command("key")
def key(name: Annotated[Path, typer.Argument(metavar="NAME", callback=reachable, help="The node's name.")]) -> None:
    """Make a node's key: NAME, which stays secret, and NAME.pub, for the owner of the server."""
    from fedsieve.federation.keys import fingerprint, make_key, read_public_key

    public = make_key(name)
    _print(f"the key {fingerprint(read_public_key(public))}")
    _print(f"written to {name} and {public}; send {public} to the owner of the server")


@relay_app.command("start")
def start_relay(
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the SuperLink is.")],
    node: Annotated[Path, typer.Option(metavar="DIR", help="The node's folder (`fedsieve node --folder`).")],
    ca: Annotated[Path | None, typer.Option(metavar="FILE", help="The server's ca.crt.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="The node's private key.")] = None,
    megabytes: Annotated[int, typer.Option(min=1, help="At most so many MB in a message.")] = 4_000,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No encryption and no authentication, for tests on one machine only.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Say whether all is in order, and end.")] = False,
) -> None:
    """Carry messages until Ctrl-C; the SuperLink and the node may come and go."""
    from fedsieve.config.engine_settings import is_a_place
    from fedsieve.federation.keys import read_private_key
    from fedsieve.federation.links import SOCKET, needs_flower

    if not is_a_place(superlink):
        raise InputError(f"--superlink '{superlink[:60]}' is not HOST:PORT; use one such as fl.example.org:9092")
    if insecure and (ca is not None or key is not None):
        raise InputError("--insecure uses neither --ca nor --key; leave one or the others out")
    if not insecure and (ca is None or key is None):
        raise InputError("give --ca, the server's ca.crt, and --key, of `fedsieve relay key`")
    if ca is not None and not ca.is_file():
        raise InputError(f"--ca {ca} is no file; get ca.crt from the owner of the server")
    with needs_flower("relay"):
        from fedsieve.federation.relay import FleetConnection, Relay, some_key
    own = read_private_key(key) if key is not None else some_key()
    relay = Relay(FleetConnection.at(superlink, ca, own), node / SOCKET, megabytes * 1_000_000, _print)

    def stop(*_: Any) -> None:
        relay.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    if insecure:
        _print("warning: --insecure: anybody on the way can read and forge all messages")
    relay.begin()
    if check:
        relay.superlink.leave()
        how = "without encryption" if insecure else f"its certificate is of {ca}, and it knows the key {key}"
        _print(f"superlink  {superlink}: {how}")
        _print(f"node       {relay.called()}")
        return
    _print(f"connected to {superlink}, for the node at {node / SOCKET}")
    relay.run()


def _print(text: str) -> None:
    console().print(text, soft_wrap=True)
