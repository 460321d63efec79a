"""The backbone that comes with fedsieve is a pretrained one."""

from importlib import resources

import torch

from fedsieve.config.data_settings import DataSettings
from fedsieve.data.load import Samples, load
from fedsieve.data.transform import Transform
from fedsieve.model.backbone import load_backbone
from fedsieve.model.vit import ViT, initialize


@torch.no_grad()
def probe(network: ViT, train: Samples, test: Samples, transform: Transform) -> float:
    """Test accuracy of ridge regression on standardised features, by hand."""
    x, x_test = (network(transform.evaluation(part.images)).double() for part in (train, test))
    mean, std = x.mean(0), x.std(0) + 1e-6
    x, x_test = (torch.cat(((one - mean) / std, torch.ones(len(one), 1)), dim=1) for one in (x, x_test))
    targets = torch.nn.functional.one_hot(train.labels, 10).double()
    weights = torch.linalg.solve(x.T @ x + torch.eye(x.shape[1]), x.T @ targets)
    return float(((x_test @ weights).argmax(1) == test.labels).double().mean())


def test_small_and_truly_pretrained() -> None:
    file = resources.files("fedsieve") / "model" / "pico.safetensors"
    assert len(file.read_bytes()) <= 6e6
    pico = load_backbone("pico", 32)
    assert isinstance(pico, ViT) and len(pico.blocks) == 12 and pico.shape.positions == 17
    data = load(DataSettings(name="digits"))
    few = Samples(data.train.images[:300], data.train.labels[:300])
    transform = Transform(DataSettings(image_size=32), data.train)
    untrained = ViT(pico.shape)
    initialize(untrained, torch.Generator().manual_seed(0))
    learnt, random = (probe(network.eval(), few, data.test, transform) for network in (pico, untrained))
    assert learnt > random + 0.05, (learnt, random)
