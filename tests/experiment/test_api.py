"""fedsieve from Python: the same bits as by names and files, one sentence for each mistake, nothing of the caller's
is changed."""

import builtins
import json
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import fedsieve as api
from fedsieve.config.schema import Experiment
from fedsieve.engine.torch_setup import torch_as_before
from listeners import Listener, interrupt
from own_networks import Early, Net, net

Maker = Callable[..., Experiment]
Pair = tuple[TensorDataset, TensorDataset]


@pytest.fixture
def pair(images: Path) -> Pair:
    """The data of the file `images` as torch data sets."""
    file = np.load(images)
    parts = [(torch.from_numpy(file[f"x_{part}"]).permute(0, 3, 1, 2), file[f"y_{part}"]) for part in ("train", "test")]
    train, test = (TensorDataset(images, torch.from_numpy(labels)) for images, labels in parts)
    return train, test


def settings(experiment: Maker, *overrides: str) -> dict[str, Any]:
    """The small experiment as a dict."""
    return experiment(*overrides).model_dump(mode="json")


MASKED = (
    "phases.1.mask={sparsity: 0.5, calibration_rounds: 2, fisher: {samples: 16}}",
    "phases.1.optimizer_state=carry",
    "evaluate.keep=best",
)


# --------------------------------------------------------------------------------------------------------- run


def test_an_experiment_may_be_a_name_a_file_a_dict_or_an_experiment(experiment: Maker, tmp_path: Path) -> None:
    small = experiment("phases.1.rounds=1")
    file = tmp_path / "small.yaml"
    file.write_text(small.to_yaml())
    given: list[Any] = [small, small.model_dump(), small.model_dump(mode="json"), str(file), file]
    hashes = {api.run(one, str(tmp_path / str(number)))["model_sha256"] for number, one in enumerate(given)}
    assert len(hashes) == 1


def test_data_as_objects_gives_the_bits_of_data_by_name(experiment: Maker, pair: Pair, tmp_path: Path) -> None:
    """Tensors of bytes, floats and PIL images are the same pixels as those in the file."""
    by_name = api.run(experiment("phases.1.rounds=1"), tmp_path / "name")

    class Pictures(Dataset):
        def __init__(self, part: TensorDataset) -> None:
            self.part = part

        def __len__(self) -> int:
            return len(self.part)

        def __getitem__(self, place: int) -> tuple[Image.Image, int]:
            image, label = self.part[place]
            return Image.fromarray(image.permute(1, 2, 0).numpy()), int(label)

    floats = tuple(TensorDataset(part.tensors[0] / 255, part.tensors[1]) for part in pair)
    for number, data in enumerate((pair, floats, tuple(map(Pictures, pair)))):
        out = tmp_path / str(number)
        result = api.run(settings(experiment, "phases.1.rounds=1"), out, data=data)
        assert result["model_sha256"] == by_name["model_sha256"]
        assert result["data_fingerprint"] == by_name["data_fingerprint"]
        assert api.load_run(out).experiment.data.name == "given"


def test_an_own_module_is_trained_and_the_callers_is_not_changed(experiment: Maker, pair: Pair, tmp_path: Path) -> None:
    module = net().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    plan = settings(experiment, *MASKED, "phases.1.local.lr=0.05")
    result = api.run(plan, tmp_path / "run", data=pair, model=module)
    assert module.training and all(torch.equal(before[name], one) for name, one in module.state_dict().items())
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)

    run = api.load_run(tmp_path / "run")
    assert run.result == result and len(run.metrics) == 5
    assert run.experiment.model.backbone == "given Net, head fc"
    trained = run.model(module)
    assert type(trained) is Net and not trained.training and trained is not module
    assert not torch.equal(trained.conv2.weight, module.conv2.weight)
    assert not torch.equal(trained.bn1.running_mean, module.bn1.running_mean)  # buffers are averaged, too
    assert all(one["measured"] == one["recorded"] for one in run.evaluate(data=pair, model=module).values())
    accuracy = (predicted(trained, pair[0].tensors[0], pair[1].tensors[0]) == pair[1].tensors[1]).double().mean()
    assert float(accuracy) == result["test_accuracy"]

    assert "load_state_dict" in run.export(tmp_path / "exported", data=pair, model=module)
    other = Net()
    other.load_state_dict(load_file(tmp_path / "exported" / "model.safetensors"))
    images = torch.randn(3, 3, 16, 16)
    assert torch.equal(other.eval()(images), trained(images))
    assert (tmp_path / "exported" / "preprocessor_config.json").exists()


def predicted(model: nn.Module, train: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """The classes of raw images, normalised by the statistics of the training set."""
    mean, std = ((train.double() / 255).transpose(0, 1).flatten(1) for _ in range(2))
    mean, std = mean.mean(dim=1).view(3, 1, 1), std.std(dim=1, correction=0).view(3, 1, 1)
    with torch.no_grad():
        return model(((images.double() / 255 - mean) / std).float()).argmax(dim=1)


def test_scopes_of_an_own_module(experiment: Maker, pair: Pair, tmp_path: Path) -> None:
    module = net()
    for scope, mask, changed in (
        ("head", "", {"fc"}),
        ("backbone", "", {"conv1", "bn1", "conv2"}),
        ("all", ", mask: {sparsity: 0.5, rule: random, only: [norm], dense: [head]}", {"bn1", "fc"}),
    ):
        phase = f"{{name: one, train: {scope}, rounds: 1, local: {{steps: 2, batch_size: 16, lr: 0.1}}{mask}}}"
        out = tmp_path / scope
        api.run(settings(experiment, f"phases=[{phase}]"), out, data=pair, model=api.Model(module, head="fc"))
        trained, start = api.load_run(out).model(module).state_dict(), module.state_dict()
        assert {name.split(".")[0] for name in start if not torch.equal(start[name], trained[name])} == changed


def test_a_model_of_transformers_as_it_is(experiment: Maker, pair: Pair, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    module = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=4, **shape))
    out = tmp_path / "run"
    api.run(settings(experiment), out, data=pair, model=api.Model(module, head="classifier"))
    text = api.load_run(out).export(tmp_path / "exported", data=pair, model=module)
    assert "from_pretrained" in text
    images = torch.randn(3, 3, 16, 16)
    loaded = ViTForImageClassification.from_pretrained(tmp_path / "exported")
    trained = api.load_run(out).model(module)
    assert torch.equal(loaded(images).logits, trained(images).logits)
    assert not torch.equal(trained(images).logits, module.eval()(images).logits)


def test_interrupted_and_resumed_by_the_same_call(experiment: Maker, pair: Pair, tmp_path: Path) -> None:
    plan, module = settings(experiment, *MASKED), net()
    whole = api.run(plan, tmp_path / "whole", data=pair, model=module)
    out = tmp_path / "interrupted"
    for rounds in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            api.run(plan, out, rounds > 1, interrupt(rounds), data=pair, model=module)
    with pytest.raises(api.InputError, match=r"^/.*interrupted holds an unfinished run .*add resume=True"):
        api.run(plan, out, data=pair, model=module)
    others = TensorDataset(pair[0].tensors[0].flip(0), pair[0].tensors[1]), pair[1]
    for data, model in ((others, module), (pair, Net())):
        with pytest.raises(api.InputError, match="was started with other data or another backbone"):
            api.run(plan, out, resume=True, data=data, model=model)
    assert api.run(plan, out, resume=True, data=pair, model=module)["model_sha256"] == whole["model_sha256"]


def test_another_forward_pass_with_the_same_weights_has_its_own_features(
    experiment: Maker, pair: Pair, tmp_path: Path
) -> None:
    """Cached outputs of a frozen module are found by its weights and by what it computes."""

    class Other(Net):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(-images)

    Other.__name__ = "Net"
    other = Other()
    other.load_state_dict(net().state_dict())
    plan = settings(experiment, "phases.1.train=head")
    modules: list[nn.Module] = [net(), other]
    hashes = {api.run(plan, tmp_path / one.__module__, data=pair, model=one)["model_sha256"] for one in modules}
    assert len(hashes) == 2


# ------------------------------------------------------------------------------------------------------- workers


def test_workers_get_data_and_module(experiment: Maker, pair: Pair, tmp_path: Path, by_workers: list[str]) -> None:
    plan, listener = settings(experiment, *MASKED), Listener()
    alone = api.run({**plan, "workers": 1}, tmp_path / "alone", data=pair, model=net())
    both = api.run({**plan, "workers": 2}, tmp_path / "both", False, listener, data=pair, model=net())
    assert "train" in by_workers and both["model_sha256"] == alone["model_sha256"]
    assert not any("process" in note for note in listener.notes)
    by_workers.clear()
    scores = api.load_run(tmp_path / "both").evaluate(data=pair, model=net())
    assert set(by_workers) == {"score"} and all(one["measured"] == one["recorded"] for one in scores.values())


def test_a_module_that_cannot_be_pickled_runs_in_one_process(experiment: Maker, pair: Pair, tmp_path: Path) -> None:
    class Local(Net):
        pass

    in_script = type("Scripted", (Net,), {"__module__": "__main__"})
    sys.modules["__main__"].Scripted = in_script  # type: ignore[attr-defined]
    for kind, reason in ((Local, "cannot be pickled for workers"), (in_script, "Scripted is defined in the script")):
        listener = Listener()
        api.run(
            settings(experiment, "workers=2", "phases.1.rounds=1"),
            tmp_path / kind.__name__,
            False,
            listener,
            data=pair,
            model=kind(),
        )
        assert any(reason in note and note.endswith("going on in one process") for note in listener.notes)


# ---------------------------------------------------------------------------------------------------- mistakes

LOOP: dict[str, Any] = {"seed": 1}
LOOP["data"] = LOOP


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"experiment": 3},
            "the experiment is of type int; give a preset's name, a YAML file, a dict",
        ),
        ({"experiment": "digits-iidd"}, "'digits-iidd' is neither a file nor a preset; did you mean 'digits-iid'?"),
        ({"experiment": {"sed": 3}}, "unknown key 'sed' at the top level; did you mean 'seed'?"),
        ({"experiment": {"seed": "x"}}, 'seed is "x"; expected a whole number'),
        ({"experiment": {"seed": object}}, "seed is \"<class 'object'>\"; expected a whole number"),
        ({"experiment": {}}, "there is nothing to do: give at least one phase, or a ridge head"),
        (
            {"experiment": {"arms": {}}},
            "this dict describes a sweep, not an experiment; use `fedsieve sweep`",
        ),
        ({"out": 3}, "a folder is expected, as text or a Path, and not '3' (int)"),
        ({"out": ""}, "a folder is expected, as text or a Path, and not '' (str)"),
        (
            {"progress": True, "callback": Listener()},
            "progress and callback are both given; a callback takes",
        ),
        (
            {"callback": print},
            "callback is of type builtin_function_or_method; derive yours from fedsieve.Callback",
        ),
        ({"out": "~nosuchuser/x"}, "'~nosuchuser/x' is no possible path ("),
        ({"out": "a\0b"}, "'a\0b' is no possible path (embedded null byte)"),
        ({"plugins": ["~nosuchuser/x.py"]}, "'~nosuchuser/x.py' is no possible path ("),
        ({"plugins": [3]}, "a path is expected, as text or a Path, and not 3 (int)"),
        ({"plugins": 3}, "plugins is of type int; give a list of paths"),
        ({"experiment": LOOP}, "the experiment is nested too deeply, or contains itself; give a plain dict"),
        ({"resume": "yes"}, "resume is 'yes'; give True or False"),
        ({"progress": "x"}, "progress is 'x'; give True or False"),
        ({"model": Net}, "the model is of type type; give an nn.Module"),
        ({"model": 3}, "the model is of type int; give an nn.Module"),
        ({"model": nn.Flatten()}, "the given model Flatten has no Linear layer below it that could be its head"),
        ({"model": net(7)}, "the given model Net: its head 'fc' has 7 outputs, and the data has 4 classes; give it a"),
        (
            {"model": Net(at_most=8)},
            "the given model Net fails on images of 3 x 16 x 16 (RuntimeError: no images",
        ),
        ({"model": Early()}, "the outputs of 'fc' are not the scores of the given model Early, or these differ from"),
        (
            {"data": 3},
            "data: the training set is of type int, which has no length or no numbered samples; give",
        ),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: dict[str, Any], said: str, experiment: Maker, pair: Pair, tmp_path: Path
) -> None:
    usual = {"experiment": settings(experiment), "out": tmp_path / "run", "data": pair}
    with pytest.raises(api.InputError) as raised:
        api.run(**{**usual, **arguments})
    assert str(raised.value).startswith(said) and "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "phases.1.train={blocks: [0]}",
            "phases.1.train.blocks: the backbone has no block 0; it has no",
        ),
        ("model.head=mlp", "model.head: mlp is not for the given model Net, which brings its own; leave it out"),
        ("compile=true", "compile: true works for ViT, DINO and DINOv2 backbones, and this is another; use false"),
        (
            "phases.1.mask={sparsity: 0.5, only: [attention]}",
            "phases.1.mask.only: [attention] leaves nothing to train",
        ),
    ],
)
def test_settings_that_an_own_module_cannot_have(
    override: str, said: str, experiment: Maker, pair: Pair, tmp_path: Path
) -> None:
    with pytest.raises(api.InputError) as raised:
        api.run(settings(experiment, override), tmp_path / "run", data=pair, model=net())
    assert str(raised.value).startswith(said)


def test_a_head_must_be_there() -> None:
    with pytest.raises(api.InputError, match="the given model Net has no Linear layer 'head'; its last ones are fc"):
        api.Model(net(), head="head")


def test_a_module_that_fails_in_training_ends_the_run_with_one_line(
    experiment: Maker, pair: Pair, tmp_path: Path
) -> None:
    module = net()
    module.fails_in_training = True
    with pytest.raises(api.RunError, match=r"the given model failed \(RuntimeError: no images of 16 pixels, please\)"):
        api.run(settings(experiment), tmp_path / "run", data=pair, model=module)


def test_an_experiment_that_was_copied_with_nonsense(experiment: Maker, tmp_path: Path) -> None:
    with pytest.raises(api.InputError, match='seed is "x"; expected a whole number'):
        api.run(experiment().model_copy(update={"seed": "x"}), tmp_path / "run")


# ----------------------------------------------------------------------------------------------- the run's folder


def test_the_command_line_says_what_was_given_from_python(
    experiment: Maker, pair: Pair, fedsieve: Callable, tmp_path: Path
) -> None:
    plan = settings(experiment, "phases.1.rounds=1", "phases.1.train=head")
    for name, given in {"data": {"data": pair}, "model": {"model": net()}}.items():
        run = str(tmp_path / name)
        api.run(plan, run, **given)
        for command in (
            ["run", f"{run}/experiment.yaml", "--out", "again"],
            ["evaluate", run],
            ["export", run, "--to", "exported"],
        ):
            code, printed, error = fedsieve(*command)
            assert (code, printed, error.count("\n")) == (2, "", 1)
            assert f"was given from Python; give it again with {name}=… there" in error
        code, printed, _ = fedsieve("show", f"{run}/experiment.yaml")
        assert code == 0 and "given" in printed
        code, printed, _ = fedsieve("report", run, "--json")
        assert code == 0 and json.loads(printed)["groups"]
    assert not Path("again").exists() and not Path("exported").exists()


def test_runs_of_other_objects_are_not_repetitions(
    experiment: Maker, pair: Pair, fedsieve: Callable, tmp_path: Path
) -> None:
    plan = settings(experiment, "phases.1.rounds=1", "phases.1.train=head")
    others = TensorDataset(pair[0].tensors[0].flip(3), pair[0].tensors[1]), pair[1]
    for name, data in {"one": pair, "other": others}.items():
        api.run(plan, tmp_path / "runs" / name, data=data)
    code, printed, error = fedsieve("report", str(tmp_path / "runs"), "--json")
    assert code == 0 and len(json.loads(printed)["groups"]) == 2 and "repeats" not in error


def test_load_run(experiment: Maker, tmp_path: Path) -> None:
    with pytest.raises(api.InputError, match="is no run"):
        api.load_run(tmp_path)
    with pytest.raises(api.InputError, match="is no possible path"):
        api.load_run("~nosuchuser/x")
    with pytest.raises(KeyboardInterrupt):
        api.run(experiment(), tmp_path / "run", callback=interrupt(2))
    run = api.load_run(str(tmp_path / "run"))
    assert len(run.metrics) == 2 and run.experiment.seed == 7
    for ask in (lambda: run.result, run.model, run.evaluate, lambda: run.export(tmp_path / "exported")):
        with pytest.raises(api.InputError, match="is no finished run"):
            ask()
    api.run(experiment(), tmp_path / "run", resume=True, plugins=None)
    assert len(run.metrics) == 5 and run.result["seed"] == 7
    assert run.model()(torch.zeros(2, 3, 16, 16)).shape == (2, 4)
    with pytest.raises(api.InputError, match="has a model of its own; leave out the one that you give"):
        run.model(net())


def test_torch_is_as_before() -> None:
    """All that runs set on any device, also if the caller had other settings than the usual ones."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    try:
        with torch_as_before():
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.benchmark = False
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        assert torch.is_deterministic_algorithms_warn_only_enabled() and torch.backends.cudnn.benchmark
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False


# ------------------------------------------------------------------------------------------------------- progress


def test_progress_is_shown_where_somebody_looks(
    experiment: Maker, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = experiment("phases.1.rounds=1", "phases.1.train=head")
    api.run(plan, tmp_path / "0")
    assert capsys.readouterr().out == ""
    api.run(plan, tmp_path / "1", progress=True)
    assert "rounds 4 of 4" in capsys.readouterr().out
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich takes the output for a terminal
    api.run(plan, tmp_path / "2")
    assert "rounds 4/4" in capsys.readouterr().out
    api.run(plan, tmp_path / "3", progress=False)
    assert capsys.readouterr().out == ""


class ZMQInteractiveShell:
    """The shell of a notebook, as rich knows it by its name."""


class Output:
    """In place of ipywidgets' own, which is not installed here."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def clear_output(self, wait: bool) -> None: ...


def test_progress_in_a_notebook(experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ipywidgets a bar is shown, and else lines are printed."""
    shown: list[Any] = []
    display, widgets = ModuleType("IPython.display"), ModuleType("ipywidgets")
    display.display, widgets.Output = shown.append, Output  # type: ignore[attr-defined]
    widgets.__spec__ = ModuleSpec("ipywidgets", None)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    plan = experiment("phases.1.rounds=1", "phases.1.train=head")

    api.run(plan, tmp_path / "lines")
    text = "".join(one._repr_mimebundle_([], [])["text/plain"] for one in shown)
    assert "rounds 4 of 4" in text and "4/4" not in text
    shown.clear()
    monkeypatch.setitem(sys.modules, "ipywidgets", widgets)
    api.run(plan, tmp_path / "bar")
    assert any(isinstance(one, Output) for one in shown)
    text = "".join(one._repr_mimebundle_([], [])["text/plain"] for one in shown if not isinstance(one, Output))
    assert "4/4" in text and "rounds 4 of 4" not in text
    shown.clear()
    api.run(plan, tmp_path / "silence", progress=False)
    assert not shown


# ------------------------------------------------------------------------------------------------- the document


def test_the_examples_in_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, in order, as one script."""
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 7
    exec(compile("\n".join(blocks), "docs/python.md", "exec"), {"__name__": "document"})
    runs = {path.name for path in Path("runs").iterdir()}
    assert runs == {"first", "own-data", "own-model", "exported"}
