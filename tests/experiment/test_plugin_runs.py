"""Runs with plugins: in worker processes, resumed, evaluated, compared."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import fedsieve as api
from fedsieve.analysis.report.watch import serving
from fedsieve.config.decorators import KINDS
from fedsieve.config.experiment_file import load_experiment
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError
from fedsieve.experiment import evaluate_run, run
from fedsieve.runs.read import read_metrics
from listeners import Listener, interrupt

Maker = Callable[..., Experiment]

EVERYTHING = """
import numpy as np
import fedsieve
from fedsieve.federate.local import sgd, update_of
from fedsieve.federate.methods.fedavg import FedAvg

@fedsieve.rule(looks_at="gradients")
def by_gradient(evidence):
    assert evidence.client is not None and sum(map(np.prod, evidence.shapes.values())) == len(evidence.weights)
    return -evidence.gradients().abs()

@fedsieve.method
class Proximal(FedAvg):
    class Settings(fedsieve.Settings):
        mu: float = 0.1

    def train(self, task, mine):
        server = self.scope.split(task.broadcast.weights)
        pull = lambda name, weights, select: self.settings.mu * (weights - select(server[name]))
        trained = sgd(task, task.broadcast.weights, mine, penalty=pull)
        return update_of(task, trained), trained.momentum

@fedsieve.split
def unequal(labels, classes, count, settings, generator):
    return np.split(generator.permutation(len(labels)), [10 * one for one in range(1, count)])

@fedsieve.schedule
def half(done):
    return 0.5

@fedsieve.dataset
def noisy(settings):
    generator = np.random.default_rng(3)
    labels = np.arange(200) % 4
    images = (50 * labels[:, None, None, None] + generator.uniform(0, 50, (200, 16, 16, 3))).astype(np.uint8)
    return images[:160], labels[:160], images[160:], labels[160:]
"""
CHANGES = [
    "data.name=noisy",
    "data.path=null",
    "clients.split=unequal",
    "phases.*.method={proximal: {mu: 0.2}}",
    "phases.*.local.schedule=half",
    "phases.1.mask={rule: by_gradient, sparsity: 0.7, calibration_rounds: 2, fisher: {samples: 8}}",
]
RULE = "import fedsieve\n\n@fedsieve.rule\ndef mine(evidence):\n    return evidence.weights.abs()\n"
BY_RULE = ["phases.1.mask={rule: mine, sparsity: 0.5}", "phases.0.rounds=1"]


def test_the_same_model_with_two_workers(file: Callable[..., str], tmp_path: Path, by_workers: list[str]) -> None:
    settings, listener = load_experiment(file(EVERYTHING, *CHANGES)), Listener()
    results = {}
    for workers in (1, 2):
        one = settings.model_copy(update={"workers": workers})
        results[workers] = run(one, tmp_path / str(workers), callback=listener)
    assert "train" in by_workers and not any("one process" in note or "could not" in note for note in listener.notes)
    assert results[1]["model_sha256"] == results[2]["model_sha256"]
    assert results[1]["test_accuracy"] > 0.3
    held = json.loads((tmp_path / "2" / "split.json").read_text(encoding="utf-8"))["clients"]
    assert [sum(one.values()) for one in held] == [10] * 5 + [70]
    assert not any(line["failed"] for line in read_metrics(tmp_path / "2"))


def test_resumed_only_with_the_same_plugin(file: Callable[..., str], tmp_path: Path) -> None:
    settings, plugin = load_experiment(file(RULE, *BY_RULE)), tmp_path / "parts.py"
    expected = run(settings, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "cut", callback=interrupt(2))
    plugin.write_text(RULE + "# changed\n", encoding="utf-8")
    for folder in ("cut", "whole"):
        with pytest.raises(
            InputError, match=r"plugin .*parts\.py was changed since the run in .* began \(.*is what it"
        ):
            run(settings, tmp_path / folder, resume=True)
    copy = tmp_path / "cut" / "plugins" / "parts.py"
    copy.write_text(RULE + "# changed\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"plugin parts\.py was changed since the run in .* began; give another"):
        run(settings, tmp_path / "cut", resume=True)
    with pytest.raises(InputError, match=r"holds a different run \(plugins is \[\"parts.py\"\] in its .*, \[\] here\)"):
        run(settings.model_copy(update={"plugins": ()}), tmp_path / "cut", resume=True)
    copy.write_text(RULE, encoding="utf-8")
    left = copy.with_name(".parts.py.partial")
    left.write_text("of a process that was killed", encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()  # where it lies does not matter
    (tmp_path / "elsewhere" / "parts.py").write_text(RULE, encoding="utf-8")
    moved = settings.model_copy(update={"plugins": (str(tmp_path / "elsewhere" / "parts.py"),)})
    assert run(moved, tmp_path / "cut", resume=True)["model_sha256"] == expected["model_sha256"]
    assert not left.exists() and copy.exists()


def test_commands_that_look_at_runs_execute_nothing(
    file: Callable[..., str], fedsieve: Callable, tmp_path: Path
) -> None:
    path, executed = file(RULE, *BY_RULE), tmp_path / "executed"
    for seed in (1, 2):
        assert fedsieve("run", path, f"seed={seed}", "phases.*.rounds=1", "--out", f"runs/{seed}")[0] == 0
    trap = f"open({str(executed)!r}, 'w')\n"
    for copy in (tmp_path / "parts.py", *Path("runs").glob("*/plugins/parts.py")):
        copy.write_text(trap, encoding="utf-8")
    for command in (("show", path), ("show", "runs/1/experiment.yaml"), ("report", "runs"), ("compare", "runs")):
        code, out, err = fedsieve(*command)
        assert (code, err) == (0, "") and (command[0] != "show" or "rule: mine" in out)
    with serving(Path("runs"), 0, "127.0.0.1"):
        pass
    assert "plugin" not in fedsieve("export", "runs/1", "--to", "exported")[2]
    assert fedsieve("explore", path)[0] == 0
    assert not executed.exists()
    code, out, err = fedsieve("evaluate", "runs/1")
    assert code == 2 and not executed.exists() and err.count("\n") == 1
    assert "executed only if you name them; add --plugin runs/1/plugins/parts.py" in err
    code, out, err = fedsieve("evaluate", "runs/1", "--plugin", "runs/1/plugins/parts.py")
    assert code == 2 and not executed.exists()
    assert "plugin runs/1/plugins/parts.py was changed since the run in runs/1 began" in err


def test_evaluated_with_the_plugin_that_it_was_made_with(file: Callable[..., str], tmp_path: Path) -> None:
    settings = load_experiment(file(EVERYTHING, *CHANGES, "phases.*.rounds=1"))
    run(settings, tmp_path / "run")
    (tmp_path / "parts.py").unlink()
    copy = tmp_path / "run" / "plugins" / "parts.py"
    scores = evaluate_run(tmp_path / "run", plugins=[copy])
    assert scores["test_accuracy"]["measured"] == scores["test_accuracy"]["recorded"]
    with pytest.raises(InputError) as raised:
        api.load_run(tmp_path / "run").evaluate()
    assert str(raised.value).endswith(f"executed only if you name them; add plugins={[str(copy)]}")


def test_export_takes_the_plugin_of_a_data_set(file: Callable[..., str], fedsieve: Callable, tmp_path: Path) -> None:
    phase = "{name: one, train: head, rounds: 1, local: {steps: 1, lr: 0.1}}"
    changes = ("data.name=noisy", "data.path=null", "model.backbone=pico", f"phases=[{phase}]")
    run(load_experiment(file(EVERYTHING, *changes)), tmp_path / "run")
    copy, export = tmp_path / "run" / "plugins" / "parts.py", ("export", str(tmp_path / "run"), "--to")
    code, _, err = fedsieve(*export, "exported")
    assert code == 2 and err.endswith(f"executed only if you name them; add --plugin {copy}\n")
    assert fedsieve(*export, "exported", "--plugin", str(copy))[0] == 0
    loaded = api.load_run(tmp_path / "run")
    with pytest.raises(InputError, match=r"name them; add plugins=\['.*parts\.py'\]$"):
        loaded.export("from-python")
    loaded.export("from-python", plugins=[copy])
    for folder in ("exported", "from-python"):
        given = json.loads(Path(folder, "preprocessor_config.json").read_text(encoding="utf-8"))
        assert given["image_mean"] == pytest.approx([100 / 255] * 3, abs=0.01)  # 50 x 0, 1, 2 or 3, and 25 on average
    copy.write_text(f"{EVERYTHING}#", encoding="utf-8")
    code, _, err = fedsieve(*export, "again", "--plugin", str(copy))
    assert code == 2 and "was changed since the run in" in err and not Path("again").exists()


def test_mask_sweep_and_split_load_plugins(file: Callable[..., str], fedsieve: Callable, tmp_path: Path) -> None:
    path = file(EVERYTHING, *CHANGES, "phases.*.rounds=1")
    code, out, err = fedsieve("mask", path, "--out", "mask", "--json")
    assert code == 0 and json.loads(out)["density"] == pytest.approx(0.3, abs=0.01)
    code, out, err = fedsieve("split", path, "--json")
    assert code == 0 and [one["samples"] for one in json.loads(out)["clients"]] == [10] * 5 + [70]
    sweep = f"experiment: {path}\nseeds: 1\narms: {{phases.1.mask.rule: [by_gradient, mine]}}\n"
    (tmp_path / "sweep.yaml").write_text(sweep, encoding="utf-8")
    code, out, err = fedsieve("sweep", str(tmp_path / "sweep.yaml"), "--out", "sweep")
    assert code == 2 and "mask.rule is 'mine'; use least_sensitive or " in err and "by_gradient" in err
    more = tmp_path / "more.py"
    more.write_text(RULE, encoding="utf-8")
    for _ in range(2):  # the second goes on with the first, where nothing is left
        code, out, err = fedsieve("sweep", str(tmp_path / "sweep.yaml"), "--out", "sweep", "--plugin", str(more))
        assert (code, err) == (0, "")
    arms = json.loads(Path("sweep/results.json").read_text(encoding="utf-8"))["arms"]
    assert len(arms) == 2 and all(arm["seeds"] for arm in arms)
    more.write_text(f"{RULE}#", encoding="utf-8")
    code, out, err = fedsieve("sweep", str(tmp_path / "sweep.yaml"), "--out", "sweep", "--plugin", str(more))
    assert code == 2 and "plugin more.py was changed since the sweep in sweep began" in err


def test_two_runs_in_one_process(experiment: Maker, tmp_path: Path) -> None:
    """Each has the plugin as it is now; nothing is left of it."""
    plugin, before = tmp_path / "parts.py", {kind: list(registry) for kind, registry in KINDS.items()}
    settings = experiment("phases.1.mask={sparsity: 0.5, rule: largest_magnitude}", "phases.*.rounds=1")
    expected = run(settings, tmp_path / "expected")["model_sha256"]
    mask = settings.phases[1].mask.model_copy(update={"rule": "mine"})
    phases = (settings.phases[0], settings.phases[1].model_copy(update={"mask": mask}))
    settings, found = settings.model_copy(update={"phases": phases}), []
    for sign in ("", "-", "-"):
        plugin.write_text(RULE.replace("return ", f"return {sign}"), encoding="utf-8")
        found.append(run(settings, tmp_path / str(len(found)), plugins=[plugin])["model_sha256"])
        assert {kind: list(registry) for kind, registry in KINDS.items()} == before
    assert found[0] != found[1] == found[2] == expected
