"""A data set as files, one for each client and one for the server: the images to the bit, in order, or nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsieve.config.experiment_file import load_experiment
from fedsieve.config.schema import Experiment
from fedsieve.data.load import load
from fedsieve.data.manifest import must_be_whole, read_federation
from fedsieve.data.roles import hold_out_validation, split_training
from fedsieve.data.shards import read_server_data, read_shard
from fedsieve.errors import InputError
from fedsieve.experiment import export_split as module
from fedsieve.experiment.export_split import export_split

Maker = Callable[..., Experiment]
FOLDER = ("clients.count=11", "clients.split={kind: dirichlet, alpha: 0.5}")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of photographs of several sizes and kinds, of three classes."""
    root, generator = tmp_path_factory.mktemp("pictures"), np.random.default_rng(1)
    for part, count in (("train", 30), ("test", 5)):
        for name in ("[ant]", "bee hive", "Überzug"):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                height, width = generator.integers(10, 40, 2)
                shape = (height, width) if number % 3 == 0 else (height, width, 3)
                image = Image.fromarray(generator.integers(0, 256, shape, dtype=np.uint8))
                image.save(root / part / name / f"{number}.{'jpg' if number % 2 else 'png'}")
    return root


def truth(settings: Experiment) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images and labels of each client, from the data set and its split."""
    data = load(settings.data)
    training, _ = hold_out_validation(settings, data)
    parts = split_training(settings, data, training).clients
    return [(data.train.images[training[own]].numpy(), data.train.labels[training[own]].numpy()) for own in parts]


@pytest.mark.parametrize("form", ["npz", "folders"])
@pytest.mark.parametrize("source", ["folder", "cropped", "npz", "digits"])
def test_what_is_exported_is_read_back_to_the_bit(
    experiment: Maker, pictures: Path, tmp_path: Path, form: str, source: str
) -> None:
    overrides = {
        "folder": ("data.name=folder", f"data.path={pictures}", *FOLDER),
        "cropped": (
            "data.name=folder",
            f"data.path={pictures}",
            "data.evaluate_crop={resize_center_crop: {resize: 20}}",
        ),
        "npz": (),
        "digits": ("data.name=digits", "data.path=null", "data.limit=50"),
    }[source]
    settings = experiment(*overrides).resolved()
    out = tmp_path / "new" / "out"
    export_split(settings, out, form)  # type: ignore[arg-type]
    federation = read_federation(out / "federation.json")
    federation.must_fit(load_experiment(str(out / "experiment.yaml")).resolved())
    expected = truth(settings)
    assert len(federation.clients) == settings.clients.count == len(expected)
    for facts, (images, labels) in zip(federation.clients, expected, strict=True):
        path = out / str(facts.file)
        assert path.is_dir() == (form == "folders") == (facts.sha256 is None)
        must_be_whole(path, facts)
        samples, _ = read_shard(path, settings.data, federation.classes, federation.image_shape)
        assert np.array_equal(samples.images.numpy(), images) and np.array_equal(samples.labels.numpy(), labels)
        assert facts.samples == len(labels)
        assert facts.class_counts == np.bincount(labels, minlength=len(federation.classes)).tolist()
        if source in ("folder", "cropped"):  # a node needs no shape for them
            assert np.array_equal(read_shard(path, settings.data, federation.classes)[0].images.numpy(), images)
    data = load(settings.data)
    server = read_server_data(out / "server.npz", federation.classes)
    assert server.test.images.equal(data.test.images) and server.test.labels.equal(data.test.labels)
    held = hold_out_validation(settings, data)[1]
    assert server.train.images.equal(data.train.images[held]) and server.train.labels.equal(data.train.labels[held])
    assert federation.images == len(data.train) + len(data.test)
    names = {str(facts.file) for facts in federation.clients}
    assert {path.name for path in out.iterdir()} == names | {"server.npz", "federation.json", "experiment.yaml"}


def test_without_validation_the_server_has_only_test_images(experiment: Maker, tmp_path: Path) -> None:
    federation, _ = export_split(experiment("data.validation=0").resolved(), tmp_path)
    server = read_server_data(tmp_path / "server.npz", federation.classes)
    assert not len(server.train) and len(server.test) == 60


def test_images_three_pixels_wide(experiment: Maker, tmp_path: Path) -> None:
    """Of four axes, the last could be taken for channels."""
    path = tmp_path / "narrow.npz"
    images = np.random.default_rng(0).integers(0, 256, (60, 1, 5, 3), dtype=np.uint8).transpose(0, 2, 3, 1)
    np.savez(path, x_train=images, y_train=np.arange(60) % 3, x_test=images, y_test=np.arange(60) % 3)
    settings = experiment(f"data.path={path}").resolved()
    federation, _ = export_split(settings, tmp_path / "out")
    assert federation.image_shape == (1, 5, 3)
    samples, _ = read_shard(tmp_path / "out" / "client-0.npz", settings.data, federation.classes)
    assert np.array_equal(samples.images.numpy(), truth(settings)[0][0])


@pytest.mark.parametrize("form", ["npz", "folders"])
def test_what_fails_midway_leaves_nothing(
    experiment: Maker, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def fail(*_: object) -> None:
        written.extend(path.name for path in (tmp_path / "a" / "out").iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write_server", fail)
    with pytest.raises(KeyboardInterrupt):
        export_split(experiment().resolved(), tmp_path / "a" / "out", form)  # type: ignore[arg-type]
    assert len(written) == 6 and "federation.json" not in written and not list(tmp_path.iterdir())
    (tmp_path / "a" / "out").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        export_split(experiment().resolved(), tmp_path / "a" / "out", form)  # type: ignore[arg-type]
    assert (tmp_path / "a" / "out").is_dir() and not list((tmp_path / "a" / "out").iterdir())


def test_too_little_disk(experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(InputError, match=r"the clients' data takes up to .* free at .*; make room, or use another"):
        export_split(experiment().resolved(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("names", [["a/b", "c", "d", "e"], ["a", "a", "b", "c"], ["..", "b", "c", "d"]])
def test_classes_that_are_no_names_of_folders(experiment: Maker, tmp_path: Path, images: Path, names: list) -> None:
    path = tmp_path / "named.npz"
    with np.load(images) as arrays:
        np.savez(path, names=names, **arrays)
    settings = experiment(f"data.path={path}").resolved()
    with pytest.raises(InputError, match="use --as npz"):
        export_split(settings, tmp_path / "out", "folders")
    federation, _ = export_split(settings, tmp_path / "out")
    samples, _ = read_shard(tmp_path / "out" / "client-3.npz", settings.data, federation.classes)
    assert np.array_equal(samples.labels.numpy(), truth(settings)[3][1])
