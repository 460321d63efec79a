"""`compile: true` against the same experiment without, and what it does where it cannot work."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.errors import InputError
from fedsieve.experiment import run
from fedsieve.model import compiled
from fedsieve.model.flat import FlatModel
from fedsieve.model.vit import ViT, ViTShape, initialize
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.model_file import load_classifier
from fedsieve.sieve.sensitivity import sensitivity

Maker = Callable[..., Experiment]
TWO_BLOCKS = ViTShape(image_size=8, patch_size=4, width=16, depth=2, heads=1, hidden=24)
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler"
)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half of torch.compile, which finds out what to compile and when; making C++ of it takes too long."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")


def all_phase(mask: str = "null") -> str:
    """Epochs of 30 samples in batches of 16: the second batch is smaller."""
    local = "{epochs: 1, batch_size: 16, lr: 0.02}"
    return f"phases=[{{name: all, train: all, rounds: 1, local: {local}, mask: {mask}}}]"


def weights(folder: Path) -> Tensor:
    return FlatModel(load_classifier(folder)).vector


def graphs() -> int:
    """How many pieces of code have been compiled so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


class Notes(Callback):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@needs_compiler
def test_compiled_blocks_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing, on the way forward only: the rest would take a minute."""
    monkeypatch.setattr(compiled, "_must_work", lambda device: None)  # it is about to be seen
    networks = [ViT(TWO_BLOCKS) for _ in range(2)]
    for network in networks:
        initialize(network, torch.Generator().manual_seed(0))
    compiled.compile_blocks(networks[1], "cpu")
    before = graphs()
    for size in (3, 5):
        images = torch.randn(size, 3, 8, 8)
        with torch.no_grad():
            plain, other = (network(images) for network in networks)
        torch.testing.assert_close(plain, other)
    assert graphs() - before == 1


@pytest.mark.parametrize("mask", ["null", "{sparsity: 0.5, rule: random}"])
def test_training_is_that_of_the_network_as_written(experiment: Maker, tmp_path: Path, traced: None, mask: str) -> None:
    torch.compiler.reset()
    before = graphs()
    start = RunContext(experiment(all_phase(mask)).resolved(), Callback()).model.vector
    plain = run(experiment(all_phase(mask)), tmp_path / "plain")
    assert graphs() == before
    results = [run(experiment(all_phase(mask), "compile=true"), tmp_path / name) for name in ("one", "two")]
    change = weights(tmp_path / "plain") - start
    assert (weights(tmp_path / "one") - start - change).norm() < 1e-4 * change.norm()
    assert results[0]["test_loss"] == pytest.approx(plain["test_loss"], rel=1e-4)
    assert results[0]["model_sha256"] == results[1]["model_sha256"]
    assert results[0]["test_loss"] == results[1]["test_loss"]
    assert graphs() - before == 3  # to see that it works, training, and evaluation, whatever blocks and batch sizes


def test_masks_of_rows_and_tensors_train_as_written(experiment: Maker, tmp_path: Path, traced: None) -> None:
    """To the last bit, and so does their calibration; what is compiled is the evaluation in between."""
    for unit in ("row", "tensor"):
        phase, notes = all_phase(f"{{sparsity: 0.5, unit: {unit}, fisher: {{samples: 20}}}}"), Notes()
        plain = run(experiment(phase), tmp_path / unit / "plain")
        torch.compiler.reset()
        before = graphs()
        other = run(experiment(phase, "compile=true"), tmp_path / unit / "compiled", callback=notes)
        assert plain["model_sha256"] == other["model_sha256"]
        assert graphs() - before == 2
        assert any("compile changes nothing for training under masks of whole rows" in note for note in notes.notes)


def test_the_network_stays_what_it_is(experiment: Maker, traced: None) -> None:
    torch.compiler.reset()
    plain, context = (RunContext(experiment(f"compile={one}").resolved(), Callback()) for one in ("false", "true"))
    assert list(context.classifier.state_dict()) == list(plain.classifier.state_dict())
    inputs = context.transform.evaluation(context.data.test.images)
    before = graphs()
    context.model.vector.mul_(0.5)  # compiled code sees what becomes of the one vector
    plain.model.vector.mul_(0.5)
    with torch.no_grad():
        for size in (5, 2, 3, 17, 60):  # 5 is the number of tokens, too
            torch.testing.assert_close(context.classifier(inputs[:size]), plain.classifier(inputs[:size]))
    assert graphs() - before == 1  # no batch size has code of its own
    batches = [(inputs[:20], context.data.test.labels[:20])]
    scored = [sensitivity(one.classifier, one.model.parameters, batches, "empirical")[0] for one in (plain, context)]
    assert torch.equal(*scored)
    for entry in context.model.entries:
        assert context.model.parameters[entry.name].data_ptr() == context.model.view(entry).data_ptr()


def test_compiled_features_are_kept_apart(
    experiment: Maker, tmp_path: Path, traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSIEVE_CACHE", str(tmp_path / "cache"))
    for number, one in enumerate(("false", "true"), 1):
        context = RunContext(experiment(f"compile={one}").resolved(), Callback())
        context.frozen_outputs("test", np.arange(60), context.feature_depth)
        assert len(list((tmp_path / "cache" / "arrays").glob("*.npy"))) == number


def test_what_cannot_be_compiled_is_one_line(experiment: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: object, **options: object) -> Callable:
        def call(*given: object) -> None:
            raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nand a lot more")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(InputError, match=r"compile: true does not work here \(.*compiler found\); install a C\+\+"):
        RunContext(experiment("compile=true").resolved(), Callback())
    with pytest.raises(InputError, match="works for ViT, DINO and DINOv2 backbones"):
        compiled.compile_blocks(nn.Linear(4, 3), "cpu")
