"""The manifest of a federation: its classes and clients, and what must be the same everywhere.

In a federation the server and the clients are on different machines, and each has only its own data. The manifest,
federation.json, is what they must know of each other's. `fedsieve split --export` makes one from a data set.
"""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedsieve.config.data_settings import ResizeCenterCrop
from fedsieve.config.dotted import as_text
from fedsieve.config.schema import Experiment
from fedsieve.data.load import Dataset, Samples
from fedsieve.data.pictures import shown
from fedsieve.errors import InputError
from fedsieve.files.atomic import write_text
from fedsieve.files.memory import must_fit

MANIFEST = "federation.json"
STORED_AS_THEY_ARE = ("cifar100", "digits", "npz")  # data sets whose images do not depend on data.image_size
MADE_AGAIN = "make the federation again (`fedsieve split EXPERIMENT --export DIR`)"


def _printable(text: str) -> str:
    if shown(text) != text:
        raise ValueError("it should have no control characters")
    return text


def _plain_name(name: str) -> str:
    if name.startswith(".") or any(one in name for one in "/\\:") or not name.strip():
        raise ValueError("it should be a plain name, without folders")
    return _printable(name)


ClassName = Annotated[str, AfterValidator(_printable)]
PlainName = Annotated[str, Field(max_length=255), AfterValidator(_plain_name)]  # of a file or a client
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Amount = Annotated[int, Field(ge=0, le=10**8)]
Mean = Annotated[float, Field(ge=0, le=1)]
Deviation = Annotated[float, Field(gt=0, le=1)]
Three = Field(min_length=3, max_length=3)
Side = Annotated[int, Field(ge=1, le=2**16)]
Setting = Literal[
    "seed",
    "data.name",
    "data.limit",
    "data.validation",
    "data.evaluate_crop",
    "data.image_size",
    "clients.count",
    "clients.split",
]


class Content(BaseModel):
    """A part of a manifest."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class ClientFacts(Content):
    """What all may know of a client."""

    name: PlainName
    samples: Annotated[int, Field(ge=1, le=10**8)]  # with those that it will hold out
    class_counts: list[Amount] | None = None  # of these samples; None: the client does not tell
    file: PlainName | None = None  # an npz file or a folder
    sha256: Digest | None = None  # of the npz file


class ServerFacts(Content):
    """The server's file, with the validation and the test images."""

    file: PlainName
    sha256: Digest | None = None


class Federation(Content):
    """Who takes part in a federation, and with what."""

    version: Literal[1] = 1
    classes: Annotated[list[ClassName], Field(min_length=1, max_length=10**6)]
    clients: Annotated[list[ClientFacts], Field(min_length=1, max_length=10**8)]
    server: ServerFacts | None = None
    image_shape: tuple[Side, Side, Side] | None = None  # channels, height, width; None: it may differ
    statistics: tuple[Annotated[list[Mean], Three], Annotated[list[Deviation], Three]] | None = None
    images: Amount | None = None  # of the whole data set, with validation, test, and what nobody has
    data_fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None  # of the whole data set
    made_for: dict[Setting, Any] = Field(default_factory=dict)  # settings that the clients' samples depend on

    @model_validator(mode="after")
    def _is_consistent(self) -> "Federation":
        names = set[str]()
        for number, client in enumerate(self.clients):
            if client.name in names:
                raise ValueError(f"two clients are called {client.name}")
            names.add(client.name)
            counts = client.class_counts
            if counts is not None and (len(counts) != len(self.classes) or sum(counts) != client.samples):
                raise ValueError(f"clients.{number}.class_counts do not add up to its samples, one for each class")
        return self

    # What follows from it.

    @cached_property
    def samples(self) -> np.ndarray:
        """Samples of each client, with those that it will hold out."""
        return np.array([client.samples for client in self.clients], dtype=np.int64)

    @cached_property
    def class_counts(self) -> np.ndarray | None:
        """Samples by (client, class), with those that they will hold out; None unless all clients tell."""
        counts = [client.class_counts for client in self.clients]
        return None if any(one is None for one in counts) else np.array(counts, dtype=np.int64)

    def number_of(self, name: str) -> int:
        """The number of the client with this name."""
        for number, client in enumerate(self.clients):
            if client.name == name:
                return number
        names = [client.name for client in self.clients[:3]]
        more = ", …" * (len(self.clients) > len(names))
        raise InputError(f"the federation has no client '{shown(name)[:60]}'; its clients are {', '.join(names)}{more}")

    def told_to(self, client: int) -> "Federation":
        """What a node must know: its own facts, and how many samples the others have together, not which has how many.

        The others are equal, as far as that goes.
        """
        count, own = len(self.clients), self.clients[client]
        rest = int(self.samples.sum()) - own.samples
        equal = [rest // max(1, count - 1) + (number < rest % max(1, count - 1)) for number in range(count - 1)]
        others = [ClientFacts(name=f"other {number}", samples=samples) for number, samples in enumerate(equal)]
        clients = [*others[:client], own, *others[client:]]
        return self.model_copy(update={"clients": clients, "server": None})

    def with_samples(self, client: int, samples: int) -> "Federation":
        """With another number of samples of one client."""
        clients = list(self.clients)
        clients[client] = clients[client].model_copy(update={"samples": samples, "class_counts": None})
        return self.model_copy(update={"clients": clients})

    # Whether the rest goes with it.

    def must_fit(self, experiment: Experiment) -> None:
        """InputError if an experiment is not one that this federation can run."""
        found = dependent_settings(experiment)
        for key, wanted in self.made_for.items():
            if found.get(key) != wanted:
                mine, theirs = (shown(as_text(value))[:100] for value in (found.get(key), wanted))
                what = f"{key} is {mine}, and the federation was made for {theirs}"
                raise InputError(f"{what}; use that, or {MADE_AGAIN}")
        if experiment.clients.count != len(self.clients):
            what = f"clients.count is {experiment.clients.count:,}, and the federation has {len(self.clients):,}"
            raise InputError(f"{what}; use clients.count={len(self.clients)}")
        if experiment.data.normalize == "dataset" and self.statistics is None:
            raise InputError(
                "data.normalize: dataset needs the mean and deviation of all clients' images, which the federation "
                "does not have; use data.normalize: imagenet"
            )

    def must_be_of(self, client: int, samples: Samples) -> None:
        """InputError unless these may be the samples of a client."""
        facts = self.clients[client]
        if len(samples) != facts.samples:
            what = f"{facts.name} has {len(samples):,} samples here, and {facts.samples:,} in the federation"
            raise InputError(f"{what}; give the data that it was made with, or {MADE_AGAIN}")
        self._must_be_like_others(facts.name, samples)
        here = np.bincount(samples.labels.numpy(), minlength=len(self.classes))
        there = here if facts.class_counts is None else np.array(facts.class_counts)
        for label in np.flatnonzero(here != there)[:1]:
            what = f"{here[label]:,} of class {self.classes[label]} here, and {there[label]:,} in the federation"
            raise InputError(f"{facts.name} has other samples: {what}; give the data that it was made with")

    def must_have(self, data: Dataset) -> None:
        """InputError unless this may be the server's data."""
        if data.classes != self.classes:
            raise InputError("the server's data has other classes than the federation; read it with the federation's")
        for samples in (data.train, data.test):
            self._must_be_like_others("the server", samples)

    def _must_be_like_others(self, who: str, samples: Samples) -> None:
        shape = tuple(samples.images.shape[1:])
        if len(samples) and self.image_shape is not None and shape != self.image_shape:
            mine, others = (" x ".join(map(str, one)) for one in (shape, self.image_shape))
            what = f"{who} has images of {mine} numbers (channels, height, width), and the federation of {others}"
            raise InputError(f"{what}; give images of that shape")
        if len(samples) and not 0 <= int(samples.labels.min()) <= int(samples.labels.max()) < len(self.classes):
            raise InputError(f"{who} has labels that are not 0 to {len(self.classes) - 1}; number them by the classes")


def dependent_settings(experiment: Experiment) -> dict[Setting, Any]:
    """The settings that decide which samples, and which images, each client has.

    `clients.holdout` is not among them: clients have what they will hold out, and each chooses it by itself.
    """
    data, clients = experiment.data, experiment.clients.model_dump(mode="json")
    found: dict[Setting, Any] = {
        "seed": experiment.seed,
        "data.name": data.name,
        "data.limit": data.limit,
        "data.validation": data.validation,
        "clients.count": clients["count"],
        "clients.split": clients["split"],
    }
    if data.name not in STORED_AS_THEY_ARE:  # but as squares, whose side one of these says
        found["data.evaluate_crop"] = data.model_dump(mode="json")["evaluate_crop"]
        if not isinstance(data.evaluate_crop, ResizeCenterCrop):
            found["data.image_size"] = data.image_size
    return found


def client_names(count: int) -> list[str]:
    """`client-0`, `client-1`, …, with zeros in front, so that they are sorted by number."""
    return [f"client-{number:0{len(str(count - 1))}}" for number in range(count)]


def write_federation(path: Path, federation: Federation) -> None:
    write_text(path, federation.model_dump_json(indent=1) + "\n")


def read_federation(path: Path) -> Federation:
    """A manifest, with all checks."""
    where = shown(str(path))[:200]
    try:
        if not path.is_file():
            raise InputError(f"{where} is no file; give the {MANIFEST} that `fedsieve split --export` has written")
        must_fit(20 * path.stat().st_size, f"{where} does not fit into memory", f"give a {MANIFEST}")
        return Federation.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:  # pydantic's are ValueErrors
        raise InputError(f"{where} is damaged, or no federation ({_reason(error)}); {MADE_AGAIN}") from None


def federation_in(text: str, source: str) -> Federation:
    """A manifest that was sent."""
    try:
        return Federation.model_validate_json(text)
    except ValueError as error:
        raise InputError(f"{source} has sent no federation ({_reason(error)}); update it") from None


def _reason(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return type(error).__name__
    problem = error.errors(include_url=False)[0]
    where = ".".join(map(str, problem["loc"]))
    return shown(f"{f'{where}: ' if where else ''}{problem['msg'].removeprefix('Value error, ')}")[:200]


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def must_be_whole(path: Path, facts: ClientFacts | ServerFacts) -> None:
    """InputError if a file is not the one that the manifest names."""
    if facts.sha256 is not None and path.is_file() and digest_of(path) != facts.sha256:
        raise InputError(f"{shown(str(path))} is not the file that the federation was made with; copy it again")
