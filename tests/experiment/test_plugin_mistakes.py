"""What parts of a plugin may do wrong, and what is then said."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

import fedsieve as api
from fedsieve.config.decorators import KINDS
from fedsieve.config.experiment_file import load_experiment
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError, RunError
from fedsieve.experiment import run
from fedsieve.federate.aggregators import AGGREGATORS
from fedsieve.federate.selection import SELECTIONS
from fedsieve.federate.server_optimizers import SERVER_OPTIMIZERS
from listeners import Listener

Maker = Callable[..., Experiment]

RULE = "import fedsieve\n\n@fedsieve.rule\ndef mine(evidence):\n    return evidence.weights.abs()\n"
BY_RULE = ["phases.1.mask={rule: mine, sparsity: 0.5}", "phases.0.rounds=1"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("evidence.gradients()", r"rule mine looks at gradients; declare it: @fedsieve.rule\(looks_at='gradients'\)"),
        ("evidence.weights[:3]", r"rule mine gives a tensor of shape \[3\]; expected one score for each of"),
        ("3", "rule mine gives int; expected one score for each of"),
        ("evidence.weights / 0", "rule mine gives scores that are not finite"),
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


FOLDING = """
from fedsieve.federate.methods.fedavg import FedAvg

@fedsieve.method
class Mine(FedAvg):
    {}
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def start(self, weights, preparation): ...", "start gives NoneType; expected a dict of tensors"),
        ("def send(self, server): return {'x': server['x']}", r"line 8: KeyError: 'x'"),
        (
            "def send(self, server): return {'x': torch.ones(3)}",
            r"send gives a dict with x \[3\]; its extras are nothing",
        ),
        (
            "def fold(self, w, updates, server): return super().fold(w, updates, server)[0]",
            "fold gives a tensor of shape",
        ),
        (
            "def fold(self, w, updates, server): return super().fold(w, updates, server)[0][:5], server",
            r"fold gives a tuple \(a tensor of shape \[5\], a dict with nothing\); expected [\d,]+ new weights",
        ),
        ("def fold(self, w, updates, server): return w, server", "fold returns before it has read all updates"),
        ("def fold(self, w, updates, server): return w, next(updates) and server", "fold returns before"),
        ("def train(self, task, mine): ...", "train gives NoneType; expected an update, and a dict of tensors"),
        ("def train(self, task, mine): return super().train(task, mine)[0]", "train gives Update; expected"),
        (
            "def train(self, task, mine): return super().train(task, mine)[0], {'n': 1}",
            r"train gives a tuple \(Update, a",
        ),
        (
            "replies = {'delta': 3}",
            r"train gives an update with a dict with delta \[\d+\]; its replies are delta \(3 numbers\)",
        ),
        (
            "reports = frozenset({'norm'})",
            "train gives an update with the metrics train_loss, drift; expected numbers for drift, norm, train_loss",
        ),
        (
            "def train(self, task, mine):\n        update, mine = super().train(task, mine)\n"
            "        update.vectors['delta'] = update.vectors['delta'].double()\n        return update, mine",
            "train gives an update whose delta is torch.float64; expected torch.float32",
        ),
    ],
)
def test_what_a_method_may_do_wrong(code: str, said: str, file: Callable[..., str], tmp_path: Path) -> None:
    settings = load_experiment(file(f"import fedsieve\nimport torch\n{FOLDING.format(code)}", "phases.*.method=mine"))
    with pytest.raises(RunError, match=f"method mine: {said}" if "line" not in said else said) as raised:
        run(settings, tmp_path / "run")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        (FOLDING.format("def train(self, task, own):\n        return task.data.client % 2 or super().train(task, own)"),
         "phases.1.method=mine", "method mine: train gives int"),
        (RULE.replace("weights.abs()", "weights.abs() / (evidence.client % 2)"), "phases.1.mask.rule=mine",
         "rule mine gives scores that are not finite"),
        (SCHEDULE.format("float('nan') if done else 1.0"), "phases.1.local.schedule=mine", "schedule mine gives nan"),
    ],
)  # fmt: skip
def test_a_wrong_value_at_some_clients_ends_the_run(
    text: str, key: str, said: str, workers: int, file: Callable[..., str], tmp_path: Path
) -> None:
    changes = ("phases.1.mask={rule: random, sparsity: 0.5}", key, "clients.fraction=1.0", f"workers={workers}")
    with pytest.raises(RunError, match=said):
        run(load_experiment(file(f"import fedsieve\n{text}", *changes)), tmp_path / "run")


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
            SCHEDULE,
            "phases.*.local.schedule",
            "-0.5",
            "schedule mine gives -0.5; expected a finite number of at least 0",
        ),
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
