"""Files that say themselves whether they are as they were written: whatever is done to them, nothing else is read."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from damage import damages
from fedsieve.errors import InputError
from fedsieve.federate.traffic import Traffic
from fedsieve.files.sealed import TYPES, digest_of_file, load_sealed, save_sealed, write_tensors
from fedsieve.sieve.mask import Mask


def tensors_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    values = torch.arange(6).to(dtype)
    return {"one": values, "two": values.reshape(2, 3), 'three "é"': values[3].clone(), "none": values[:0].clone()}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_library_reads_what_we_write(tmp_path: Path, dtype: torch.dtype) -> None:
    path, tensors = tmp_path / "x.safetensors", {**tensors_of(dtype), "bytes": torch.tensor([1, 2, 3]).byte()}
    assert write_tensors(path, tensors, {"about": "né"}) == digest_of_file(path)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def sealed(path: Path) -> Callable[[], Any]:
    path = path.with_suffix(".safetensors")
    save_sealed(path, '{"round": 3}', tensors_of(torch.float32))
    as_lists = lambda tensors: {name: (one.dtype, one.tolist()) for name, one in sorted(tensors.items())}  # noqa: E731

    def read() -> Any:
        about, tensors = load_sealed(path)
        return about, as_lists(tensors)

    return read


def mask(path: Path) -> Callable[[], Any]:
    path = path.with_suffix(".safetensors")
    bits = torch.tensor([True, False, True])
    Mask.pack({"weight": (3,)}, bits).save(path, "client 1")
    Mask.pack({"weight": (3,)}, ~bits).save(path.with_name("other.safetensors"), "client 2")
    return lambda: Mask.load(path, "client 1").unpack().tolist()


def traffic(path: Path) -> Callable[[], Any]:
    path = path.with_suffix(".json")
    path.write_text(Traffic(12, 345).to_json("the mask of phase one"))
    path.with_name("other.json").write_text(Traffic(12, 345).to_json("the mask of phase two"))
    return lambda: Traffic.from_json(path.read_text(), "the mask of phase one")


@pytest.mark.parametrize("written", [sealed, mask, traffic])
def test_what_is_not_as_it_was_written_is_refused(tmp_path: Path, written: Callable) -> None:
    folder = tmp_path / "alone" / "here"  # so that no file of another test stands beside it
    folder.mkdir(parents=True)
    read = written(folder / "file")
    path = next(folder.glob("file.*"))
    expected, content, refused = read(), path.read_bytes(), 0
    for seed in range(6):
        for damage in damages(path, random.Random(seed)):
            before = {changed: changed.read_bytes() for changed in damage.contents}
            damage.apply()
            try:
                assert read() == expected, damage.kind  # white space, say
            except (ValueError, InputError, OSError):
                refused += 1
            for changed, as_it_was in before.items():
                changed.write_bytes(as_it_was)
    assert path.read_bytes() == content and refused > 80
