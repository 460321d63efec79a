"""`fedsieve evaluate` of a federation's run, whose training images are elsewhere."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from federation_nodes import HEADS, FederationHere, Maker, federation_here
from fedsieve.model.vit import ViT, ViTShape, initialize

NONE = "the server of this federation has no images{}; give some, such as data.name=npz data.path=FILE"
SHAPE = ViTShape(image_size=16, patch_size=8, width=64, depth=3, heads=1, hidden=128, layer_scale=True)
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def federation(
    experiment: Maker, tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FederationHere]:
    with federation_here(experiment, tmp_path, backbone, monkeypatch) as here:
        here.begin(*HEADS)
        yield here


def refused(found: tuple[int, str, str]) -> str:
    code, printed, error = found
    assert code == 2 and not printed and error.startswith("error: ") and error.count("\n") == 1
    return error.removeprefix("error: ").strip()


def test_with_the_images_of_the_server(federation: FederationHere, fedsieve: Command, images: Path) -> None:
    federation.run(*HEADS)
    run = str(federation.place / "federated")
    code, printed, _ = fedsieve("evaluate", run, "--json")
    assert code == 0
    for figure in json.loads(printed).values():
        assert figure["measured"] == pytest.approx(figure["recorded"])
    recorded = json.loads(printed)["test_loss"]["recorded"]
    manifest = federation.shards / "federation.json"
    manifest.rename(federation.shards / "elsewhere.json")
    assert refused(fedsieve("evaluate", run)) == NONE.format(f" (its manifest {manifest} is not there)")
    assert (federation.place / "federated/roster.json").exists()

    # The same test images, normalized as the nodes did, whatever is beside them.
    with np.load(images) as file:
        arrays = {key: file[key] for key in file}
    arrays["x_train"] = arrays["x_train"] // 2
    np.savez("mine.npz", **arrays)
    code, printed, _ = fedsieve("evaluate", run, "data.name=npz", "data.path=mine.npz", "--json")
    assert code == 0 and json.loads(printed)["test_loss"]["measured"] == pytest.approx(recorded)
    np.savez("other.npz", **arrays, names=list("abcd"))
    said = refused(fedsieve("evaluate", run, "data.name=npz", "data.path=other.npz"))
    assert said == "these data have other classes (a, b, c, d) than the federation (0, 1, 2, 3); give some that fit"


@pytest.mark.parametrize("has_manifest", [True, False])
def test_without_images_of_a_server(federation: FederationHere, fedsieve: Command, has_manifest: bool) -> None:
    manifest = federation.shards / "federation.json"
    facts = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**facts, "server": None}))
    plain = [] if has_manifest else ["data.normalize=imagenet", "data.name=digits"]
    federation.run(*HEADS, *plain, manifest=has_manifest)
    run = str(federation.place / "federated")
    assert refused(fedsieve("evaluate", run)) == NONE.format("")
    if not has_manifest:  # the name would be that of other data
        assert refused(fedsieve("evaluate", run, "data.path=mine.npz")) == NONE.format("")


def test_an_exported_model_prepares_images_as_nodes_did(
    experiment: Maker, fedsieve: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the mean and deviation of all training images, which are not here."""
    network = ViT(SHAPE)  # transformers knows whole ratios only
    initialize(network, torch.Generator().manual_seed(0))
    backbone = tmp_path / "whole.safetensors"
    save_file({name: tensor.clone() for name, tensor in network.state_dict().items()}, backbone)
    changes = [*HEADS, f"model.backbone={backbone}"]
    with federation_here(experiment, tmp_path, backbone, monkeypatch) as federation:
        federation.begin(*changes)
        manifest, statistics = federation.shards / "federation.json", [[0.4, 0.5, 0.6], [0.2, 0.25, 0.3]]
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "statistics": statistics}))
        federation.run(*changes)
    code, _, said = fedsieve("export", str(federation.place / "federated"), "--to", "exported")
    assert code == 0, said
    config = json.loads(Path("exported/preprocessor_config.json").read_text())
    assert [config["image_mean"], config["image_std"]] == statistics
