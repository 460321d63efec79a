"""The page about a data set, and the command that writes it."""

import base64
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from fedsieve.analysis.report.exploration import data_settings, exploration, picture
from fedsieve.config.data_settings import DataSettings
from fedsieve.data.load import Samples, load
from fedsieve.errors import InputError


def test_pictures_are_the_images_pixel_by_pixel() -> None:
    generator = np.random.default_rng(0)
    for channels in (1, 3):
        images = torch.from_numpy(generator.integers(0, 256, size=(2, channels, 5, 7), dtype=np.uint8))
        address = picture(Samples(images, torch.zeros(2, dtype=torch.int64)), 1)
        kind, _, content = address.partition(",")
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
        assert kind == "data:image/png;base64"
        assert np.array_equal(pixels.reshape(5, 7, channels).transpose(2, 0, 1), images[1].numpy())


def test_large_pictures_are_made_smaller() -> None:
    images = torch.zeros(1, 3, 300, 200, dtype=torch.uint8)
    content = picture(Samples(images, torch.zeros(1, dtype=torch.int64)), 0).partition(",")[2]
    assert Image.open(io.BytesIO(base64.b64decode(content))).size == (64, 96)


def test_what_is_shown_depends_on_the_seed_alone() -> None:
    digits = load(DataSettings(name="digits"))
    once, again, other = (exploration(digits, "digits", seed) for seed in (1, 1, 2))
    assert once == again and once["samples"] != other["samples"]
    json.dumps(once, allow_nan=False)
    assert [len(once[name]) for name in ("samples", "nearest", "farthest", "spread")] == [16, 8, 8, 10]
    assert sum(once["train"]) == len(digits.train) and sum(once["outliers"]["by_class"]) == once["outliers"]["count"]
    labels = digits.train.labels.numpy()
    assert all(one["label"] == str(labels[one["position"]]) for one in once["samples"])


def test_a_reference_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="use 0 to 1437"):
        exploration(load(DataSettings(name="digits")), "digits", reference=1438)


def test_data_is_named_by_itself_or_by_an_experiment(images: Path) -> None:
    assert data_settings("digits", None).name == "digits"
    assert data_settings("digits-noniid", None).name == "digits"
    assert data_settings("npz", str(images)).path == str(images)


def test_the_command_writes_a_page(fedsieve: Callable, images: Path) -> None:
    code, printed, _ = fedsieve("explore", "npz", "--path", str(images), "--out", "page.html")
    assert code == 0 and "240 training and 60 test images of 4 classes, 16 x 16 pixels;" in printed
    assert Path("page.html").read_text().startswith("<!doctype html>")
    code, printed, _ = fedsieve("explore", "npz", "--path", str(images), "--json")
    assert json.loads(printed)["train"] == [60] * 4 and not Path("explore.html").exists()


def test_a_folder_or_file_is_named_by_its_path(images: Path, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "cifar-100-python").mkdir()
    for name in ("train", "meta"):
        (tmp_path / "cifar-100-python" / name).touch()
    for place, name in (
        (tmp_path / "pictures", "folder"),
        (tmp_path / "cifar-100-python", "cifar100"),
        (images, "npz"),
    ):
        assert (found := data_settings(str(place), None)).name == name and found.path == str(place)


def test_a_folder_of_images_with_their_true_sizes(fedsieve: Callable, tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode(b"my\xffpictures")
    for part, sizes in (("train", [(30, 20), (50, 25)]), ("test", [(40, 10)])):
        for name in ("cat", "dog", ".hidden"):
            (root / part / name).mkdir(parents=True)
            for number, size in enumerate(sizes * 2):
                Image.new("RGB", size if name != ".hidden" else (999, 999)).save(root / part / name / f"{number}.png")
    upright = Image.Exif()
    upright[ExifTags.Base.Orientation] = 6  # stored on its side: 60 wide and 35 high in the file
    Image.new("RGB", (60, 35)).save(root / "train" / "cat" / "camera.jpg", exif=upright)
    code, printed, _ = fedsieve("explore", str(root), "--out", "page.html")
    assert code == 0 and "9 training and 4 test images of 2 classes, 30 to 50 x 10 to 60 pixels;" in printed
    assert "folder my\\\\xffpictures: what is in it" in Path("page.html").read_text()
    found = json.loads(fedsieve("explore", str(root), "--json")[1])
    assert found["sizes"] == {"smallest": [30, 10], "largest": [50, 60]} and found["shape"] == [3, 64, 64]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "'nothing' is neither a file nor a preset"),
        (["npz"], "--path"),
        (["."], "has no folder train"),
        (["npz", "--path", "absent.npz"], "absent.npz does not exist"),
        (["digits", "--reference", "-1"], "--reference -1"),
        (["digits", "--out", "/dev/null/page.html"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line(fedsieve: Callable, arguments: list[str], said: str) -> None:
    code, _, error = fedsieve("explore", *arguments)
    assert code == 2 and error.startswith("error: ") and said in error and error.count("\n") == 1
    assert list(Path.cwd().iterdir()) == []
