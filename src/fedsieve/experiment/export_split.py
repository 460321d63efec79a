"""A simulation's data as files, one for each client and one for the server: the same experiment as a federation."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from fedsieve.config.schema import Experiment
from fedsieve.data.load import Dataset, Samples, load
from fedsieve.data.manifest import (
    MANIFEST,
    ClientFacts,
    Federation,
    ServerFacts,
    client_names,
    dependent_settings,
    digest_of,
    write_federation,
)
from fedsieve.data.pictures import shown
from fedsieve.data.roles import fingerprint_of, hold_out_validation, split_training
from fedsieve.data.shards import write_npz
from fedsieve.data.transform import channel_statistics
from fedsieve.errors import InputError
from fedsieve.experiment.notes import must_fit_on_disk
from fedsieve.files.atomic import write_text, written_atomically

Form = Literal["npz", "folders"]
OVERHEAD = 4096  # bytes that a file takes besides its content
DIGITS = 6  # of an image's number in its file name, at least


def export_split(
    experiment: Experiment, folder: Path, form: Form = "npz", data: Dataset | None = None
) -> tuple[Federation, list[str]]:
    """Write the data of each client and of the server; what was written, and what there is to say about it.

    `folder` must be new or empty. If anything fails, nothing stays there; the manifest is written last, so that a
    folder without it is not whole. Each client's samples are in the simulation's order.
    """
    experiment = experiment.resolved()
    _must_be_free(folder)
    data = data or load(experiment.data)
    training, validation = hold_out_validation(experiment, data)
    split = split_training(experiment, data, training)
    if form == "folders":
        _must_be_names_of_folders(data.classes)
    images = len(split.clients.positions) * (form == "folders")
    size = data.train.images.nbytes + data.test.images.nbytes + OVERHEAD * (len(split.clients) + images)
    must_fit_on_disk(size, folder, "the clients' data takes up to", "make room, or use another --export")
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    clients = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write = write_shard if form == "npz" else write_folder
        for name, own in zip(client_names(len(split.clients)), split.clients, strict=True):
            samples = _some(data.train, training[own])
            clients.append(_written(folder, name, samples, data.classes, write))
        server = _write_server(folder, _some(data.train, validation), data)
        write_text(folder / "experiment.yaml", experiment.to_yaml())
        channels, height, width = data.train.images.shape[1:]
        federation = Federation(
            classes=data.classes,
            clients=clients,
            server=server,
            image_shape=(channels, height, width),
            statistics=channel_statistics(data.train),
            images=len(data.train) + len(data.test),
            data_fingerprint=fingerprint_of(data),
            made_for=dependent_settings(experiment),
        )
        write_federation(folder / MANIFEST, federation)
    except BaseException:
        _clear(folder, made)
        raise
    return federation, data.notes + split.notes


def write_shard(folder: Path, name: str, samples: Samples, classes: list[str]) -> Path:
    """An npz file with a client's samples."""
    path = folder / f"{name}.npz"
    with written_atomically(path) as partial:
        write_npz(partial, {"": samples}, classes)
    return path


def write_folder(folder: Path, name: str, samples: Samples, classes: list[str]) -> Path:
    """A folder CLASS/000012.png with a client's samples, numbered so that sorting by file name gives their order."""
    from PIL import Image

    path, partial = folder / name, folder / f".{name}.partial"
    digits = max(DIGITS, len(str(len(samples) - 1)))
    for label in samples.labels.unique().tolist():
        (partial / classes[label]).mkdir(parents=True)
    for number, (image, label) in enumerate(zip(samples.images.numpy(), samples.labels.tolist(), strict=True)):
        pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
        Image.fromarray(np.ascontiguousarray(pixels)).save(partial / classes[label] / f"{number:0{digits}}.png")
    partial.rename(path)
    return path


def _written(
    folder: Path,
    name: str,
    samples: Samples,
    classes: list[str],
    write: Callable[[Path, str, Samples, list[str]], Path],
) -> ClientFacts:
    path = write(folder, name, samples, classes)
    counts = np.bincount(samples.labels.numpy(), minlength=len(classes)).tolist()
    digest = digest_of(path) if path.is_file() else None
    return ClientFacts(name=name, samples=len(samples), class_counts=counts, file=path.name, sha256=digest)


def _write_server(folder: Path, validation: Samples, data: Dataset) -> ServerFacts:
    path = folder / "server.npz"
    with written_atomically(path) as partial:
        write_npz(partial, {"_train": validation, "_test": data.test}, data.classes)
    return ServerFacts(file=path.name, sha256=digest_of(path))


def _some(samples: Samples, positions: np.ndarray) -> Samples:
    return Samples(samples.images[positions], samples.labels[positions])


def _must_be_free(folder: Path) -> None:
    where = shown(str(folder))
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--export {where} is a file; give a new or an empty folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"--export {where} is not empty; give a new or an empty folder")


def _must_be_names_of_folders(classes: list[str]) -> None:
    for name in classes:
        if not name or name.startswith(".") or "/" in name or "\\" in name or len(name.encode()) > 255:
            raise InputError(f"class '{name[:60]}' cannot be the name of a folder; use --as npz")
    if len({name.casefold() for name in classes}) < len(classes):  # some file systems do not tell Cat from cat
        raise InputError("some classes have the same name; use --as npz")


def _clear(folder: Path, made: list[Path]) -> None:
    """Remove what was written, and the folders that were `made` for it, the innermost first."""
    for path in folder.iterdir() if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    for path in made:
        if path.is_dir():
            path.rmdir()
