"""Clients at nodes end in the same bits as their simulation, whatever the experiment uses."""

import shutil

import pytest

from federation_nodes import FederationHere
from fedsieve.experiment import run
from listeners import Listener
from small_runs import edit, outcome

CARRY = edit("scope: client", more=", optimizer_state: carry")
CASES = {
    "dense, some clients a round": [],
    "each client's mask, carried momentum": [CARRY, "clients.fraction=1.0"],
    "8 bits, error feedback": [CARRY, "wire.values=int8", "clients.fraction=1.0"],
    "a mask that looks at no data": [edit("scope: server, rule: smallest_magnitude")],
    "a mask from a seed": [edit("scope: server, rule: random")],
    "a mask from everybody": [edit("scope: federated")],
    "a mask from everybody, each round": [edit("scope: federated, refresh: round, unit: row")],
    "SCAFFOLD": ["phases.1.method=scaffold", "phases.1.local.momentum=0", "clients.fraction=1.0"],
    "FedNova": ["phases.1.method=fednova", "clients.fraction=1.0"],
    "Fisher mixing": ["phases.1.method={fisher_mixing: {fisher: {samples: 20}}}"],
    "Fisher mixing under a mask": [
        edit("scope: federated", more=", method: {fisher_mixing: {fisher: {samples: 20}}}"),
    ],
    "in secret": ["clients.fraction=0.75", "clients.secure=zero_sum"],
    "in secret, a mask from everybody": [edit("scope: federated"), "clients.fraction=0.75", "clients.secure=zero_sum"],
    "ridge": ["model.head={ridge: {penalty: 1.0}}", "phases.*.train={blocks: [2]}"],
    "by losses": ["clients.select={high_loss: {candidates: 4}}"],
    "evaluated at clients": [
        "clients.holdout=0.2",
        "evaluate.clients=true",
        "evaluate.keep=best",
        "evaluate.test=each",
    ],
    "all weights each round": ["wire.broadcast=full"],
    "frozen blocks": ["phases.1.train={blocks: [2]}", "data.augment=[horizontal_flip]"],
    "normalized by the manifest": ["data.normalize=dataset"],
    "clients know no backbone, failures": ["clients.have_backbone=false", "clients.fail_rate=0.3"],
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_nodes_make_no_difference(changes: list[str], federation: FederationHere) -> None:
    here, there = Listener(), Listener()
    changes = ["clients.count=4", *changes]
    expected = federation.simulate(*changes, callback=here)
    federation.begin(*changes)
    result = federation.run(*changes, callback=there)
    assert outcome(federation.place / "simulated", expected) == outcome(federation.place / "federated", result)
    assert sum(len(federation.node(client).jobs("train")) for client in range(4)) >= 6
    assert sorted(here.warnings) == sorted(there.warnings)


def test_a_mask_from_a_file(federation: FederationHere) -> None:
    """The server sends it: nodes do not have the file."""
    few = ["clients.count=4", edit("scope: server, rule: random")]
    run(federation.experiment(*few), federation.place / "drawn")
    file = federation.place / "file.safetensors"
    shutil.move(federation.place / "drawn" / "masks" / "edit" / "shared.safetensors", file)
    mask = edit("scope: server").replace("sparsity: 0.8, ", "").replace("scope: server", f"file: {file}")
    changes = ["clients.count=4", mask]
    expected = federation.simulate(*changes)
    federation.begin(*changes)
    result = federation.run(*changes)
    assert outcome(federation.place / "simulated", expected) == outcome(federation.place / "federated", result)
    assert not any("file.safetensors" in str(path) for path in federation.link.folder.rglob("*"))
