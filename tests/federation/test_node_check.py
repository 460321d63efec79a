"""`fedsieve node`: what it says of a node with --check, and what it refuses in one line before anything is written."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from federation_nodes import FederationHere

FEW = ["clients.count=3"]


@pytest.fixture
def shard(federation: FederationHere) -> Path:
    federation.export(*FEW)
    return federation.shards / "client-1.npz"


def test_what_is_in_order(federation: FederationHere, shard: Path, fedsieve: Callable, backbone: Path) -> None:
    named = ["node", "--data", str(shard), "--name", "hospital-1", "--check"]
    code, printed, _ = fedsieve(*named)
    lines = {line.split()[0]: line for line in printed.splitlines()}
    assert code == 0 and list(lines) == ["data", "versions", "device", "canary"]
    assert "60 samples of 4 of 4 classes: " in lines["data"] and str(shard) in lines["data"]
    assert len(lines["canary"].split()[1].rstrip(";")) == 16
    code, printed, _ = fedsieve(*named, "--backbone", str(backbone))
    assert code == 0 and printed.splitlines()[-1].startswith("model ") and printed.rstrip().endswith(str(backbone))
    file = federation.place / "pinned.yaml"
    file.write_text(federation.experiment(*FEW).to_yaml())
    code, printed, _ = fedsieve(*named, "--experiment", str(file), "--rounds", "5")
    assert code == 0 and "weights: " in printed.splitlines()[-1]
    code, _, said = fedsieve(*named, "--experiment", str(file), "--rounds", "4")
    assert code == 2 and "--experiment: its owner allows 4 rounds, and the experiment has 5" in said
    assert not list(Path().iterdir())


def bad(place: Path, shard: Path) -> dict[str, tuple[list[str], str]]:
    """Options that are wrong, and what is said of them."""
    empty, folder, text, none = place / "empty.npz", place / "folder", place / "text.npz", place / "none.npz"
    np.savez(empty, x=np.zeros((0, 4, 4, 3), np.uint8), y=np.zeros(0, np.int64))
    np.savez(none, z=np.zeros(3))
    folder.mkdir()
    text.write_text("no archive")
    long = "f" * 120
    good = ["--data", str(shard), "--name", "one"]
    return {
        "no data": (["--data", str(place / "missing.npz"), "--name", "one"], "missing.npz does not exist; give"),
        "no samples": (["--data", str(empty), "--name", "one"], "has no samples; give at least one"),
        "no arrays": (["--data", str(none), "--name", "one"], "has no array x"),
        "no archive": (["--data", str(text), "--name", "one"], "text.npz"),
        "an empty folder": (["--data", str(folder), "--name", "one"], "folder"),
        "no name": (["--data", str(shard), "--name", " "], "is no plain name; use letters and digits"),
        "a path as name": (["--data", str(shard), "--name", "../one"], "is no plain name"),
        "a hidden name": (["--data", str(shard), "--name", ".one"], "is no plain name"),
        "a name with escapes": (["--data", str(shard), "--name", "a\x1b[31m"], "is no plain name"),
        "a long name": (["--data", str(shard), "--name", "n" * 256], "is too long a name"),
        "a long folder": ([*good, "--folder", long], "is too long a name for a socket; use a shorter one"),
        "a file as folder": ([*good, "--folder", str(shard)], "cannot be made"),
        "an unknown device": ([*good, "--device", "tpu"], "--device is 'tpu'; use cpu or cuda"),
        "telling nonsense": ([*good, "--tell", "samples,secrets"], "'secrets' is nothing that a node tells"),
        "no backbone": ([*good, "--backbone", str(place / "b.pth")], "b.pth does not exist"),
        "no init": ([*good, "--init", str(place / "run")], "run does not exist"),
        "no experiment": ([*good, "--experiment", "nothing.yaml"], "'nothing.yaml' is neither a file nor a preset"),
        "no plugin": ([*good, "--plugin", str(place / "p.py")], "p.py"),
        "no rounds": ([*good, "--rounds", "0"], "0"),
        "two participants": ([*good, "--participants", "2"], "2"),
    }


def test_what_is_wrong(federation: FederationHere, shard: Path, fedsieve: Callable) -> None:
    for name, (options, reason) in bad(federation.place, shard).items():
        code, printed, said = fedsieve("node", *options)
        assert (code, printed) == (2, ""), name
        assert reason in said and "Traceback" not in said, (name, said)
        assert len(said.strip().splitlines()) == 1 or "Usage" in said, (name, said)
        assert not list(Path().iterdir()), name


def test_a_folder_in_use(federation: FederationHere, shard: Path, fedsieve: Callable) -> None:
    node = federation.start("client-1")
    code, _, said = fedsieve("node", "--data", str(shard), "--name", "two", "--folder", str(node.setup.folder))
    assert code == 2 and "is in use by another node; give each its own" in said
    assert node.setup.socket.exists()
