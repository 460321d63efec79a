"""docs/extend.md: every example is run as it stands there, and does what it says."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedsieve.cli import main
from fedsieve.config.decorators import KINDS
from fedsieve.config.experiment_file import load_experiment
from fedsieve.context import RunContext
from fedsieve.model.flat import FlatModel
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.model_file import load_classifier
from fedsieve.runs.read import read_metrics, read_result
from fedsieve.sieve.mask import Mask

TEXT = (Path(__file__).parents[2] / "docs" / "extend.md").read_text(encoding="utf-8")
PLUGINS = {name: f"# {name}\n{code}" for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TEXT, re.DOTALL)}
COMMANDS = {line.split()[-1]: line for line in re.findall(r"^fedsieve run .*\.py$", TEXT[TEXT.index("### A ") :], re.M)}
(EXPERIMENT,) = re.findall(r"```yaml\n(# mine.yaml\n.*?)```", TEXT, re.DOTALL)
QUICK = ("data.limit=100", "device=cpu", "threads=1")
Folder = Callable[..., Path]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("extend")
    (place / "mine.yaml").write_text(EXPERIMENT, encoding="utf-8")
    for name, code in PLUGINS.items():
        (place / name).write_text(code, encoding="utf-8")
    return place


@pytest.fixture
def ran(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """The folder of a run by the command in the document; of a plain run without a plugin's name."""

    def run(plugin: str | None, *changes: str) -> Path:
        monkeypatch.chdir(place)
        command = shlex.split(COMMANDS[plugin]) if plugin else ["fedsieve", "run", "mine.yaml"]
        folder = tmp_path / "-".join((plugin or "plain", *map(str, map(len, changes))))
        with pytest.raises(SystemExit) as ended:
            main([*command[1:], *QUICK, *changes, "--out", str(folder)])
        assert not ended.value.code
        if plugin:
            assert (folder / "plugins" / plugin).read_text(encoding="utf-8") == PLUGINS[plugin]
        return folder

    return run


def weights(folder: Path) -> Tensor:
    return FlatModel(load_classifier(folder)).vector.clone()


def start(place: Path) -> Tensor:
    return RunContext(load_experiment(str(place / "mine.yaml"), QUICK).resolved(), Callback()).model.vector.clone()


def test_there_is_an_example_of_each_kind() -> None:
    assert len(PLUGINS) == len(COMMANDS) == len(KINDS) == 9
    assert {name for name in PLUGINS if name in COMMANDS} == set(PLUGINS)
    decorators = {word for code in PLUGINS.values() for word in re.findall(r"^@fedsieve\.(\w+)", code, re.MULTILINE)}
    assert decorators == {kind.replace("data set", "dataset").replace(" ", "_") for kind in KINDS}


def test_a_rule(ran: Folder) -> None:
    own, given = (ran("by_gradient.py", *rule) for rule in ((), ("phases.0.mask.rule=smallest_magnitude",)))
    masks = [Mask.load(min((folder / "masks" / "last-block").glob("client-*.safetensors"))) for folder in (own, given)]
    assert masks[0].active == masks[1].active and masks[0] != masks[1]
    assert masks[0].density == pytest.approx(0.1, abs=0.001)
    assert not any(line["failed"] for line in read_metrics(own))


def test_a_method(ran: Folder) -> None:
    near, far = (read_metrics(folder)[0]["drift_mean"] for folder in (ran("proximal.py"), ran(None)))
    assert near < 0.95 * far


def test_an_aggregator(ran: Folder, place: Path) -> None:
    folder, plain = ran("clipped_mean.py"), ran(None)
    assert torch.linalg.vector_norm(weights(folder) - start(place)) < 0.0021  # of two rounds
    assert torch.linalg.vector_norm(weights(plain) - start(place)) > 0.01


def test_a_server_optimizer(ran: Folder, place: Path) -> None:
    folder, plain, begin = ran("partial_step.py", "phases.0.rounds=1"), ran(None, "phases.0.rounds=1"), start(place)
    assert not torch.equal(weights(plain), begin)
    torch.testing.assert_close(weights(folder) - begin, 0.5 * (weights(plain) - begin), rtol=1e-3, atol=1e-6)


def test_a_selection(ran: Folder) -> None:
    folder = ran("smallest.py")
    held = json.loads((folder / "split.json").read_text(encoding="utf-8"))["clients"]
    sizes = [sum(one.values()) for one in held]
    smallest = sorted(sorted(range(4), key=lambda client: (sizes[client], client))[:2])
    assert len(set(sizes)) > 1 and all(line["clients"] == smallest for line in read_metrics(folder))


def test_a_split(ran: Folder) -> None:
    held = json.loads((ran("unequal.py") / "split.json").read_text(encoding="utf-8"))["clients"]
    sizes = [sum(one.values()) for one in held]
    assert sum(sizes) == 80
    assert sizes == pytest.approx([80 * share / 30 for share in (1, 4, 9, 16)], abs=1)


def test_a_schedule(ran: Folder, place: Path) -> None:
    one_step = ("phases.0.rounds=1", "phases.0.local.steps=1")
    assert torch.equal(weights(ran("warm_up.py", *one_step)), start(place))  # its rate is 0
    assert not torch.equal(weights(ran(None, *one_step)), start(place))


def test_a_data_set(ran: Folder) -> None:
    folder = ran("stripes.py", "phases.0.rounds=4")
    assert json.loads((folder / "split.json").read_text(encoding="utf-8"))["classes"] == ["horizontal", "vertical"]
    assert read_result(folder)["test_accuracy"] > 0.9


def test_a_callback(ran: Folder) -> None:
    folder = ran("losses.py")
    lines = [f"last-block {line['round']} {line['train_loss']:.4f}" for line in read_metrics(folder)]
    assert (folder / "losses.txt").read_text(encoding="utf-8").splitlines() == lines and len(lines) == 2
    assert read_result(folder)["model_sha256"] == read_result(ran(None))["model_sha256"]


def test_nothing_is_left_behind(ran: Folder) -> None:
    before = {kind: list(registry) for kind, registry in KINDS.items()}
    ran("by_gradient.py", "phases.0.rounds=1")
    assert {kind: list(registry) for kind, registry in KINDS.items()} == before
