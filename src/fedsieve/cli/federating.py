"""`fedsieve node`: a client of a federation, at the owner of the data."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsieve.cli.arguments import PluginsOption, console, reachable
from fedsieve.errors import InputError

if TYPE_CHECKING:
    from fedsieve.config.schema import Experiment


def node(
    data: Annotated[
        Path,
        typer.Option(callback=reachable, metavar="PATH", help="Its samples: npz, or CLASS/*.png or *.jpg."),
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="What the federation calls it.")],
    folder: Annotated[
        Path | None, typer.Option(callback=reachable, metavar="DIR", help="For its socket and memory; else node-NAME.")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(metavar="FILE", help="Where the backbone's file or folder is on this machine.")
    ] = None,
    init: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where the run of model.init is on this machine.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="cpu or cuda; else as the server says.")] = None,
    experiment: Annotated[
        str | None, typer.Option(metavar="FILE", help="The only experiment that it takes part in.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="At most so many rounds of a run.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="At most so many local epochs in a round.")] = None,
    megabytes: Annotated[int | None, typer.Option(min=1, help="At most so many MB in a request.")] = None,
    tell: Annotated[str, typer.Option(metavar="LIST", help="What the server may be told.")] = "samples,classes,losses",
    secure: Annotated[bool, typer.Option("--secure", help="Send updates in secure sums only.")] = False,
    participants: Annotated[int, typer.Option(min=3, help="At least so many in a secure sum.")] = 3,
    check: Annotated[bool, typer.Option("--check", help="Say whether all is in order, and end.")] = False,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="With --check: the relay's private key.")] = None,
    plugins: PluginsOption = None,
) -> None:
    """Hold a client's data, model and memory, and train when the server of a federation asks (docs/federation.md)."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # what the server names is not downloaded; read when the hub's code is imported
    from fedsieve.config.experiment_file import all_paths
    from fedsieve.config.plugins import used
    from fedsieve.data.pictures import shown
    from fedsieve.federation.node import Node, NodeSetup
    from fedsieve.federation.owner import Owner, told_of
    from fedsieve.federation.socket_frames import LARGEST

    if not name.strip() or shown(name) != name or any(one in name for one in "/\\:") or name.startswith("."):
        raise InputError(f"--name '{shown(name)[:60]}' is no plain name; use letters and digits, such as hospital-3")
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"--device is '{device}'; use cpu or cuda")
    largest = 1_000_000 * megabytes if megabytes is not None else LARGEST
    owner = Owner(rounds, epochs, largest, told_of(tell), participants, secure)
    paths = tuple(all_paths(plugins or []))
    with used(paths):
        pinned = _pinned(experiment) if experiment is not None else None
        place = folder if folder is not None else Path(f"node-{name}")
        setup = NodeSetup(name, data, place, _local(backbone), _local(init), device, paths, pinned, owner)
        terminal = console()
        if check:
            _check(setup, key, terminal)
            return
        resident = Node(setup, lambda text: terminal.print(text, soft_wrap=True, markup=False))

        def stop(*_: Any) -> None:
            resident.stop()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        ready = f"{name}: {resident.samples:,} samples; ready at {setup.socket}"
        resident.serve(lambda: terminal.print(ready, soft_wrap=True, markup=False))


def _check(setup: Any, key: Path | None, terminal: Any) -> None:
    """`node --check`: data, model, versions, the hash of the canary, and the key."""
    from fedsieve.federation.keys import fingerprint, read_private_key
    from fedsieve.federation.node_check import checked

    keys = {"key": f"{fingerprint(read_private_key(key).public_key())}: {key}"} if key is not None else {}
    for name, found in (checked(setup) | keys).items():
        terminal.print(f"{name:<10} {found}", soft_wrap=True, markup=False)


def _pinned(experiment: str) -> "Experiment":
    from fedsieve.config.runnable import loaded

    with loaded(experiment, [], []) as settings:
        return settings.resolved()


def _local(path: str | None) -> str | None:
    """An absolute path of a file that is there."""
    if path is None:
        return None
    if not Path(path).exists():
        raise InputError(f"{path} does not exist; say where it is on this machine")
    return str(Path(path).absolute())
