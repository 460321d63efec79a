"""Reading the files in runs' folders: types are checked, and files that were changed since the run are refused.

A finished run's result.json holds the SHA-256 of the files beside it (`files`, and `model_sha256` for the model) and
one of its own content (`digest`). Runs that were finished before there were digests are read without that check.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedsieve.config.experiment_file import parse_kept
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError

WITH_DIGEST = ("experiment.yaml", "metrics.jsonl", "split.json")  # the model's is `model_sha256`
PLUGINS = "plugins"  # the folder with copies of the run's plugins, for people; only what the user names is executed
Digests = Mapping[str, str]  # by file name; none for an unfinished or older run
FIGURES = (  # of a result, those that make sense as a mean
    "test_accuracy",
    "test_loss",
    "val_accuracy",
    "val_loss",
    "best_val_accuracy",
    "bytes_up",
    "bytes_down",
    "seconds",
)

# ------------------------------------------------------------------------------- what stands in the files

Number = Annotated[float, Field(ge=-1e100, le=1e100)]  # so that its square is finite
Count = Annotated[int, Field(ge=0, le=2**53)]  # so that sums of them fit into 64 bits
Shares = dict[str, Number | None]


class Content(BaseModel):
    """What a file, or a part of it, must contain; it may contain more."""

    model_config = ConfigDict(strict=True)


class Layers(Content):
    blocks: dict[str, Shares]
    rest: Shares


class Line(Content):
    """A round, in metrics.jsonl."""

    phase: str
    round: Count
    val_accuracy: Number | None
    bytes_up: Count
    bytes_down: Count
    seconds: Number
    val_loss: Number | None = None
    test_accuracy: Number | None = None
    test_loss: Number | None = None
    train_loss: Number | None = None
    drift_mean: Number | None = None
    cosine: Number | None = None
    layers: Layers | None = None


class PhaseResult(Content):
    name: str
    rounds: Count
    best_round: Count | None
    best_val_accuracy: Number | None
    best_val_loss: Number | None
    test_accuracy: Number | None
    test_loss: Number | None
    bytes_up: Count
    bytes_down: Count
    seconds: Number


class ClientsResult(Content):
    mean: Number | None
    worst_tenth: Number | None
    deviation: Number | None
    accuracies: list[Number | None]


class Result(Content):
    """result.json."""

    test_accuracy: Number | None
    test_loss: Number | None
    val_accuracy: Number | None
    val_loss: Number | None
    best_val_accuracy: Number | None
    bytes_up: Count
    bytes_down: Count
    seconds: Number
    seed: int
    model_sha256: str
    phases: Annotated[list[PhaseResult], Field(min_length=1)]
    clients: ClientsResult | None = None
    data_fingerprint: str | None = None
    files: dict[str, str] | None = None
    digest: str | None = None


class Split(Content):
    """split.json."""

    classes: list[str]
    count: Count
    clients: list[dict[str, Count]]


# ------------------------------------------------------------------------------------------- digests


def with_digests(result: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """The result of a run that ends now, with the digests of the files in its folder and one of itself."""
    plugins = sorted(f"{PLUGINS}/{file.name}" for file in (run / PLUGINS).glob("[!.]*.py"))
    there = [name for name in (*WITH_DIGEST, *plugins) if (run / name).exists()]
    whole = {**result, "files": {name: sha256_of(run / name) for name in there}}
    return {**whole, "digest": digest_of_result(whole)}


def digest_of_result(result: Mapping[str, Any]) -> str:
    """SHA-256 of the result as JSON without spaces, with sorted keys and without the key `digest`."""
    rest = {key: value for key, value in result.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests_in(result: Mapping[str, Any] | None) -> Digests:
    """The digests of a run's files, from its result; none if it is not finished."""
    return (result or {}).get("files") or {}


def digests_of(run: Path) -> Digests:
    return digests_in(read_result(run) if (run / "result.json").exists() else None)


def check_model(path: Path) -> None:
    """Refuse a model.safetensors that is not the one that the run wrote, if there is a result.json next to it."""
    if not path.with_name("result.json").exists():
        return
    expected = read_result(path.parent)["model_sha256"]
    try:
        found = sha256_of(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    if found != expected:
        raise _changed(path)


# --------------------------------------------------------------------------------------- the files of a run


def read_result(run: Path) -> dict[str, Any]:
    path = run / "result.json"
    if not path.exists():
        raise InputError(f"{run} is no finished run (it has no result.json); give the folder of one")
    result = _json(_text(path), path)
    _require(Result, result, path)
    digest = digest_of_result(result)
    if ("files" in result) != ("digest" in result) or result.get("digest", digest) != digest:
        raise _changed(path)
    return result


def read_experiment(run: Path, digests: Digests | None = None) -> Experiment:
    """The settings of a run. `digests` are those of its files; if not given, they are looked up."""
    path = run / "experiment.yaml"
    if not path.exists():
        raise InputError(f"{run} is no run (it has no experiment.yaml); give the folder of one")
    text = _checked_text(path, digests)
    try:
        return parse_kept(text, str(path))
    except InputError as error:
        raise error if str(path) in str(error) else InputError(f"{path}: {error}") from None


def read_metrics(run: Path, digests: Digests | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. If the last one is cut short in an unfinished run, it is left out."""
    path = run / "metrics.jsonl"
    is_finished = (run / "result.json").exists()  # checked first: the run may end while its metrics are read
    if not path.exists() and not is_finished:
        return []
    *texts, rest = _checked_text(path, digests).split("\n")
    if rest and (is_finished or _is_json(rest)):
        texts.append(rest)
    lines = []
    for place, text in enumerate(texts, start=1):
        line = _json(text, path, f"line {place}: ")
        _require(Line, line, path, f"line {place}: ")
        lines.append(line)
    return lines


def read_split(run: Path, digests: Digests | None = None) -> dict[str, Any] | None:
    """Which client holds what, from split.json; None for an older run without this file."""
    path = run / "split.json"
    digests = digests_of(run) if digests is None else digests
    if not path.exists() and path.name not in digests:
        return None
    split = _json(_checked_text(path, digests), path)
    _require(Split, split, path)
    return split


# --------------------------------------------------------------------------------------------- reading


def _checked_text(path: Path, digests: Digests | None) -> str:
    """The text of a run's file; InputError if it was changed since the run ended."""
    digests = digests_of(path.parent) if digests is None else digests
    text = _text(path)
    if path.name in digests and hashlib.sha256(text.encode()).hexdigest() != digests[path.name]:
        raise _changed(path)
    return text


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # as it is: read_text would turn other ends of lines into \n
    except UnicodeDecodeError:
        raise damaged(path, "this is not text") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _json(text: str, path: Path, place: str = "") -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise damaged(path, f"{place}this is nested too deeply") from None
    except ValueError:
        raise damaged(path, f"{place}this is not JSON") from None


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON, though Python reads it")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _require(kind: type[Content], found: Any, path: Path, place: str = "") -> None:
    """Refuse what was read from a file, or from a place in it, unless it is of this kind."""
    try:
        kind.model_validate(found)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        *_, key = ["", *map(str, problem["loc"])]
        where = ".".join(map(str, problem["loc"]))
        if problem["type"] == "missing":
            why = f"there is no {key}"
        elif not where:
            why = "this is no object"
        else:
            why = f"{where} is {str(problem['input'])[:40]}"
        raise damaged(path, place + why) from None


def damaged(path: Path, why: str) -> InputError:
    return InputError(f"{path} is damaged, or older than this version ({why}); leave the run out or repeat it")


def _changed(path: Path) -> InputError:
    return InputError(
        f"{path} was changed since the run ended (its digest is not the one in result.json); "
        "bring back what it was, leave the run out or repeat it"
    )


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path} cannot be read ({error.strerror}); leave the run out or repeat it")
