"""Federations of the small experiment: with nodes in this process, and over Flower, with processes of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from federation_nodes import HEADS, FederationHere, Maker, federation_here
from flower_here import FlowerHere


@pytest.fixture
def federation(
    experiment: Maker, tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FederationHere]:
    with federation_here(experiment, tmp_path, backbone, monkeypatch) as here:
        yield here


@pytest.fixture
def heads(federation: FederationHere) -> FederationHere:
    """Nodes for runs of heads only."""
    federation.begin(*HEADS)
    return federation


@pytest.fixture(scope="session")
def flower_federation() -> Iterator[list[FlowerHere]]:
    """Holds the federation over Flower once a test has asked for it."""
    held = list[FlowerHere]()
    yield held
    for one in held:
        one.loopback.close()
        assert not one.loopback.folder.exists()


@pytest.fixture
def flower(
    flower_federation: list[FlowerHere], experiment: Maker, backbone: Path, tmp_path_factory: pytest.TempPathFactory
) -> FlowerHere:
    """A SuperLink with five nodes, all of which are running."""
    if not flower_federation:
        flower_federation.append(FlowerHere(experiment, backbone, tmp_path_factory.mktemp("flower")))
    flower_federation[0].restore()
    return flower_federation[0]
