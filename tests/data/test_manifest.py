"""The manifest of a federation: read as it was written, refused in one line if it is damaged or does not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.config.schema import Experiment
from fedsieve.data.manifest import (
    ClientFacts,
    Federation,
    ServerFacts,
    client_names,
    dependent_settings,
    must_be_whole,
    read_federation,
    write_federation,
)
from fedsieve.errors import InputError

Maker = Callable[..., Experiment]
EXAMPLE = Federation(
    classes=["cat", "dog", "Überraschung"],
    clients=[
        ClientFacts(name="client-0", samples=5, class_counts=[5, 0, 0], file="client-0.npz", sha256="0" * 64),
        ClientFacts(name="hospital", samples=7),
    ],
    server=ServerFacts(file="server.npz", sha256="f" * 64),
    image_shape=(3, 8, 8),
    statistics=([0.1, 0.2, 1 / 3], [0.1, 0.2, 0.3]),
    images=20,
    data_fingerprint="a" * 32,
    made_for={"seed": 7, "clients.split": {"kind": "iid"}},
)


def read_text(place: Path, text: str | bytes) -> Federation:
    path = place / "federation.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_federation(path)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_federation(tmp_path / "federation.json", EXAMPLE)
    found = read_federation(tmp_path / "federation.json")
    assert found == EXAMPLE and found.samples.tolist() == [5, 7] and found.class_counts is None
    assert found.statistics is not None and found.statistics[0][2] == 1 / 3
    assert [path.name for path in tmp_path.iterdir()] == ["federation.json"]


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "classes": lambda one: one.pop("classes"),
    "clients": lambda one: one.update(clients=[]),
    "version": lambda one: one.update(version=2),
    "more": lambda one: one.update(more=1),
    "clients.0.samples": lambda one: one["clients"][0].update(samples=0),
    "clients.1.samples": lambda one: one["clients"][1].update(samples="7"),
    "two clients are called": lambda one: one["clients"][1].update(name="client-0"),
    "clients.0.name": lambda one: one["clients"][0].update(name="../../etc"),
    "clients.1.name": lambda one: one["clients"][1].update(name=".hidden"),
    "clients.0.file": lambda one: one["clients"][0].update(file="/etc/passwd"),
    "clients.0.sha256": lambda one: one["clients"][0].update(sha256="0" * 63),
    "clients.0.class_counts": lambda one: one["clients"][0].update(class_counts=[4, 0, 0]),
    "clients.0.class_counts.1": lambda one: one["clients"][0].update(class_counts=[6, -1, 0]),
    "do not add up": lambda one: one["clients"][0].update(class_counts=[5, 0]),
    "statistics": lambda one: one.update(statistics=[[0.1], [0.2]]),
    "statistics.1.2": lambda one: one.update(statistics=[[0.1] * 3, [0.1, 0.2, 0.0]]),
    "image_shape": lambda one: one.update(image_shape=[3, 8]),
    "data_fingerprint": lambda one: one.update(data_fingerprint="x\x1b[31m"),
    "classes.0": lambda one: one.update(classes=["a\x1b[31m", "b", "c"]),
    "made_for": lambda one: one.update(made_for={"phases": 3}),
}


@pytest.mark.parametrize("where", DAMAGE)
def test_damage_is_one_line(tmp_path: Path, where: str) -> None:
    content = json.loads(EXAMPLE.model_dump_json())
    DAMAGE[where](content)
    with pytest.raises(InputError) as error:
        read_text(tmp_path, json.dumps(content))
    said = str(error.value)
    assert where in said and "is damaged, or no federation" in said and said.isprintable() and len(said) < 600


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", "[" * 10**5, "\ud800".encode("utf-8", "surrogatepass"), "1e999"]
)
def test_what_is_no_manifest(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(InputError, match="is damaged, or no federation"):
        read_text(tmp_path, text)
    with pytest.raises(InputError, match="is no file"):
        read_federation(tmp_path)
    with pytest.raises(InputError, match="is no file"):
        read_federation(tmp_path / "nothing.json")


WRITTEN = EXAMPLE.model_dump_json().encode()


@given(place=st.integers(0, len(WRITTEN) - 1), byte=st.integers(0, 255), cut=st.booleans())
def test_any_changed_byte_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int, cut: bool
) -> None:
    changed = WRITTEN[:place] if cut else WRITTEN[:place] + bytes([byte]) + WRITTEN[place + 1 :]
    try:
        found = read_text(tmp_path_factory.getbasetemp(), changed)
    except InputError as error:
        assert str(error).isprintable()
    else:
        assert len(found.clients) == 2 and found.samples.min() > 0


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("seed", "seed=8"),
        ("data.name", "data.name=digits"),
        ("data.limit", "data.limit=100"),
        ("data.validation", "data.validation=0.3"),
        ("clients.count", "clients.count=7"),
        ("clients.split", "clients.split={kind: dirichlet, alpha: 0.5}"),
    ],
)
def test_a_changed_setting_is_named(experiment: Maker, key: str, change: str) -> None:
    clients = [ClientFacts(name=name, samples=1) for name in client_names(6)]
    more: Any = {"statistics": EXAMPLE.statistics}
    made = Federation(classes=["a"], clients=clients, made_for=dependent_settings(experiment().resolved()), **more)
    made.must_fit(experiment().resolved())
    for harmless in (
        "clients.holdout=0.2",
        "phases.0.rounds=1",
        "data.image_size=24",
        "data.augment=[horizontal_flip]",
    ):
        made.must_fit(experiment(harmless).resolved())
    with pytest.raises(InputError, match=rf"^{key} is .*, and the federation was made for .*; use that, or make"):
        made.must_fit(experiment(change).resolved())


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("data.image_size", "data.image_size=24"),
        ("data.evaluate_crop", "data.evaluate_crop={resize_center_crop: {resize: 20}}"),
    ],
)
def test_images_of_a_folder_depend_on_their_size(experiment: Maker, tmp_path: Path, key: str, change: str) -> None:
    folder = ("data.name=folder", f"data.path={tmp_path}")
    clients = [ClientFacts(name=name, samples=1) for name in client_names(6)]
    more: Any = {"statistics": EXAMPLE.statistics}
    made = Federation(
        classes=["a"], clients=clients, made_for=dependent_settings(experiment(*folder).resolved()), **more
    )
    made.must_fit(experiment(*folder).resolved())
    with pytest.raises(InputError, match=rf"^{key} is "):
        made.must_fit(experiment(*folder, change).resolved())


def test_a_federation_made_by_hand_only_has_its_number_of_clients(experiment: Maker) -> None:
    settings = experiment("data.normalize=imagenet", "clients.count=5").resolved()
    with pytest.raises(InputError, match=r"^clients\.count is 5, and the federation has 2; use clients\.count=2$"):
        EXAMPLE.model_copy(update={"made_for": {}}).must_fit(settings)


@pytest.mark.parametrize("count", [1, 2, 10, 11, 100, 101, 1001])
def test_names_are_sorted_by_number(count: int) -> None:
    names = client_names(count)
    assert len(set(names)) == count and names == sorted(names)
    assert [int(name.removeprefix("client-")) for name in names] == list(range(count))


def test_clients_are_found_by_name() -> None:
    assert EXAMPLE.number_of("hospital") == 1
    with pytest.raises(InputError, match="no client 'school'; its clients are client-0, hospital"):
        EXAMPLE.number_of("school")


def test_another_file_is_found_by_its_digest(tmp_path: Path) -> None:
    import hashlib

    path = tmp_path / "one.npz"
    np.savez(path, x=np.arange(3))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    must_be_whole(path, ClientFacts(name="one", samples=3, sha256=digest))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="is not the file that the federation was made with"):
        must_be_whole(path, ClientFacts(name="one", samples=3, sha256=digest))
