"""Runs with plugins: in worker processes, resumed, evaluated, compared; and rules that look at gradients."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedsieve as api
from fedsieve.analysis.report.watch import serving
from fedsieve.config.decorators import KINDS
from fedsieve.config.experiment_file import load_experiment
from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.engine.worker_pool import WorkerPool
from fedsieve.errors import InputError, RunError
from fedsieve.experiment import evaluate_run, run
from fedsieve.federate.aggregators import AGGREGATORS
from fedsieve.federate.selection import SELECTIONS
from fedsieve.federate.server_optimizers import SERVER_OPTIMIZERS
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.read import read_metrics
from fedsieve.sieve.calibrate import calibrate
from fedsieve.sieve.mask import Mask
from fedsieve.sieve.rules import RULES, Evidence
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


@pytest.fixture
def file(tmp_path: Path, experiment: Maker) -> Callable[..., str]:
    """Writes parts.py and mine.yaml, the small experiment with changes and the plugin; the path of the latter."""

    def written(text: str, *changes: str) -> str:
        (tmp_path / "parts.py").write_text(text, encoding="utf-8")
        settings = experiment("plugins=[parts.py]", *changes).model_copy(update={"plugins": ("parts.py",)})
        (tmp_path / "mine.yaml").write_text(settings.to_yaml(), encoding="utf-8")
        return str(tmp_path / "mine.yaml")

    return written


def test_the_same_model_with_two_workers(
    file: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, pools = WorkerPool.__init__, []

    def wait_first(self: WorkerPool, *arguments: object) -> None:
        made(self, *arguments)
        self.wait()
        pools.append(len(self.workers))

    monkeypatch.setattr(WorkerPool, "__init__", wait_first)
    settings, listener = load_experiment(file(EVERYTHING, *CHANGES)), Listener()
    results = {}
    for workers in (1, 2):
        one = settings.model_copy(update={"workers": workers})
        results[workers] = run(one, tmp_path / str(workers), callback=listener)
    assert pools == [2] and not any("one process" in note or "could not" in note for note in listener.notes)
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


# ----------------------------------------------------------------------------------------------- gradients


Shown = list[tuple[Evidence, Tensor]]


@pytest.fixture
def by_gradient(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """A rule that keeps what it is shown, and the gradients of that moment."""
    shown: Shown = []

    def rule(evidence: Evidence) -> Tensor:
        gradients = evidence.gradients()
        shown.append((evidence, gradients.clone()))
        return -gradients.abs()

    rule.looks_at = "gradients"  # type: ignore[attr-defined]
    monkeypatch.setitem(RULES, "by_gradient", rule)
    return shown


@pytest.mark.parametrize("scope", ["client", "federated", "server"])
def test_gradients_are_autograds(scope: str, experiment: Maker, by_gradient: Shown, tmp_path: Path) -> None:
    """Of the mean loss on all samples of the client, of all clients, or of all that the server sees."""
    mask = f"{{rule: by_gradient, sparsity: 0.9, scope: {scope}, calibration_rounds: 1, fisher: {{samples: 1000}}}}"
    settings = experiment(
        f"phases=[{{name: a, train: all, rounds: 1, local: {{steps: 1, lr: 0.1}}, mask: {mask}}}]"
    ).resolved()
    run(settings, tmp_path / "run")
    context = RunContext(settings, Callback())
    (line,), parts = read_metrics(tmp_path / "run"), context.partition.clients
    for place, (evidence, gradients) in enumerate(by_gradient):
        assert evidence.client == (sorted(line["clients"])[place] if scope == "client" else None)
        own = context.training if evidence.client is None else context.training[parts[evidence.client]]
        model = context.classifier.eval()
        images = context.transform.evaluation(context.data.train.images[own])
        loss = nn.functional.cross_entropy(model(images), context.data.train.labels[own])
        chosen = [dict(model.named_parameters())[name] for name in evidence.shapes]
        assert [tuple(one.shape) for one in chosen] == list(evidence.shapes.values())
        expected = torch.cat([one.flatten() for one in torch.autograd.grad(loss, chosen)])
        torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
        lowest = expected.abs().argsort(descending=True)[: len(expected) // 20]
        name = "shared" if evidence.client is None else f"client-{evidence.client:06d}"
        assert Mask.load(tmp_path / "run" / "masks" / "a" / f"{name}.safetensors").unpack()[lowest].all()
    assert len(by_gradient) == (3 if scope == "client" else 1)


def test_each_calibration_round_looks_at_fresh_samples(experiment: Maker, by_gradient: Shown, tmp_path: Path) -> None:
    mask = "{rule: by_gradient, sparsity: 0.9, calibration_rounds: 3, damping: 1.0, fisher: {samples: 4}}"
    run(experiment("clients.count=1", f"phases.1.mask={mask}", "phases.*.rounds=1"), tmp_path)
    first, second, third = (gradients for _, gradients in by_gradient)
    assert not torch.equal(first, second) and not torch.equal(second, third)


def test_gradients_work_on_any_module(by_gradient: Shown) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    batches = [(torch.randn(16, 8), torch.randint(0, 3, (16,))) for _ in range(4)]
    mask = calibrate(model, batches, 0.9, rule="by_gradient", rounds=1)
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    gradients = torch.autograd.grad(nn.functional.cross_entropy(model(inputs), labels), list(model.parameters()))
    vector = torch.cat([one.flatten() for one in gradients]).abs()
    largest = vector.argsort(descending=True)[: mask.active - 4]  # one of each tensor is kept alive
    assert mask.unpack()[largest].all() and by_gradient[0][0].client is None


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("evidence.gradients()", r"rule mine looks at gradients; declare it: @fedsieve.rule\(looks_at='gradients'\)"),
        ("evidence.weights[:3]", r"rule mine gives a tensor of shape \[3\]; expected one score for each of"),
        ("3", "rule mine gives int; expected one score for each of"),
        ("evidence.weights / 0", "the scores of .* are not finite"),
        ("evidence.weights * 0", "rule mine gives every weight the same score"),
        (
            "evidence.gradient()",
            r"parts.py, line \d+: AttributeError: 'Evidence' object has no attribute 'gradient'",
        ),
    ],
)
@pytest.mark.parametrize("scope", ["server", "client"])
def test_what_a_rule_may_do_wrong(code: str, scope: str, said: str, file: Callable[..., str], tmp_path: Path) -> None:
    text = RULE.replace("evidence.weights.abs()", code)
    with pytest.raises(RunError, match=said):
        run(load_experiment(file(text, *BY_RULE, f"phases.1.mask.scope={scope}")), tmp_path / "run")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_at_some_clients_ends_the_run(workers: int, file: Callable[..., str], tmp_path: Path) -> None:
    """A bug of the user's is no client's fault, and must not look like a result."""
    text = RULE.replace("evidence.weights.abs()", "evidence.weights.abs() * (1 // (evidence.client % 2))")
    changes = ("phases.1.mask.scope=client", "clients.fraction=1.0", f"workers={workers}")
    with pytest.raises(RunError, match=r"plugin parts.py, line \d+: ZeroDivisionError"):
        run(load_experiment(file(text, *BY_RULE, *changes)), tmp_path / "run")


# ----------------------------------------------------------------------------------------- splits, data, callbacks


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("[[0], [1]]", "split: mine gives 2 arrays; expected one for each of 6 clients"),
        ("[[0, 1]] * 6", "split: mine gives sample 0 to two clients"),
        ("[[one] for one in range(5)] + [[10**6]]", r"split: mine gives positions outside of 0 to 179"),
        ("[[one + 0.5] for one in range(6)]", "split: mine gives numbers that are not whole"),
        ("7", "split: mine gives int; expected a list of arrays"),
        ("[[one] for one in range(5)] + [[]]", "leaves 1 client without samples"),
    ],
)
def test_what_a_split_may_do_wrong(code: str, said: str, file: Callable[..., str], tmp_path: Path) -> None:
    text = f"import fedsieve\n\n@fedsieve.split\ndef mine(labels, classes, count, settings, g):\n    return {code}\n"
    with pytest.raises(InputError, match=said):
        run(load_experiment(file(text, "clients.split=mine")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("None", "data.name: mine gives no tuple of four or five arrays"),
        ("([[0.5]], [0], [[0.5]], [0])", "data.name: mine: x_train is float64; images are stored as uint8"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_a_data_set_may_do_wrong(code: str, said: str, file: Callable[..., str], tmp_path: Path) -> None:
    text = f"import fedsieve\n\n@fedsieve.dataset\ndef mine(settings):\n    return {code}\n"
    with pytest.raises((InputError, RunError), match=said):
        run(load_experiment(file(text, "data.name=mine", "data.path=null")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_callback_that_fails_does_not_end_a_run(file: Callable[..., str], tmp_path: Path) -> None:
    text = "import fedsieve\n\n@fedsieve.callback\nclass Mine(fedsieve.Callback):\n"
    text += "    def round(self, line):\n        raise {}\n"
    listener = Listener()
    run(load_experiment(file(text.format("KeyError(line['round'])"))), tmp_path / "run", callback=listener)
    said = "callback mine failed (plugin parts.py, line 6: KeyError: 1); the run goes on without it"
    assert listener.warnings == [said]
    text = text.replace("import fedsieve", "import fedsieve; from fedsieve.errors import RunError")
    with pytest.raises(RunError, match="enough"):
        run(load_experiment(file(text.format("RunError('enough')"))), tmp_path / "ended", callback=listener)


RECORDER = """
import json
import fedsieve

@fedsieve.callback
class Recorder(fedsieve.Callback):
    def attached(self, experiment, folder):
        self.file = (folder / "heard.txt").open("a")

    def note(self, text):
        self.file.write(f"note {text}\\n")

    def concluded(self, result):
        self.file.write("concluded\\n")
        result["phases"].clear()
        result["test_accuracy"] = "changed"

    def ended(self):
        self.file.close()
"""


def test_a_callback_is_attached_when_the_folder_is_the_runs(file: Callable[..., str], tmp_path: Path) -> None:
    """It may write to the folder of a new run, to that of no other, and changes no result."""
    settings, out = load_experiment(file(RECORDER, "phases.1.rounds=1", "data.limit=100")), tmp_path / "run"
    result = run(settings, out)
    assert len(result["phases"]) == 2 and isinstance(result["test_accuracy"], float)
    heard = (out / "heard.txt").read_text(encoding="utf-8").splitlines()
    assert "data.limit: 100 of" in heard[0] and heard[-1] == "concluded"  # also what was said before the start
    for other in (settings, settings.model_copy(update={"seed": 99})):
        with pytest.raises(InputError, match="holds a"):
            run(other, out)
    run(settings, out, resume=True)
    assert (out / "heard.txt").read_text(encoding="utf-8").splitlines() == heard


def test_a_callback_that_cannot_be_made(file: Callable[..., str], tmp_path: Path) -> None:
    text = "import fedsieve\n\n@fedsieve.callback\nclass Mine(fedsieve.Callback):\n"
    text += "    def __init__(self):\n        raise ValueError('no')\n"
    with pytest.raises(InputError, match=r"callback mine cannot be made \(plugin parts\.py, line 6: ValueError: no\)"):
        run(load_experiment(file(text)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------- aggregators and the like


OPTIMIZER = """
@fedsieve.server_optimizer
class Mine:
    def __init__(self, settings): ...
    def start(self, weights):
        return {{"sum": weights.clone()}}
    def step(self, weights, direction, state):
        return {}
"""
SELECTION = """
from fedsieve.federate.selection.uniform import Uniform

@fedsieve.selection
class Mine(Uniform):
    def candidates(self, generator):
        return {}
"""
AGGREGATOR = """
from fedsieve.federate.aggregators.mean import Mean

@fedsieve.aggregator
class Mine(Mean):
    def finish(self):
        return {}
"""
SCHEDULE = "\n@fedsieve.schedule\ndef mine(done):\n    return {}\n"
METHOD = """
from fedsieve.federate.methods.fedavg import FedAvg

@fedsieve.method
class Mine(FedAvg):
    def train(self, task, mine):
        {}
"""


@pytest.mark.parametrize(
    ("text", "key", "code", "said"),
    [
        (
            AGGREGATOR,
            "phases.*.aggregate",
            "self.sum[:3]",
            r"aggregator mine gives a tensor of shape \[3\]; expected a",
        ),
        (AGGREGATOR, "phases.*.aggregate", "None", "aggregator mine gives NoneType; expected a direction"),
        (
            OPTIMIZER,
            "phases.*.server_optimizer",
            "weights",
            "optimizer mine: step gives a tensor of shape .*; expected th",
        ),
        (
            OPTIMIZER,
            "phases.*.server_optimizer",
            "weights[:3], state",
            r"step gives a tensor of shape \[3\]; expected ",
        ),
        (
            OPTIMIZER,
            "phases.*.server_optimizer",
            "weights, {}",
            r"remembers a dict with nothing; .* start gives \(sum\)",
        ),
        (SELECTION, "clients.select", "[0, 99]", "selection mine: candidates gives client 99; expected one of 0 to 5"),
        (SELECTION, "clients.select", "[]", "selection mine: candidates gives no client; expected at least one"),
        (SELECTION, "clients.select", "[1, 1]", "selection mine: candidates gives a client twice"),
        (SELECTION, "clients.select", "None", "selection mine: candidates gives NoneType; expected a list"),
        (
            SCHEDULE,
            "phases.*.local.schedule",
            "torch.tensor(1.0)",
            "schedule mine gives Tensor; expected a finite number",
        ),
        (SCHEDULE, "phases.*.local.schedule", "float('nan')", "schedule mine gives nan; expected a finite number"),
        (
            METHOD,
            "phases.*.method",
            "raise TypeError('one\\ntwo')",
            r"^plugin parts.py, line 9: TypeError: one$",
        ),
        (
            METHOD,
            "phases.*.method",
            "return task + 1",
            r"^plugin parts.py, line 9: TypeError: unsupported op",
        ),
    ],
)
def test_what_other_parts_may_do_wrong(
    text: str, key: str, code: str, said: str, file: Callable[..., str], tmp_path: Path
) -> None:
    settings = load_experiment(file(f"import fedsieve\nimport torch\n{text.format(code)}", f"{key}=mine"))
    with pytest.raises(RunError, match=said) as raised:
        run(settings, tmp_path / "run")
    assert "\n" not in str(raised.value)


def test_parts_that_do_right_are_as_good_as_ours(file: Callable[..., str], tmp_path: Path, experiment: Maker) -> None:
    texts = [AGGREGATOR.format("super().finish()"), SELECTION.format("super().candidates(generator)")]
    texts = [text.replace("Mine", f"Mine{number}") for number, text in enumerate(texts)]
    changes = ("phases.*.aggregate=mine0", "clients.select=mine1")
    found = run(load_experiment(file("import fedsieve\n" + "".join(texts), *changes)), tmp_path / "run")
    assert found["model_sha256"] == run(experiment(), tmp_path / "ours")["model_sha256"]


@pytest.mark.parametrize("key", ["phases.*.aggregate", "phases.*.server_optimizer", "clients.select", "schedule"])
def test_parts_of_a_script_make_a_run_go_on_in_one_process(
    key: str, experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for registry in KINDS.values():
        monkeypatch.setattr(registry, "_parts", dict(registry._parts))
    api.aggregator("mine")(type("Own", (AGGREGATORS["mean"],), {}))
    api.server_optimizer("mine")(type("Own", (SERVER_OPTIMIZERS["sgd"],), {}))
    api.selection("mine")(type("Own", (SELECTIONS["uniform"],), {}))
    if key == "schedule":
        key = "phases.*.local.schedule"
        api.schedule("mine")(functools.partial(max, 0.5))
    listener = Listener()
    settings = experiment(f"{key}=mine", "workers=2", "phases.*.rounds=1")
    run(settings, tmp_path / "run", callback=listener)
    assert not listener.warnings and any("going on in one process" in note for note in listener.notes)
