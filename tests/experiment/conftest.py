"""Experiments with plugins."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedsieve.config.schema import Experiment


@pytest.fixture
def file(tmp_path: Path, experiment: Callable[..., Experiment]) -> Callable[..., str]:
    """Writes parts.py and mine.yaml, the small experiment with changes and the plugin; the path of the latter."""

    def written(text: str, *changes: str) -> str:
        (tmp_path / "parts.py").write_text(text, encoding="utf-8")
        settings = experiment("plugins=[parts.py]", *changes).model_copy(update={"plugins": ("parts.py",)})
        (tmp_path / "mine.yaml").write_text(settings.to_yaml(), encoding="utf-8")
        return str(tmp_path / "mine.yaml")

    return written
