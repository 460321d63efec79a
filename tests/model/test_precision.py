"""bfloat16: where it is used, where it is not, and how far its results are from those of float32."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.errors import InputError
from fedsieve.experiment import evaluate_run, run
from fedsieve.files.cache import cache_folder
from fedsieve.model.flat import FlatModel
from fedsieve.model.precision import forward, notes_on
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.model_file import load_classifier
from fedsieve.runs.read import read_experiment, read_metrics

Maker = Callable[..., Experiment]
UNIT = 2**-8  # the largest relative error of a rounding to bfloat16
ALL_PHASE = "{name: all, train: all, rounds: 1, local: {steps: 4, batch_size: 16, lr: 0.02, momentum: 0.9}"
HEAD_PHASE = "{name: head, train: head, rounds: 2, local: {epochs: 1, batch_size: 16, lr: 0.05}}"
PHASES = {
    "dense": f"phases=[{ALL_PHASE}}}]",
    "weights": f"phases=[{ALL_PHASE}, mask: {{sparsity: 0.5, rule: random}}}}]",
    "rows": f"phases=[{ALL_PHASE}, mask: {{sparsity: 0.5, rule: random, unit: row}}}}]",
    "head": f"phases=[{HEAD_PHASE}]",
}


def weights(folder: Path) -> Tensor:
    return FlatModel(load_classifier(folder)).vector


@contextmanager
def types_of_products() -> Iterator[set[tuple[bool, torch.dtype]]]:
    """What leaves Linear layers and convolutions: (within training, type)."""
    seen: set[tuple[bool, torch.dtype]] = set()

    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):
            seen.add((torch.is_grad_enabled(), output.dtype))

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("phases", PHASES)
def test_products_are_bfloat16_and_the_result_is_near(experiment: Maker, tmp_path: Path, phases: str) -> None:
    start = RunContext(experiment(PHASES[phases]).resolved(), Callback()).model.vector
    changes, losses, products = {}, {}, {}
    for precision in ("float32", "bfloat16"):
        with types_of_products() as products[precision]:
            run(experiment(PHASES[phases], f"precision={precision}"), tmp_path / precision)
        changes[precision] = weights(tmp_path / precision) - start
        (losses[precision],) = [line["train_loss"] for line in read_metrics(tmp_path / precision)][-1:]
    in_training = {(True, torch.float32)} if phases != "head" else set()  # a plain head needs no layer to be called
    assert products["float32"] == {(False, torch.float32)} | in_training
    assert products["bfloat16"] == {(True, torch.bfloat16), (False, torch.bfloat16)}
    plain, lowered = changes["float32"], changes["bfloat16"]
    assert lowered.dtype == torch.float32 and (lowered != lowered.bfloat16()).any()  # weights are not rounded
    assert ((lowered != 0) == (plain != 0)).float().mean() > 0.999  # the same weights are trained
    assert 0 < (lowered - plain).norm() < 8 * UNIT * plain.norm()
    assert 0 < abs(losses["bfloat16"] - losses["float32"]) < 2 * UNIT * losses["float32"]


@pytest.mark.parametrize("phases", PHASES)
def test_the_same_model_twice(experiment: Maker, tmp_path: Path, phases: str) -> None:
    settings = experiment(PHASES[phases], "precision=bfloat16")
    results = [run(settings, tmp_path / name) for name in ("one", "two")]
    assert results[0]["model_sha256"] == results[1]["model_sha256"]
    assert results[0]["test_loss"] == results[1]["test_loss"]
    for figures in evaluate_run(tmp_path / "one").values():
        if phases != "head":  # there the run evaluates on features, kept from batches of another size
            assert figures["measured"] == figures["recorded"]
        assert figures["measured"] == pytest.approx(figures["recorded"], rel=2 * UNIT)
    assert read_experiment(tmp_path / "one").precision == "bfloat16"


def test_a_training_step_is_that_of_torch_under_autocast(experiment: Maker, tmp_path: Path) -> None:
    """One step of one client on all of its samples, by hand."""
    one_step = "phases=[{name: all, train: all, rounds: 1, local: {epochs: 1, batch_size: 1000, lr: 0.1}}]"
    settings = experiment("clients.count=1", "clients.fraction=1.0", one_step, "precision=bfloat16").resolved()
    context = RunContext(settings, Callback())
    order = context.training[context.partition.clients[0]]
    inputs, labels = context.transform.evaluation(context.data.train.images[order]), context.data.train.labels[order]
    optimizer = torch.optim.SGD(context.classifier.parameters(), lr=0.1, weight_decay=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        scores = context.classifier(inputs)
    assert scores.dtype == torch.bfloat16
    before = context.model.vector.clone()
    nn.functional.cross_entropy(scores.float(), labels).backward()
    assert all(one.grad is not None and one.grad.dtype == torch.float32 for one in context.classifier.parameters())
    optimizer.step()
    run(settings, tmp_path / "run")
    expected, found = context.model.vector - before, weights(tmp_path / "run") - before
    assert (found - expected).norm() < UNIT * expected.norm()  # the samples stand in another order


def test_scores_are_float32_whatever_the_precision() -> None:
    network, inputs = nn.Linear(5, 3), torch.randn(4, 5)
    assert torch.equal(forward(network, inputs, "float32"), network(inputs))
    lowered = forward(network, inputs, "bfloat16")
    products = inputs.bfloat16().float() @ network.weight.bfloat16().float().T + network.bias.bfloat16().float()
    torch.testing.assert_close(lowered, products, rtol=2 * UNIT, atol=UNIT)
    assert lowered.dtype == torch.float32 and torch.equal(lowered, lowered.bfloat16().float())
    assert not torch.is_autocast_enabled("cpu")


def test_precisions_do_not_share_features(experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIEVE_CACHE", str(tmp_path / "cache"))
    features, arrays = {}, {}
    for precision in ("float32", "bfloat16", "float32"):
        context = RunContext(experiment(f"precision={precision}").resolved(), Callback())
        outputs = context.frozen_outputs("test", np.arange(60), context.feature_depth)
        features[precision] = outputs(torch.arange(60))
        arrays[precision] = {path.name for path in (cache_folder() / "arrays").glob("*.npy")}
    assert len(arrays["float32"]) == len(arrays["bfloat16"]) == 2  # the last found what the first had left
    images = context.transform.evaluation(context.data.test.images)
    with torch.no_grad():
        torch.testing.assert_close(features["float32"], context.classifier.backbone(images))
        with torch.autocast("cpu", torch.bfloat16):
            expected = context.classifier.backbone(images).float()
    assert features["bfloat16"].dtype == torch.float32 and not torch.equal(features["bfloat16"], features["float32"])
    torch.testing.assert_close(features["bfloat16"], expected, rtol=UNIT, atol=UNIT)
    assert np.load(cache_folder() / "arrays" / arrays["bfloat16"].pop()).dtype == np.float32


def test_masks_are_calibrated_in_float32(experiment: Maker, tmp_path: Path) -> None:
    masks = {}
    for precision in ("float32", "bfloat16"):
        phase = f"phases=[{ALL_PHASE}, mask: {{sparsity: 0.9}}}}]"
        run(experiment(phase, f"precision={precision}"), tmp_path / precision)
        files = sorted((tmp_path / precision / "masks" / "all").glob("client-*"))
        masks[precision] = [(file.name, file.read_bytes()) for file in files]
    assert masks["float32"] == masks["bfloat16"] and len(masks["float32"]) == 3


def test_a_device_without_bfloat16(experiment: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    for device in ("cuda", "auto"):
        with pytest.raises(InputError, match="bfloat16 is asked for, but this CUDA device does not have it"):
            experiment(f"device={device}", "precision=bfloat16").resolved()
        assert experiment(f"device={device}").resolved().device == "cuda"
    assert experiment("precision=bfloat16").resolved().precision == "bfloat16"  # on the CPU


@pytest.mark.parametrize("flags, notes", [("avx512f avx512_bf16", 0), ("amx_bf16", 0), ("asimd bf16", 0), ("avx2", 1)])
def test_a_slow_processor_is_noted(tmp_path: Path, flags: str, notes: int) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {flags} sse\n")
    assert len(notes_on("bfloat16", "cpu", cpuinfo)) == notes
    assert notes_on("float32", "cpu", cpuinfo) == notes_on("bfloat16", "cuda", cpuinfo) == []
    assert notes_on("bfloat16", "cpu", tmp_path / "none") == []
