"""Who has which images: in a simulation, at the server of a federation, and at its nodes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.data.load import Dataset, Samples
from fedsieve.data.manifest import ClientFacts, Federation
from fedsieve.data.roles import Roles, roles_of, roles_of_node, roles_of_server
from fedsieve.data.shards import read_server_data, read_shard
from fedsieve.errors import InputError
from fedsieve.experiment.export_split import export_split
from fedsieve.observe.callbacks import Callback

Maker = Callable[..., Experiment]
SPLITS = {
    "iid": "clients.split=iid",
    "classes": "clients.split={kind: classes, per_client: 2}",
    "dirichlet": "clients.split={kind: dirichlet, alpha: 0.5}",
    "uneven": "clients.split={kind: dirichlet, alpha: 0.5, balanced: false}",
}


def context_of(experiment: Experiment, roles: Roles | None = None) -> RunContext:
    return RunContext(experiment, Callback(), roles=roles)


def pictures(context: RunContext, positions: np.ndarray) -> list[tuple[bytes, int]]:
    """Images and labels at positions of the training set, in order."""
    train = context.data.train
    return [(bytes(train.images[k].numpy()), int(train.labels[k])) for k in positions.tolist()]


def node_of(settings: Experiment, federation: Federation, place: Path, client: int) -> RunContext:
    path = place / str(federation.clients[client].file)
    samples, _ = read_shard(path, settings.data, federation.classes, federation.image_shape)
    return context_of(settings, roles_of_node(settings, federation, samples, client))


@pytest.mark.parametrize("more", ["clients.holdout=0", "clients.holdout=0.2", "data.limit=101"])
@pytest.mark.parametrize("split", SPLITS)
def test_nodes_have_what_clients_of_the_simulation_have(
    experiment: Maker, tmp_path: Path, split: str, more: str
) -> None:
    settings = experiment(SPLITS[split], more, "data.augment=[horizontal_flip]").resolved()
    whole = context_of(settings)
    federation, _ = export_split(settings, tmp_path / "out")
    # the truth, from the parts that the split is made of
    for client in range(6):
        node = node_of(settings, federation, tmp_path / "out", client)
        own = whole.training[whole.partition.clients[client]]
        assert pictures(node, node.training[node.partition.clients[client]]) == pictures(whole, own)
        for other in set(range(6)) - {client}:
            assert not len(node.partition.clients[other])
        if whole.held_out is None:
            assert node.held_out is None and len(node.data.train) == len(own)
        else:
            assert node.held_out is not None
            held = whole.training[whole.held_out[client]]
            assert pictures(node, node.training[node.held_out[client]]) == pictures(whole, held)
            assert len(node.data.train) == len(own) + len(held)
        same_inputs(whole, node, client)
        assert node.sizes.tolist() == whole.sizes.tolist()
        assert (node.transform.mean, node.transform.std) == (whole.transform.mean, whole.transform.std)
        assert node.roles.training_samples == whole.roles.training_samples == federation.samples.sum()
        assert not len(node.data.test) and not len(node.validation) and node.data.classes == whole.data.classes


def same_inputs(whole: RunContext, node: RunContext, client: int) -> None:
    """Clients train on the same numbers: augmented images, and cached outputs at every depth."""
    for depth in (0, 2, 4):
        ours, theirs = (context.client_data(client, depth) for context in (node, whole))
        batch = torch.randperm(len(ours.labels), generator=torch.Generator().manual_seed(client))[:7]
        mine, others = (data.inputs(batch, torch.Generator().manual_seed(3)) for data in (ours, theirs))
        assert torch.equal(mine, others) and torch.equal(ours.labels, theirs.labels)


@pytest.mark.parametrize("sample", [None, 1, 17, 60, 200])
def test_the_server_has_the_validation_and_test_images(experiment: Maker, tmp_path: Path, sample: int | None) -> None:
    settings = experiment(f"evaluate.sample={'null' if sample is None else sample}").resolved()
    whole = context_of(settings)
    federation, _ = export_split(settings, tmp_path / "out")
    data = read_server_data(tmp_path / "out" / "server.npz", federation.classes)
    server = context_of(settings, roles_of_server(settings, federation, data))
    assert pictures(server, server.validation) == pictures(whole, whole.validation)
    assert len(server.validation) == 60 == len(server.data.train)
    assert pictures(server, server.validation_sample) == pictures(whole, whole.validation_sample)
    assert torch.equal(server.data.test.images, whole.data.test.images)
    assert torch.equal(server.data.test.labels, whole.data.test.labels)
    assert not len(server.training) and not any(map(len, server.partition.clients)) and len(server.sizes) == 6
    assert server.sizes.tolist() == whole.sizes.tolist() and server.held_out is None
    assert server.holdings() == whole.holdings()
    assert server.roles.data_fingerprint == whole.roles.data_fingerprint
    assert server.fingerprint == node_of(settings, federation, tmp_path / "out", 2).fingerprint
    for part, ours, theirs in (("train", server.validation, whole.validation), ("test", np.arange(60), np.arange(60))):
        for depth in (0, 2, 4):
            right, loss = server.score(part, ours, depth)
            truth, true_loss = whole.score(part, theirs, depth)
            assert torch.equal(right, truth) and loss == true_loss


def test_a_server_without_data(experiment: Maker, tmp_path: Path) -> None:
    settings = experiment().resolved()
    federation, _ = export_split(settings, tmp_path / "out")
    server = context_of(settings, roles_of_server(settings, federation, None))
    assert server.data.train.images.shape == (0, 3, 16, 16) and not len(server.data.test)
    assert not len(server.validation) and not len(server.validation_sample)
    rows = server.frozen_outputs("train", np.empty(0, np.int64), server.feature_depth)
    assert not len(rows(torch.empty(0, dtype=torch.int64)))
    best = experiment("evaluate.keep=best").resolved()
    with pytest.raises(InputError, match=r"evaluate\.keep: best needs validation images, and the server has none"):
        roles_of_server(best, federation, None)


def test_what_is_held_out_by_class_is_not_known(experiment: Maker, tmp_path: Path) -> None:
    settings = experiment("clients.holdout=0.3").resolved()
    federation, _ = export_split(settings, tmp_path / "out")
    server = context_of(settings, roles_of_server(settings, federation, None))
    assert server.holdings() == {"classes": ["0", "1", "2", "3"], "count": 6, "clients": []}
    assert server.sizes.tolist() == context_of(settings).sizes.tolist() == [21] * 6  # of 30
    assert server.held_out is not None and not len(server.held_out.positions)


def data_of(labels: list[int]) -> Samples:
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 3, 16, 16), dtype=np.uint8)
    return Samples(torch.from_numpy(images), torch.tensor(labels))


def by_hand(**more: object) -> Federation:
    clients = [ClientFacts(name=f"hospital-{k}", samples=3, class_counts=[2, 1]) for k in range(6)]
    return Federation(classes=["ill", "well"], clients=clients, **more)


@pytest.mark.parametrize(
    ("labels", "error"),
    [
        ([0, 0, 1, 1], "hospital-4 has 4 samples here, and 3 in the federation"),
        ([0, 1, 1], "hospital-4 has other samples: 1 of class ill here, and 2 in the federation"),
        ([0, 0, 2], "hospital-4 has labels that are not 0 to 1"),
    ],
)
def test_other_data_than_the_federation_knows(experiment: Maker, labels: list[int], error: str) -> None:
    settings = experiment("data.normalize=imagenet").resolved()
    with pytest.raises(InputError, match=error):
        roles_of_node(settings, by_hand(), data_of(labels), 4)


def test_other_images_than_the_federation_has(experiment: Maker) -> None:
    settings = experiment("data.normalize=imagenet").resolved()
    with pytest.raises(InputError, match=r"hospital-4 has images of 3 x 16 x 16 .* and the federation of 1 x 8 x 8"):
        roles_of_node(settings, by_hand(image_shape=(1, 8, 8)), data_of([0, 1, 0]), 4)
    other = Dataset(data_of([0]), data_of([1]), ["cat", "dog"])
    with pytest.raises(InputError, match="the server's data has other classes"):
        roles_of_server(settings, by_hand(), other)


def test_statistics_of_all_images_are_needed(experiment: Maker) -> None:
    with pytest.raises(InputError, match=r"data\.normalize: dataset needs the mean and deviation"):
        roles_of_node(experiment().resolved(), by_hand(), data_of([0, 1, 0]), 4)
    known: Tensor = data_of([0, 1, 0]).images
    given = by_hand(statistics=([0.1, 0.2, 0.3], [0.4, 0.5, 0.6]))
    node = context_of(experiment().resolved(), roles_of_node(experiment().resolved(), given, data_of([0, 1, 0]), 4))
    expected = (known.double() / 255 - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor(
        [0.4, 0.5, 0.6]
    ).view(3, 1, 1)
    torch.testing.assert_close(node.transform.evaluation(known).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_simulations_fingerprints_are_what_they_were(experiment: Maker) -> None:
    """As computed before data had roles, so that older runs can be resumed and compared."""
    from xxhash import xxh3_128

    context = context_of(experiment().resolved())
    train, test = context.data.train, context.data.test
    digest = xxh3_128(f"{train.fingerprint} {test.fingerprint} {context.data.classes}".encode())
    digest.update(train.labels.numpy().tobytes() + test.labels.numpy().tobytes())
    assert context.roles.data_fingerprint == digest.hexdigest()
    digest.update(context.model.vector.numpy().tobytes())
    assert context.fingerprint == digest.hexdigest()
    assert roles_of(context.experiment, context.data).data_fingerprint == context.roles.data_fingerprint
