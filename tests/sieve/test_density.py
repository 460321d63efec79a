"""Masks layer by layer, and what runs write down of them."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from fedsieve.sieve.density import MeanDensity, density
from fedsieve.sieve.mask import Mask
from listeners import Listener

SHAPES = {
    "backbone.blocks.0.attn.qkv.weight": (6, 2),
    "backbone.blocks.0.norm1.weight": (2,),
    "backbone.blocks.0.norm2.weight": (3,),
    "backbone.blocks.1.mlp.fc1.weight": (4, 2),
    "head.weight": (3, 2),
}
OWN_MASKS = "phases.1.mask={sparsity: 0.5, calibration_rounds: 1, fisher: {samples: 8}}"


def random_mask(seed: int) -> Mask:
    generator = torch.Generator().manual_seed(seed)
    return Mask.pack(SHAPES, torch.rand(31, generator=generator) < 0.4)


def test_a_third_of_qkv_is_a_layer_of_its_own() -> None:
    mask = random_mask(0)
    layers = density(mask)
    qkv = mask["backbone.blocks.0.attn.qkv.weight"].double()
    for name, rows in {"q": qkv[:2], "k": qkv[2:4], "v": qkv[4:]}.items():
        assert layers.blocks[0][name] == pytest.approx(float(rows.mean()))
    norms = [mask[f"backbone.blocks.0.norm{k}.weight"] for k in (1, 2)]
    assert layers.blocks[0]["norms"] == pytest.approx(float(torch.cat(norms).double().mean()))
    assert layers.blocks[1]["q"] is None and layers.rest["patch"] is None
    assert layers.rest["head"] == pytest.approx(float(mask["head.weight"].double().mean()))
    assert layers.total == pytest.approx(mask.density)


def test_the_mean_of_densities_is_what_averaging_them_one_by_one_gives() -> None:
    masks = [random_mask(seed) for seed in (1, 2, 2, 3)]
    masks[2] = masks[1]  # the same object twice, as of clients that share one
    mean = MeanDensity(SHAPES)
    for mask in masks:
        mean.add(mask)
    found, single = mean.layers(), [density(mask) for mask in masks]
    for block in (0, 1):
        for column, share in found.blocks[block].items():
            values = [one.blocks[block][column] for one in single]
            assert share == (None if values[0] is None else pytest.approx(np.mean(values)))
    assert found.total == pytest.approx(np.mean([mask.density for mask in masks]))


@pytest.mark.parametrize(("scope", "secure"), [("client", "none"), ("federated", "none"), ("federated", "zero_sum")])
def test_metrics_say_how_dense_masks_are_in_the_first_and_the_last_round(
    scope: str, secure: str, experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    changes = [f"phases.1.mask.scope={scope}", f"clients.secure={secure}", "phases.1.rounds=3"]
    listener = Listener()
    run(experiment(OWN_MASKS, *changes), tmp_path / "run", callback=listener)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert ["layers" in line for line in lines] == [False] * 3 + [True, False, True]
    files = {
        "client": [tmp_path / f"run/masks/all/client-{client:06d}.safetensors" for client in lines[-1]["clients"]],
        "federated": [tmp_path / "run/masks/all/shared.safetensors"],
    }
    announced = [note for note in listener.notes if "each client's mask is kept" in note]
    assert len(announced) == (scope == "client")
    if announced:
        (kilobytes,) = re.findall(r"takes ([0-9.]+) kB on disk, .* once all 6 have taken part", announced[0])
        assert float(kilobytes) * 1000 == pytest.approx(files[scope][0].stat().st_size, rel=0.1)
    truth = [density(Mask.load(file)) for file in files[scope]]
    for block, row in lines[-1]["layers"]["blocks"].items():
        for column, share in row.items():
            assert share == pytest.approx(np.mean([one.blocks[int(block)][column] for one in truth]), abs=1e-5)
    assert lines[-1]["layers"]["rest"]["head"] == pytest.approx(np.mean([one.rest["head"] for one in truth]), abs=1e-5)


def test_the_split_is_written_down_at_the_start(experiment: Callable[..., Experiment], tmp_path: Path) -> None:
    settings = experiment("clients.split={kind: classes, per_client: 2}")
    run(settings, tmp_path / "run")
    split = json.loads((tmp_path / "run/split.json").read_text())
    assert split["classes"] == list("0123") and split["count"] == len(split["clients"]) == 6
    assert all(len(held) == 2 for held in split["clients"])
    assert sum(sum(held.values()) for held in split["clients"]) == 180  # 240 less the quarter for validation


def test_of_very_many_clients_only_the_first_are_written_down(
    experiment: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsieve.context.WRITTEN_DOWN", 4)
    run(experiment("phases.0.rounds=1", "phases.1.rounds=1"), tmp_path / "run")
    split = json.loads((tmp_path / "run/split.json").read_text())
    assert split["count"] == 6 and len(split["clients"]) == 4
