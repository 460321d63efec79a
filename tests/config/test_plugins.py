"""Plugins: when they are executed, what they may register, and one line for whatever is wrong with them."""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import fedsieve
from fedsieve.config.decorators import KINDS, snake_case
from fedsieve.config.experiment_file import load_experiment, parse_experiment
from fedsieve.config.plugins import active, used
from fedsieve.config.runnable import loaded, with_plugins
from fedsieve.config.schema import Experiment
from fedsieve.config.settings import option
from fedsieve.errors import InputError, RunError
from fedsieve.federate.methods import METHODS
from fedsieve.federate.schedule import SCHEDULES
from fedsieve.sieve.rules import RULES, looked_at

RULE = "import fedsieve\n\n@fedsieve.rule\ndef mine(evidence):\n    return evidence.weights\n"
ALL = """
import fedsieve
from fedsieve.federate.methods.fedavg import FedAvg
from fedsieve.federate.selection.uniform import Uniform

class Settings(fedsieve.Settings):
    power: float = 1.0

@fedsieve.rule("my-rule", looks_at="gradients")
def any_name(evidence): ...

@fedsieve.method
class MyMethod(FedAvg):
    class Settings(fedsieve.Settings):
        mu: float = 0.5

@fedsieve.selection()
class MySelection(Uniform): ...

@fedsieve.split(settings=Settings)
def my_split(labels, classes, count, settings, generator): ...

@fedsieve.schedule
def my_schedule(done): ...

@fedsieve.dataset
def my_data(settings): ...
"""
EXPERIMENT = """
plugins: [parts.py]
data: {name: my_data}
clients: {count: 4, select: my_selection, split: {kind: my_split, power: 2.0}}
phases:
  - name: one
    train: all
    rounds: 1
    local: {steps: 1, lr: 0.1, schedule: my_schedule}
    method: {my_method: {mu: 0.25}}
    mask: {rule: my-rule, sparsity: 0.5}
"""


@pytest.fixture
def place(tmp_path: Path) -> Callable[..., str]:
    """Writes files, and gives the path of the first."""

    def written(**files: str) -> str:
        for name, text in files.items():
            (tmp_path / f"{name}.{'yaml' if name == 'experiment' else 'py'}").write_text(text, encoding="utf-8")
        return str(tmp_path / f"{next(iter(files))}.py")

    return written


def names() -> dict[str, list[str]]:
    return {kind: list(registry) for kind, registry in KINDS.items()}


def test_an_experiment_is_read_without_executing_its_plugins(place: Callable[..., str], tmp_path: Path) -> None:
    place(parts=f"{ALL}\nraise RuntimeError('executed')", experiment=EXPERIMENT)
    experiment = load_experiment(str(tmp_path / "experiment.yaml"), ["phases.0.rounds=3"])
    assert experiment.plugins == (str(tmp_path / "parts.py"),)
    assert (experiment.data.name, experiment.clients.split.kind) == ("my_data", "my_split")
    assert experiment.phases[0].method == {"my_method": {"mu": 0.25}} and not experiment.phases[0].mask.looks_at
    again = parse_experiment(experiment.resolved().to_yaml())
    assert again == experiment.resolved() and again.same_outcome(experiment.resolved())
    with pytest.raises(InputError, match="unknown key 'cuont' in clients"):
        load_experiment(str(tmp_path / "experiment.yaml"), ["clients.cuont=3"])
    for wrong, said in {"[[1]]": "expected text", "{a: 1}": "expected a list", '["a\\0b"]': "no possible path"}.items():
        with pytest.raises(InputError, match=said):
            load_experiment("digits-iid", [f"plugins={wrong}"])
    with pytest.raises(InputError, match=r"clients\.secure: zero_sum"):  # what can be checked is
        load_experiment(str(tmp_path / "experiment.yaml"), ["clients.secure=zero_sum"])


def test_loaded_parts_are_checked_like_our_own(place: Callable[..., str], tmp_path: Path) -> None:
    place(parts=ALL, experiment=EXPERIMENT)
    file = str(tmp_path / "experiment.yaml")
    with loaded(file) as experiment:
        assert experiment.phases[0].method.my_method.mu == 0.25
        assert experiment.clients.split.power == 2.0 and experiment.phases[0].mask.looks_at == "gradients"
        assert Experiment.model_validate(experiment.model_dump(mode="json")) == experiment
    for override, said in {
        "phases.0.method={my_method: {nu: 1}}": r"unknown key 'nu' in phases\.0\.method\.my_method",
        "phases.0.method=my_methd": r"use fedavg or .*my_method; did you mean 'my_method'\?",
        "clients.split={kind: my_split, pwer: 1}": r"unknown key 'pwer' in clients\.split; did you mean 'power'\?",
        "clients.split=my_splt": "clients.split is 'my_splt'; use iid or classes or dirichlet or flwr or my_split",
        "data.name=my_dat": "data.name is 'my_dat'; use cifar100 or digits or folder or npz or my_data",
        "phases.0.local.schedule=m": r"schedule is 'm'; use cosine or constant or linear or my_schedule",
        "phases.0.mask.rule=m": "mask.rule is 'm'; use least_sensitive or .* or random or my-rule",
        "clients.select=m": "use uniform or by_size or high_loss or my_selection",
    }.items():
        with pytest.raises(InputError, match=said), loaded(file, [override]):
            pass


def test_parts_are_there_only_while_they_are_used(place: Callable[..., str]) -> None:
    before, path = names(), place(parts=ALL)
    with used([path]):
        assert RULES["my-rule"].__name__ == "any_name" and looked_at("my-rule") == "gradients"
        assert list(METHODS)[-1] == "my_method" and not any(registry.is_changed for registry in KINDS.values())
        with used([path]):  # a run within a command
            assert "my-rule" in RULES
        assert "my-rule" in RULES
    assert names() == before and not active([path])
    with pytest.raises(KeyError), used([path]):
        raise KeyError  # of something else, whatever it is
    assert names() == before


def test_a_plugin_that_was_edited_is_loaded_again(place: Callable[..., str]) -> None:
    path = place(parts=RULE)
    with used([path]):
        assert "mine" in RULES and "other" not in RULES
        place(parts=RULE.replace("mine", "other"))
        with used([path]):
            assert active([path])[0].text == RULE  # as it was when the outer run began
    with used([path]):
        assert "other" in RULES and "mine" not in RULES


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist; give a Python file"),
        ("import fedsieve\n\n1 / 0\n", "line 3: ZeroDivisionError: division by zero"),
        ("import fedsieve\ndef f(:\n", "line 2: SyntaxError: invalid syntax"),
        ("import fedsieve, sys\nsys.exit('no')", "line 2: SystemExit: no"),
        ("import no_such_package", "line 1: ModuleNotFoundError: No module named 'no_such_package'"),
        (RULE + RULE, "line 8: rule 'mine' is registered twice; give one of them another name"),
        (RULE.replace("mine", "random"), "line 3: there is a rule 'random' in fedsieve already; give yours another"),
        ("x = 1", "registers nothing; put one of @fedsieve.rule, @fedsieve.method,"),
        ("", "registers nothing"),
        ("import fedsieve\n@fedsieve.method\ndef f(): ...", "line 2: method 'f' is a function; write it as a class"),
        ("import fedsieve\n@fedsieve.callback\nclass F: ...", "line 2: callback 'f' is not derived from"),
        ("import fedsieve\n@fedsieve.rule('a b')\ndef f(): ...", "line 2: 'a b' is no name for a rule"),
        ("import fedsieve\n@fedsieve.rule(looks_at='x')\ndef f(): ...", "line 2: looks_at is 'x'; use 'sensitivity'"),
        ("import fedsieve\nfedsieve.rule('name')(3)", "line 2: a rule is int; put the decorator before a function"),
        (
            "import fedsieve\n@fedsieve.method\nclass F: ...",
            "line 2: method 'f' is not derived from FedAvg; write class",
        ),
        (
            "import fedsieve\n@fedsieve.selection\nclass F: ...",
            "line 2: selection 'f' is not derived from Uniform; write",
        ),
        (
            "import fedsieve\n@fedsieve.aggregator\nclass F: ...",
            "line 2: aggregator 'f' has no function add; docs/extend",
        ),
        (
            "import fedsieve\n@fedsieve.server_optimizer\nclass F:\n    start = step = print\n    Settings = dict",
            "line 2: the settings of server optimizer 'f' are no class derived from fedsieve.Settings; make them one",
        ),
        (
            "import fedsieve\n@fedsieve.server_optimizer\nclass F:\n    start = step = print",
            "line 2: server optimizer 'f' must take the arguments (settings)",
        ),
        (
            "import fedsieve\n@fedsieve.split(settings=3)\ndef f(): ...",
            "line 2: the settings of a split are no class derived from fedsieve.Settings; make them one",
        ),
        ("import fedsieve\n@fedsieve.schedule\ndef f(): ...", "line 2: schedule 'f' must take the arguments (done)"),
    ],
)
def test_whatever_is_wrong_with_a_plugin_is_one_line(
    text: str | None, said: str, fedsieve: Callable, tmp_path: Path
) -> None:
    before, path = names(), tmp_path / "parts.py"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    for command in ("run", "mask", "split"):
        code, out, err = fedsieve(command, "digits-iid", "--plugin", str(path))
        assert code == 2 and not out and err.startswith(f"error: plugin {path}") and said in err
        assert err.count("\n") == 1
    assert names() == before and not list(Path().iterdir())


def test_two_plugins_must_be_told_apart(place: Callable[..., str], tmp_path: Path) -> None:
    one, before, said = place(one=RULE, two=RULE), names(), r"two\.py: rule 'mine' is registered by the plugin one\.py"
    with pytest.raises(InputError, match=said), used([one, str(tmp_path / "two.py")]):
        pass
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "one.py").write_text(RULE.replace("mine", "other"), encoding="utf-8")
    with pytest.raises(InputError, match=r"two plugins are called one\.py"), used([one, str(tmp_path / "more/one.py")]):
        pass
    assert names() == before


def test_decorators_outside_of_a_plugin_simply_register(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in KINDS.values():  # so that the tests after this one find them as they were
        monkeypatch.setattr(registry, "_parts", dict(registry._parts))
    for _ in range(2):  # a notebook's cell may be run twice

        @fedsieve.rule
        def MyOwnRule(evidence):  # noqa: N802
            return evidence.weights

    assert RULES["my_own_rule"] is MyOwnRule and RULES.is_changed
    with pytest.raises(InputError, match="there is a schedule 'cosine' in fedsieve already"):
        fedsieve.schedule("cosine")(lambda done: 1.0)
    assert fedsieve.schedule("p")(partial(max, 0.5)) and SCHEDULES.is_changed  # it has no name of its own


def test_an_error_in_a_plugins_code_is_one_line(place: Callable[..., str]) -> None:
    path = place(parts=f"{RULE}\n\ndef fails():\n    return {{}}['key']\n")
    with pytest.raises(RunError, match=r"parts\.py, line 9: KeyError: 'key'"), used([path]):
        RULES["mine"].__globals__["fails"]()


def test_a_plugin_may_begin_with_a_byte_order_mark(place: Callable[..., str]) -> None:
    path = place(parts=f"\ufeff{RULE}")
    with used([path]):
        assert "mine" in RULES
        assert active([path])[0].digest == hashlib.sha256(Path(path).read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["parts.txt", "parts", ".parts.py"])
def test_a_plugin_is_called_like_a_python_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(RULE, encoding="utf-8")
    with (
        pytest.raises(InputError, match="is not called like a Python file; give it a name"),
        used([f"{tmp_path}/{name}"]),
    ):
        pass


def test_names_are_in_snake_case() -> None:
    words = ["FedProx", "mine", "MyHTTPRule", "A", "Rule2Go"]
    assert [snake_case(word) for word in words] == ["fed_prox", "mine", "my_http_rule", "a", "rule2_go"]


def test_more_plugins_in_python(place: Callable[..., str], tmp_path: Path) -> None:
    path = place(parts=RULE)
    experiment = load_experiment("digits-edit-iid", ["phases.1.mask.rule=mine"], [path])
    with with_plugins(experiment) as known:
        assert known.phases[1].mask.rule == "mine" and known.plugins == (path,)
    plain = load_experiment("digits-edit-iid")
    assert plain.plugins == () and option(plain.phases[0].method) == "fedavg"
    with with_plugins(plain, [Path(path)]) as known:
        assert known.plugins == (path,)
    with with_plugins(plain) as known:
        assert known is plain
    with pytest.raises(InputError, match=r"mask.rule is 'mine'; use least_sensitive or "):
        load_experiment("digits-edit-iid", ["phases.1.mask.rule=mine"])
