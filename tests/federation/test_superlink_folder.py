"""The folder of a SuperLink: made as a whole or not at all, and a key for each name."""

from pathlib import Path

import pytest

from fedsieve.errors import InputError
from fedsieve.federation.keys import make_key, public_bytes, read_public_key
from fedsieve.federation.superlink_folder import SuperLinkFolder


@pytest.fixture
def folder(tmp_path: Path) -> SuperLinkFolder:
    return SuperLinkFolder.make(tmp_path / "superlink", ["localhost"])


def test_a_new_folder(folder: SuperLinkFolder) -> None:
    assert all(path.is_file() for path in folder.files) and len(folder.token) == 64 and not folder.nodes()
    assert SuperLinkFolder(folder.path).token == folder.token


def test_a_folder_that_is_in_use_stays_as_it_is(folder: SuperLinkFolder, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    with pytest.raises(InputError, match="is there already; give a new or an empty folder"):
        SuperLinkFolder.make(folder.path, ["localhost"])
    assert {path: path.read_bytes() for path in folder.path.iterdir() if path.is_file()} == before
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="neither a name nor an address"):
        SuperLinkFolder.make(tmp_path / "empty", ["ümlaut"])
    assert not list((tmp_path / "empty").iterdir())
    with pytest.raises(InputError, match="neither a name nor an address"):
        SuperLinkFolder.make(tmp_path / "new", ["ümlaut"])
    assert not (tmp_path / "new").exists()


def test_another_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is no folder of a SuperLink; make one: fedsieve superlink make .* --host"):
        SuperLinkFolder(tmp_path)


def test_keys_come_and_go(folder: SuperLinkFolder, tmp_path: Path) -> None:
    one, other = make_key(tmp_path / "hospital-1"), make_key(tmp_path / "hospital-2")
    assert [folder.add(one), folder.add(other), folder.add(one)] == ["hospital-1", "hospital-2", "hospital-1"]
    assert folder.nodes() == {
        "hospital-1": public_bytes(read_public_key(one)),
        **{"hospital-2": folder.nodes()["hospital-2"]},
    }
    folder.remove("hospital-1")
    assert folder.nodes().keys() == {"hospital-2"}
    with pytest.raises(InputError, match="no node is called hospital-1; the registered ones: hospital-2"):
        folder.remove("hospital-1")


def test_a_name_has_one_key_and_a_key_one_name(folder: SuperLinkFolder, tmp_path: Path) -> None:
    one = make_key(tmp_path / "hospital-1")
    folder.add(one)
    renamed = tmp_path / "hospital-9.pub"
    renamed.write_bytes(one.read_bytes())
    with pytest.raises(InputError, match="is the key of hospital-1 already; each node has its own"):
        folder.add(renamed)
    (tmp_path / "again").mkdir()
    with pytest.raises(InputError, match="hospital-1 has another key; remove it first: fedsieve superlink"):
        folder.add(make_key(tmp_path / "again" / "hospital-1"))
    with pytest.raises(InputError, match=r"is no public key"):
        folder.add(tmp_path / "hospital-1")
    assert folder.nodes().keys() == {"hospital-1"}
