"""`fedsieve methods`: every part is listed, with what it does and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsieve.analysis.catalogue import catalogue
from fedsieve.cli import main

PLUGIN = '''
import fedsieve

@fedsieve.rule
def nearest_to_one(evidence):
    """Those nearest to 1 (Somebody et al., 2026)."""
    return (evidence.weights - 1).abs()

@fedsieve.callback
class Counts(fedsieve.Callback):
    """Counts rounds."""
'''


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as code:
        main(["methods", *arguments])
    assert code.value.code == 0
    return capsys.readouterr().out


def test_every_part_has_a_line_of_its_own() -> None:
    for key, parts in catalogue().items():
        lines = [part.about for part in parts]
        assert all(lines) and len(set(lines)) == len(lines), key


def test_papers_settings_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(listed(capsys).split())
    for wanted in (
        "scaffold Clients' gradients are corrected by the mean gradients of all, less their own (Karimireddy et al.,",
        "not with local.momentum above 0: control variates are mean gradients",
        "{fedprox: {mu: 0.01}}",
        "{adam: {lr: 0.01, beta1: 0.9, beta2: 0.99, tau: 0.001}}",
        "not with clients.secure: zero_sum: it needs single updates",
    ):
        assert wanted in text


def test_json_and_plugins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    found: dict[str, Any] = json.loads(listed(capsys, "--json", "--plugin", str(tmp_path / "mine.py")))
    mine = found["phases.*.mask.rule"][-1]
    assert mine["name"] == "nearest_to_one" and mine["about"] == "Those nearest to 1"
    assert mine["paper"] == "Somebody et al., 2026"
    assert [(one["name"], one["about"]) for one in found["callbacks"]] == [("counts", "Counts rounds")]
    after = listed(capsys, "--json")
    assert "nearest_to_one" not in after and "callbacks" not in after
