"""`fedsieve split --export`: what it writes and prints, and where it writes nothing."""

import json
from collections.abc import Callable
from pathlib import Path


def test_the_command_says_what_it_has_written(fedsieve: Callable, file: Path) -> None:
    code, printed, _ = fedsieve("split", str(file), "clients.count=12", "--export", "out")
    assert code == 0 and printed.splitlines()[-1] == "written to out"
    assert "client-00.npz to client-11.npz: 180 training samples of 12 clients" in printed
    assert not Path("split.png").exists() and (Path("out") / "client-07.npz").is_file()
    code, printed, _ = fedsieve("split", str(file), "--export", "other", "--as", "folders", "--json")
    assert code == 0 and json.loads(printed) == json.loads(Path("other/federation.json").read_text())
    assert len(list(Path("other/client-0").glob("*/0000*.png"))) == 30


def test_a_folder_that_is_not_empty_is_left_alone(fedsieve: Callable, file: Path) -> None:
    Path("out").mkdir()
    (Path("out") / "mine").write_text("mine")
    code, _, said = fedsieve("split", str(file), "--export", "out")
    assert code == 2 and said == "error: --export out is not empty; give a new or an empty folder\n"
    assert [path.name for path in Path("out").iterdir()] == ["mine"]
    code, _, said = fedsieve("split", str(file), "--export", "out/mine")
    assert code == 2 and "out/mine is a file" in said
    code, _, said = fedsieve("split", str(file), "--export", "new", "--as", "zip")
    assert code == 2 and said == "error: --as is 'zip'; use npz or folders\n" and not Path("new").exists()
