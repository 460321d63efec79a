"""The commands as a person types them."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedsieve import __version__
from fedsieve.analysis.collection import read_run
from fedsieve.analysis.report.overview import overview
from fedsieve.config.schema import Experiment
from fedsieve.federate.methods import METHODS
from fedsieve.federate.methods.fedavg import FedAvg
from fedsieve.federate.types import State
from fedsieve.model.backbone import load_backbone
from fedsieve.runs.read import read_metrics
from fedsieve.sieve.mask import Mask

Maker = Callable[..., Experiment]


def test_run_evaluate_and_resume(fedsieve: Callable, file: Path) -> None:
    code, printed, _ = fedsieve("run", str(file), "phases.0.rounds=2")
    assert code == 0 and "written to runs/small" in printed and "head" in printed
    assert json.loads(Path("runs/small/result.json").read_text())["phases"][0]["rounds"] == 2
    code, printed, _ = fedsieve("run", str(file))  # another folder, nothing overwritten
    assert code == 0 and "written to runs/small-2" in printed
    code, printed, _ = fedsieve("evaluate", "runs/small-2", "--json")
    scores = json.loads(printed)
    assert code == 0 and scores["test_accuracy"]["measured"] == scores["test_accuracy"]["recorded"]
    code, printed, _ = fedsieve("run", str(file), "--out", "runs/small-2", "--resume")
    assert code == 0 and "finished already" in printed
    assert fedsieve("run", str(file), "--resume")[0] == 2


def test_a_run_whose_data_has_moved(fedsieve: Callable, backbone: Path, images: Path, tmp_path: Path) -> None:
    before, now = tmp_path / "before.npz", tmp_path / "now.npz"
    before.write_bytes(images.read_bytes())
    settings = [f"data.path={before}", "data.name=npz", "data.image_size=16", f"model.backbone={backbone}"]
    phases = "phases=[{name: head, train: head, rounds: 1, local: {steps: 1, lr: 0.1}}]"
    assert fedsieve("run", "digits-iid", *settings, phases, "--out", "r")[0] == 0
    before.rename(now)
    assert "does not exist" in fedsieve("evaluate", "r")[2]
    code, printed, _ = fedsieve("evaluate", "r", f"data.path={now}", "--json")
    scores = json.loads(printed)
    assert code == 0 and scores["test_loss"]["measured"] == scores["test_loss"]["recorded"]
    assert "does not exist" in fedsieve("export", "r", "--to", "exported")[2]
    assert "does not exist" not in fedsieve("export", "r", f"data.path={now}", "--to", "exported")[2]
    code, _, said = fedsieve("evaluate", "r", "seed=3")
    assert code == 2 and "'seed' cannot be changed for a finished run; use data.path, model.backbone, device" in said


def test_a_folder_whose_name_is_not_utf_8(fedsieve: Callable) -> None:
    """safetensors could not open what lies in it."""
    code, _, said = fedsieve("run", "digits-iid", "--out", os.fsdecode(b"r-\xff"))
    assert code == 2 and said == "error: 'r-\\udcff' is no name in UTF-8; give another place\n"
    assert not list(Path().iterdir())


def test_a_failed_run_is_exit_code_one(fedsieve: Callable, file: Path) -> None:
    code, _, said = fedsieve("run", str(file), "phases.0.local.lr=1e30", "phases.0.rounds=5", "--out", "bad")
    assert code == 1 and said.startswith("error: phase head, round") and len(said.splitlines()) == 1


def test_split_shows_who_holds_what(fedsieve: Callable, file: Path) -> None:
    code, printed, _ = fedsieve("split", str(file), "clients.split={kind: classes, per_client: 2}")
    assert code == 0 and "written to split.png" in printed
    assert Image.open("split.png").size[0] > 300
    code, printed, _ = fedsieve("split", str(file), "clients.split={kind: classes, per_client: 2}", "--json")
    shown = json.loads(printed)
    assert [len(client["classes"]) for client in shown["clients"]] == [2] * 6
    assert sum(client["samples"] for client in shown["clients"]) == 180  # 240 less the validation quarter


def test_presets_and_show(fedsieve: Callable) -> None:
    code, printed, _ = fedsieve("presets")
    assert code == 0 and any(line.startswith("digits-iid ") for line in printed.splitlines())
    lines = printed.splitlines()
    first, second = lines.index("Report 003 (14)"), lines.index("Report 004 (17)")
    assert second - first == 14 + 2 and lines[first - 1] == "" and lines[0].startswith("cifar100-central ")
    assert lines[first + 1].startswith("003-figure5-fedavg ")
    code, printed, _ = fedsieve("presets", "002-table4.3")
    assert code == 0 and printed.count("\n002-table4.3-") == 8 and len(printed.splitlines()) == 10
    code, _, said = fedsieve("presets", "005")
    assert code == 2 and said == "error: no preset begins with '005'; `fedsieve presets` lists them all\n"
    code, printed, _ = fedsieve("show", "digits-iid", "seed=5")
    assert code == 0 and printed.startswith("seed: 5\n") and "optimizer_state: reset" in printed


def test_the_bare_program_prints_help_and_its_version(fedsieve: Callable) -> None:
    code, printed, said = fedsieve()
    assert code == 0 and not said and "Usage: fedsieve" in printed and "reproduce" in printed
    assert fedsieve("--version") == (0, f"fedsieve {__version__}\n", "")


def test_what_a_run_says_of_its_clients(fedsieve: Callable, file: Path) -> None:
    code, printed, _ = fedsieve("run", str(file), "evaluate.clients=true", "clients.fail_rate=0.3", "--out", "run")
    assert code == 0 and "accuracy of clients: mean " in printed and ", worst tenth " in printed
    assert "warning: phase head, round " in printed and " was left out: " in printed


def test_replies_that_were_left_out_are_told_with_the_result(fedsieve: Callable, file: Path) -> None:
    """They change what a run means, and the warning of their round has scrolled away."""
    code, printed, _ = fedsieve("run", str(file), "clients.norm_limit=1.001", "--out", "run")
    lines = read_metrics(Path("run"))
    (line, client, why), *others = [(line, *one) for line in lines for one in line["failed"].items()]
    told = f"{1 + len(others)} replies were left out of their rounds (the first: client {client} in phase head, round "
    assert code == 0 and others and f"{told}{line['round']}: {why})" in printed
    assert f"run: {told}" in fedsieve("compare", "run")[2]
    assert f"run: {told}" in overview([read_run(Path("run"))])["warnings"][0]
    fedsieve("run", str(file), "clients.norm_limit=null", "--out", "whole")
    assert "left out" not in "".join(map(str, fedsieve("compare", "whole")))


def test_cache(fedsieve: Callable, file: Path) -> None:
    fedsieve("run", str(file))
    assert not fedsieve("cache", "show")[1].endswith(": 0 B\n")
    assert fedsieve("cache", "clear")[0] == 0
    assert fedsieve("cache", "show")[1].endswith(": 0 B\n")


def test_brackets_in_names_are_printed_as_they_are(fedsieve: Callable, file: Path) -> None:
    assert "written to runs[/x][red]" in fedsieve("run", str(file), "--out", "runs[/x][red]")[1]
    assert "written to [bold].png" in fedsieve("split", str(file), "--png", "[bold].png")[1]


def test_ctrl_c_says_how_to_go_on(fedsieve: Callable, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(FedAvg):
        def send(self, server: State) -> dict[str, Tensor]:
            raise KeyboardInterrupt

    monkeypatch.setitem(METHODS, "interrupted", Interrupted)
    code, _, said = fedsieve("run", str(file), "phases.*.method=interrupted", "--out", "run")
    assert code == 130 and said.startswith("error: interrupted") and "--resume" in said


# ------------------------------------------------------------------------------------------ bad input


def truncated_cifar(folder: Path) -> Path:
    folder.mkdir()
    for name in ("train", "test", "meta"):
        (folder / name).write_bytes(b"not what it should be")
    return folder


def image_folder(root: Path, spoil: bool) -> Path:
    generator = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (root / "train" / name).mkdir(parents=True)
        for number in range(10):
            pixels = generator.integers(0, 256, (20, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "train" / name / f"{number}.png")
    if spoil:
        (root / "train" / "dogs" / "3.png").write_bytes(b"\x89PNG but no picture")
    return root


def misshapen(backbone: Path, path: Path) -> Path:
    tensors = load_file(backbone)
    tensors["blocks.1.attn.proj.weight"] = torch.zeros(64, 60)
    save_file(tensors, path)
    return path


BAD = {
    "unknown key": (lambda t, b: ["clients.cuont=3"], ["unknown key 'cuont'", "'count'"]),
    "wrong type": (lambda t, b: ["clients.count=many"], ["clients.count", "whole number"]),
    "precision": (lambda t, b: ["precision=bfloat"], ["precision is 'bfloat'", "float32 or bfloat16"]),
    "float16": (lambda t, b: ["precision=16"], ["precision is 16", "float32 or bfloat16"]),
    "compile": (lambda t, b: ["compile=maybe"], ['compile is "maybe"', "true or false"]),
    "missing data path": (lambda t, b: [f"data.path={t}/nowhere"], ["nowhere does not exist"]),
    "damaged CIFAR": (
        lambda t, b: ["data.name=cifar100", f"data.path={truncated_cifar(t / 'cifar')}"],
        ["train is damaged", "md5"],
    ),
    "unreadable image": (
        lambda t, b: ["data.name=folder", f"data.path={image_folder(t / 'pictures', spoil=True)}"],
        ["dogs/3.png", "no readable image"],
    ),
    "image size": (lambda t, b: ["data.image_size=20"], ["data.image_size 20", "patch size 8", "16 or 24"]),
    "per_client": (
        lambda t, b: ["clients.split={kind: classes, per_client: 5}"],
        ["per_client is 5", "only 4 classes"],
    ),
    "more clients than samples": (lambda t, b: ["clients.count=181"], ["181", "180"]),
    "fraction": (lambda t, b: ["clients.fraction=1.01"], ["clients.fraction is 1.01", "less than or equal to 1"]),
    "no such backbone": (lambda t, b: ["model.backbone=nobody/nothing"], ["nobody/nothing", "PATH/TO/"]),
    "no such file": (lambda t, b: ["model.backbone=nothing.pth"], ["nothing.pth does not exist"]),
    "misshapen checkpoint": (
        lambda t, b: [f"model.backbone={misshapen(b, t / 'odd.safetensors')}"],
        ["blocks.1.attn.proj.weight has shape [64, 60], expected [64, 64]"],
    ),
    "no such block": (lambda t, b: ["phases.1.train={blocks: [2, 3]}"], ["no block 3", "0 to 2"]),
    "no run to start from": (lambda t, b: [f"model.init={t}/none"], ["model.init", "no model of a finished run"]),
    "out below a file": (lambda t, b: ["--out", f"{b}/run"], ["cannot be made", "another folder"]),
    "best of no validation": (lambda t, b: ["data.validation=0.001", "evaluate.keep=best"], ["holds out no image"]),
    "infinite rate": (lambda t, b: ["phases.0.local.lr=.inf"], ["phases.0.local.lr", "finite"]),
    "npz without labels": (lambda t, b: [f"data.path={npz_without_labels(t / 'x.npz')}"], ["no array y_train"]),
    "validation leaves nothing": (lambda t, b: ["data.validation=0.999"], ["leaves nothing to train on"]),
    "all frozen": (lambda t, b: ["phases.1.mask={sparsity: 1.0}"], ["phases.1.mask.sparsity is 1.0", "less than 1"]),
    "negative sparsity": (
        lambda t, b: ["phases.1.mask={sparsity: -0.1}"],
        ["phases.1.mask.sparsity is -0.1", "greater than or equal to 0"],
    ),
    "no sparsity": (lambda t, b: ["phases.1.mask={}"], ["give sparsity", "such as 0.9"]),
    "unknown rule": (
        lambda t, b: ["phases.1.mask={sparsity: 0.9, rule: least}"],
        [
            "mask.rule is 'least'; use least_sensitive or most_sensitive or ",
            "or random, or name the plugin that has it",
        ],
    ),
    "unknown kind of layer": (
        lambda t, b: ["phases.1.mask={sparsity: 0.9, only: [attn]}"],
        ["'attn'", "attention or mlp or norm or scale or patch or tokens or head", "did you mean 'attention'"],
    ),
    "no calibration round": (
        lambda t, b: ["phases.1.mask={sparsity: 0.9, calibration_rounds: 0}"],
        ["calibration_rounds is 0", "greater than or equal to 1"],
    ),
    "an epoch's mask for all": (
        lambda t, b: ["phases.1.mask={sparsity: 0.9, refresh: epoch, scope: federated}"],
        ["needs scope: client", "nobody else has its weights and data"],
    ),
    "an epoch's mask from the server": (
        lambda t, b: ["phases.1.mask={sparsity: 0.9, refresh: epoch, scope: server}"],
        ["needs scope: client", "nobody else has its weights and data"],
    ),
    "no kind of layer": (lambda t, b: ["phases.1.mask={sparsity: 0.9, only: []}"], ["only is []", "at least one"]),
    "a mask that freezes everything": (
        lambda t, b: [
            f"phases.1.mask={{file: {foreign_mask(t / 'mask.safetensors', b, empty=True)}}}",
            "phases.1.train=backbone",
        ],
        ["phases.1.mask.file", "freezes every weight"],
    ),
    "nothing left to train": (
        lambda t, b: ["phases.0.mask={sparsity: 0.9, only: [mlp, norm]}"],
        ["phases.0.mask.only: [mlp, norm] leaves nothing to train", "`train` has head"],
    ),
    "mask of another model": (
        lambda t, b: [f"phases.1.mask={{file: {foreign_mask(t / 'mask.safetensors', b)}}}"],
        ["mask.safetensors", "backbone.blocks.0.norm1.weight is 63 in it, and 64 here"],
    ),
    "no mask file": (lambda t, b: [f"phases.1.mask={{file: {b}}}"], ["is no mask", "fedsieve mask"]),
    "bernoulli of a score": (
        lambda t, b: ["phases.1.mask={sparsity: 0.9, draw: bernoulli}"],
        ["bernoulli goes with rule: random"],
    ),
    "a share of whole tensors": (
        lambda t, b: ["phases.1.mask={sparsity: 0.9, unit: tensor, across: tensor}"],
        ["use across: model"],
    ),
    "no such encoding": (
        lambda t, b: ["wire.values=int4"],
        ["wire.values is 'int4'", "float32 or float16 or bfloat16"],
    ),
    "no such broadcast": (lambda t, b: ["wire.broadcast=diff"], ["wire.broadcast is 'diff'", "full or delta"]),
    "too few candidates": (
        lambda t, b: ["clients.select={high_loss: {candidates: 2}}"],
        ["candidates 2 are fewer than the 3 clients per round", "use 3 to 6"],
    ),
    "too many candidates": (
        lambda t, b: ["clients.select={high_loss: {candidates: 7}}"],
        ["candidates 7 are more than all 6", "use 3 to 6"],
    ),
    "unknown selection": (lambda t, b: ["clients.select=best"], ["'best'", "uniform or by_size or high_loss"]),
    "minimum too large": (
        lambda t, b: ["clients.minimum=4"],
        ["minimum 4 is more than the 3 clients per round", "use 1 to 3"],
    ),
    "all clients fail": (lambda t, b: ["clients.fail_rate=1.0"], ["clients.fail_rate is 1.0", "less than 1"]),
    "negative failures": (lambda t, b: ["clients.fail_rate=-0.1"], ["clients.fail_rate is -0.1", "equal to 0"]),
    "all held out": (lambda t, b: ["clients.holdout=1.0"], ["clients.holdout is 1.0", "less than 1"]),
    "negative holdout": (lambda t, b: ["clients.holdout=-0.5"], ["clients.holdout is -0.5", "equal to 0"]),
    "unknown aggregator": (lambda t, b: ["phases.1.aggregate=some"], ["'some'", "mean or active"]),
    "unknown method": (
        lambda t, b: ["phases.1.method=some"],
        ["'some'", "fedavg or fedprox or scaffold or fednova or fisher_mixing"],
    ),
    "the key before methods": (lambda t, b: ["clients.combine=active"], ["clients.combine", "phases.*.aggregate"]),
    "a secret sum of different masks": (
        lambda t, b: ["clients.secure=zero_sum", "phases.1.mask={sparsity: 0.9}"],
        ["phases.1.mask of each client's own", "use mask.scope: server or federated"],
    ),
    "unknown level": (lambda t, b: ["analyze.level=all"], ["analyze.level is 'all'", "none or basic or blocks"]),
    "no such partitioner": (
        lambda t, b: ["clients.split={kind: flwr, partitioner: IdPartitioner}"],
        ["IdPartitioner", "IidPartitioner"],
    ),
}


def foreign_mask(path: Path, backbone: Path, empty: bool = False) -> Path:
    """A mask of a model that differs from the small one in one tensor; or one of the small one, all frozen."""
    named = load_backbone(str(backbone), 16).named_parameters()
    shapes = {f"backbone.{name}": tuple(parameter.shape) for name, parameter in named}
    if empty:
        Mask.empty(shapes).save(path)
    else:
        Mask.full({**shapes, "backbone.blocks.0.norm1.weight": (63,)}).save(path)
    return path


def npz_without_labels(path: Path) -> Path:
    np.savez(path, x_train=np.zeros((4, 8, 8), np.uint8))
    return path


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_written(
    fedsieve: Callable, file: Path, tmp_path: Path, backbone: Path, case: str
) -> None:
    overrides, expected = BAD[case]
    code, printed, said = fedsieve("run", str(file), "--out", "out", *overrides(tmp_path, backbone))
    assert code == 2
    assert said.startswith("error: ") and len(said.splitlines()) == 1 and not printed
    for part in expected:
        assert part in said
    assert list(Path.cwd().iterdir()) == []


def test_bad_input_to_the_other_commands(fedsieve: Callable, tmp_path: Path) -> None:
    for arguments, part in [
        (["run", "digits-idd"], "did you mean 'digits-iid'?"),
        (["run"], "EXPERIMENT"),
        (["rnu"], "No such command"),
        (["run", "digits-iid", "--uot", "x"], "No such option"),
        (["show", "nothing-like-it"], "neither a file nor a preset; the presets are"),
        (["evaluate", str(tmp_path)], "no finished run"),
        (["export", str(tmp_path), "--to", "exported"], "no finished run"),
    ]:
        code, _, said = fedsieve(*arguments)
        assert code == 2 and said.startswith("error: ") and part in said and len(said.splitlines()) == 1
    assert list(Path.cwd().iterdir()) == []


def test_an_existing_out_is_refused(fedsieve: Callable, file: Path) -> None:
    assert fedsieve("run", str(file), "--out", "mine")[0] == 0
    before = {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()}
    for arguments in (["run", str(file)], ["run", str(file), "seed=9"], ["run", str(file), "seed=9", "--resume"]):
        code, _, said = fedsieve(*arguments, "--out", "mine")
        assert code == 2 and said.startswith("error: --out mine holds a ") and len(said.splitlines()) == 1
    assert before == {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", ["run", "mask calibrate", "cluster check"])
def test_help_says_what_arguments_are(fedsieve: Callable, command: str) -> None:
    code, out, _ = fedsieve(*command.split(), "--help")
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", out).split())
    assert code == 0 and "YAML file" in said and "Changes to it: clients.count=20" in said


def test_help_is_quick() -> None:
    """Nothing heavy may be imported for it; the time itself is measured generously, for a busy machine."""
    code = "import sys; from fedsieve.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)))"
    started = time.monotonic()
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert time.monotonic() - started < 5
    assert printed.splitlines()[-1] == "[]"
    commands = "run sweep compare reproduce report watch explore presets show split evaluate export cache demo mask"
    for command in commands.split():
        assert command in printed


# ------------------------------------------------------------------------------------------ names and text


@pytest.mark.parametrize(
    "command",
    [
        ["run", "digits-iid", "--out"],
        ["mask", "digits-edit-iid", "--out"],
        ["sweep", "rules", "--out"],
        ["reproduce", "003", "--scale", "smoke", "--out"],
        ["report", ".", "--out"],
        ["explore", "digits", "--out"],
        ["export", ".", "--to"],
        ["compare", ".", "--latex"],
        ["demo", "--out"],
    ],
    ids=lambda command: command[0],
)
def test_a_name_that_is_too_long(command: list[str], fedsieve: Callable) -> None:
    code, _, said = fedsieve(*command, "x" * 300)
    assert (code, said.count("\n")) == (2, 1) and "(File name too long); give another place" in said


@pytest.mark.parametrize("more", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}])
def test_text_is_utf_8_whatever_the_locale(more: dict[str, str], tmp_path: Path) -> None:
    """Files are read and written as UTF-8, and names that are none are shown escaped."""
    (tmp_path / "e.yaml").write_bytes("# ü\nseed: 3\n".encode())
    program = """
from pathlib import Path
from fedsieve.cli import main
from fedsieve.files.atomic import write_text
write_text(Path("text"), "\\u00fc \\udcff")
main(["cache", "show"])
"""
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", **more}
    environment["FEDSIEVE_CACHE"] = os.fsdecode(b"c-\xff")
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert (ended.returncode, ended.stdout) == (0, "c-\\udcff: 0 B\n"), ended.stderr
    assert (tmp_path / "text").read_bytes() == "ü \\udcff".encode()
    show = [sys.executable, "-m", "fedsieve", "show", "e.yaml"]
    shown = subprocess.run(show, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert "cannot be read as text" not in shown.stderr and "Traceback" not in shown.stderr


def test_data_that_are_at_nodes_are_not_explored(fedsieve: Callable, experiment: Maker) -> None:
    Path("mine.yaml").write_text(experiment("engine=flower").to_yaml())
    code, printed, said = fedsieve("explore", "mine.yaml")
    assert code == 2 and not printed and not Path("explore.html").exists()
    assert said == (
        "error: the data of this experiment are at its nodes; name data that are here instead, or set engine=local "
        "in it\n"
    )


def test_a_node_needs_no_network() -> None:
    """What the server names is not downloaded: the code of the Hugging Face hub is imported after that is said."""
    program = (
        "from fedsieve.cli import main\n"
        "try: main(['node', '--data', 'none.npz', '--name', 'one', '--folder', 'none', '--check'])\n"
        "except SystemExit as end: assert end.code == 2\n"
        "from huggingface_hub import constants\n"
        "assert constants.HF_HUB_OFFLINE"
    )
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "none.npz does not exist" in found.stderr
