"""Experiment files: what they may say, and one clear line for whatever they may not."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.analysis.sweep.sweep_file import Sweep, load_sweep
from fedsieve.config.data_settings import DataSettings
from fedsieve.config.experiment_file import experiment_name, load_experiment, parse_experiment, parse_kept
from fedsieve.config.schema import Experiment
from fedsieve.config.settings import Settings
from fedsieve.data.load import Samples
from fedsieve.data.load import load as load_data
from fedsieve.data.transform import Transform
from fedsieve.errors import InputError
from fedsieve.files import memory

FILE = """\
seed: 1
data: {name: digits}
model: {head: {mlp: {hidden: 5}}}
clients:
  count: 10
  fraction: 0.5
  split: {kind: classes, per_client: 2}
phases:
  - name: head
    train: head
    rounds: 3
    local: {epochs: 1, lr: 1e-3}
"""


def error_of(text: str, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        parse_experiment(text, "my.yaml", overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_reads_what_it_says() -> None:
    experiment = parse_experiment(FILE)
    assert experiment.seed == 1 and experiment.clients.per_round == 5
    assert experiment.phases[0].local.lr == 0.001  # YAML 1.1 would take 1e-3 for text
    assert experiment.model.head.mlp.hidden == 5
    with pytest.raises(ValueError, match="frozen"):
        experiment.seed = 2


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            "fraction: 0.5",
            "fractoin: 0.5",
            "my.yaml, line 6: unknown key 'fractoin' in clients; did you mean 'fraction'?",
        ),
        ("seed: 1", "sead: 1", "my.yaml, line 1: unknown key 'sead' at the top level; did you mean 'seed'?"),
        ("hidden: 5", "hiden: 5", "my.yaml, line 3: unknown key 'hiden' in model.head.mlp; did you mean 'hidden'?"),
        ("rounds: 3", "rounds: 3\n    rouns: 4", "my.yaml, line 12: unknown key 'rouns' in phases.0"),
        ("per_client: 2", "perclient: 2", "my.yaml, line 7: unknown key 'perclient' in clients.split"),
        ("seed: 1", "seed: 1\nxyz: 3", "my.yaml, line 2: unknown key 'xyz' at the top level; the keys there are seed,"),
        ("count: 10", "count: ten", 'my.yaml, line 5: clients.count is "ten"; expected a whole number'),
        ("count: 10", "count: 2.5", "clients.count is 2.5; expected a whole number"),
        ("count: 10", "count: true", "clients.count is true; expected a whole number"),
        ("count: 10", "count: 0", "clients.count is 0; it should be greater than or equal to 1"),
        ("fraction: 0.5", "fraction: 0", "clients.fraction is 0; it should be greater than 0"),
        ("fraction: 0.5", "fraction: 1.5", "clients.fraction is 1.5; it should be less than or equal to 1"),
        ("fraction: 0.5", "fraction: .nan", "clients.fraction is NaN; it should be"),
        (
            "name: digits",
            "name: digit",
            "data.name is 'digit'; use cifar100 or digits or folder or npz; did you mean 'digits'?",
        ),
        ("kind: classes", "kind: clases", "clients.split is 'clases'; use iid or classes or dirichlet or flwr"),
        ("train: head", "train: hed", "phases.0.train is 'hed'; use head or backbone or all; did you mean 'head'?"),
        ("train: head", "train: {blocks: []}", "phases.0.train.blocks is []"),
        ("{mlp: {hidden: 5}}", "lineer", "model.head is 'lineer'; use linear or mlp or ridge; did you mean 'linear'?"),
        (
            "train: head",
            "train: all\n    mask: {sparsity: 0.9, only: [mlp, head], dense: [head]}",
            "phases.0.mask: only and dense both name head",
        ),
        ("train: head", "train: all\n    mask: {sparsity: 0.9, dense: [heads]}", "did you mean 'head'?"),
        ("epochs: 1", "epochs: 1, steps: 2", "phases.0.local: give epochs or steps, exactly one of them"),
        ("epochs: 1, ", "", "phases.0.local: give epochs or steps, exactly one of them"),
        (", lr: 1e-3", "", "phases.0.local needs a value for 'lr'"),
        *(
            ("split: {kind: classes, per_client: 2}", f"split: {{kind: dirichlet{given}}}", f"clients.split: {wrong}")
            for given, wrong in (
                ("", "give alpha (of each class, such as 0.5) or concentration (of all classes together), exactly one"),
                (", alpha: 0.5, concentration: 50.0", "give alpha (of each class"),
                (", concentration: 0.5, balanced: false", "concentration belongs to balanced splits"),
            )
        ),
        ("lr: 1e-3", "lr: 1e-3, nesterov: true, momentum: 0.0", "nesterov needs a momentum above 0"),
        ("lr: 1e-3", "lr: 1e-3, optimizer: adam", "local.optimizer is 'adam'; use sgd or adamw; did you mean 'adamw'?"),
        *(
            ("lr: 1e-3", f"lr: 1e-3, optimizer: {{adamw: {{{given}}}}}", f"adamw.{key} is {wrong}")
            for given, key, wrong in (
                ("beta1: 1", "beta1", "1; it should be less than 1"),
                ("beta2: -0.1", "beta2", "-0.1; it should be greater than or equal to 0"),
                ("eps: 0", "eps", "0; it should be greater than 0"),
            )
        ),
        *(
            ("lr: 1e-3", f"lr: 1e-3, optimizer: adamw, {key}: {value}", f"{key} belongs to optimizer: sgd")
            for key, value in (("momentum", 0.5), ("nesterov", "true"))
        ),
        ("seed: 1", "seed: 1\nseed: 2", "my.yaml, line 2: 'seed' is given twice"),
        ("seed: 1", "seed: [1", "my.yaml, line 2: this is not YAML"),
        ("seed: 1", "threads: 0", "threads: use auto or a whole number from 1 to 1024"),
        ("name: digits", "name: folder", "data.name: folder needs data.path"),
        ("name: digits", "augment: horizontal_flip", 'data.augment is "horizontal_flip"; expected a list'),
        ("name: digits", "augment: [{random_resized_crop: {scale: [0.9, 0.5]}}]", "use two shares of the image's area"),
        ("name: digits", "augment: [{random_resized_crop: {scale: [0.5, 2]}}]", "scale.1 is 2; it should be less than"),
        ("name: digits", "validation: 1.0", "data.validation is 1.0; it should be less than 1"),
        ("name: digits", "validation: 0\nevaluate: {keep: best}", "evaluate.keep: best needs validation data"),
    ],
)
def test_one_line_says_what_is_wrong(old: str, new: str, message: str) -> None:
    assert old in FILE
    text = FILE.replace(old, new, 1)
    if "evaluate" in new:
        text = FILE.replace("data: {name: digits}", "data: {name: digits, validation: 0}\nevaluate: {keep: best}")
    assert message in error_of(text)


def test_phases_have_names_of_their_own() -> None:
    assert "two phases are called 'head'" in error_of(FILE + FILE[FILE.index("  - name") :])
    assert "nothing to do" in error_of("seed: 3")
    assert parse_experiment("model: {head: {ridge: {penalty: 2.0}}}").phases == ()


@pytest.mark.parametrize("text", ["- 1", "just words", "3"])
def test_other_yaml_is_no_experiment(text: str) -> None:
    assert "holds no settings" in error_of(text)


def test_overrides() -> None:
    changed = parse_experiment(
        FILE, "f", ["clients.count=20", "phases.0.rounds=5", "clients.split=iid", "data.path=null"]
    )
    assert changed.clients.count == 20 and changed.phases[0].rounds == 5 and changed.clients.split.kind == "iid"
    assert parse_experiment(FILE, "f", ["evaluate.every=3"]).evaluate.every == 3  # a group the file does not mention
    assert parse_experiment(FILE, "f", ["model.head={ridge: {penalty: 1e3}}"]).model.head.ridge.penalty == 1000
    assert "override 'clients.cuont=3': unknown key 'cuont' in clients; did you mean 'count'?" in error_of(
        FILE, "clients.cuont=3"
    )
    assert "there is no entry 4 in the list; use 0 to 0" in error_of(FILE, "phases.4.rounds=1")
    assert "write key=value" in error_of(FILE, "nonsense")
    assert "seed is null; expected a whole number" in error_of(FILE, "seed=")
    assert "nothing to set 'rounds' in" in error_of(FILE, "phases.0=3", "phases.0.rounds=5")
    assert "no entry ² in the list" in error_of(FILE, "phases.².rounds=5")
    assert "this is not YAML" in error_of(FILE, "seed=\x07")


def test_overrides_name_a_phase_by_number_or_name() -> None:
    text = FILE + "  - {name: edit, train: all, rounds: 2, local: {steps: 1, lr: 0.1}}\n"
    changed = parse_experiment(text, "f", ["phases.edit.rounds=5", "phases.head.local.lr=0.5"])
    assert [phase.rounds for phase in changed.phases] == [3, 5] and changed.phases[0].local.lr == 0.5
    assert changed == parse_experiment(text, "f", ["phases.1.rounds=5", "phases.0.local.lr=0.5"])
    assert "there is no entry edti in the list; use 0 to 1, or a name: head, edit" in error_of(text, "phases.edti.x=5")


def test_what_people_write_is_understood() -> None:
    assert parse_experiment(FILE, "f", ["device=gpu"]).device == "cuda"
    assert parse_experiment(FILE, "f", ["track=wandb"]).track == ("wandb",)
    assert "track is 'wand'; use tensorboard or wandb or mlflow; did you mean 'wandb'?" in error_of(FILE, "track=wand")


@pytest.mark.parametrize(("sparsity", "meant"), [("90", "0.9"), ("99.5", "0.995"), ("2", "0.02")])
def test_a_percentage_is_no_sparsity(sparsity: str, meant: str) -> None:
    said = error_of(FILE, f"phases.0.mask.sparsity={sparsity}")
    assert f"phases.0.mask.sparsity: {sparsity} is no fraction below 1; did you mean {meant}?" in said
    for all_of_it in ("1", "100"):
        assert "it should be less than 1" in error_of(FILE, f"phases.0.mask.sparsity={all_of_it}")


def test_a_sweep_is_no_experiment() -> None:
    said = error_of("experiment: digits-iid\narms: {clients.count: [5, 10]}", "phases.0.rounds=3")
    assert said == "my.yaml is a sweep file, not an experiment; use `fedsieve sweep my.yaml`"
    with pytest.raises(InputError, match="use `fedsieve sweep 002-fixed-budget`"):
        load_experiment("002-fixed-budget")


def test_a_misspelt_file_finds_its_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", "sub/other.yml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(FILE)
    for name, meant in (("min.yaml", "mine.yaml"), ("mine", "mine.yaml"), ("sub/othr.yml", "sub/other.yml")):
        for load in (load_experiment, load_sweep):
            with pytest.raises(InputError, match=re.escape(f"'{name}' is neither a file") + f".*mean '{meant}'"):
                load(name)


def test_the_last_override_wins() -> None:
    assert parse_experiment(FILE, "f", ["seed=5", "seed=6"]).seed == 6


def test_resolving_settles_what_is_open() -> None:
    central = parse_experiment(FILE, "f", ["clients.count=1", "clients.split=iid"]).resolved()
    assert central.phases[0].optimizer_state == "carry" and central.data.image_size == 32
    federated = parse_experiment(FILE, "f", ["model.backbone=facebook/dino-vits16"]).resolved()
    assert federated.phases[0].optimizer_state == "reset" and federated.data.image_size == 64
    assert federated.device in ("cpu", "cuda") and federated.threads >= 1
    assert federated.resolved() == federated


def test_adamw_is_read_as_it_is_written() -> None:
    """With every default filled in, momentum included, which is not AdamW's."""
    experiment = parse_experiment(FILE, "f", ["phases.*.local.optimizer=adamw"])
    assert experiment.phases[0].local.optimizer_arguments["betas"] == (0.9, 0.999)
    kept = experiment.resolved().to_yaml()
    assert "momentum: 0.9" in kept and parse_experiment(kept) == experiment.resolved()
    masked = ["phases.*.local.optimizer=adamw", "phases.0.mask={sparsity: 0.9, refresh: round, momentum: leak}"]
    refused = "phases.0.local.optimizer: adamw does not go with mask.momentum: leak: frozen weights have no"
    assert refused in error_of(FILE, *masked)


def test_a_name_alone_means_its_defaults() -> None:
    experiment = parse_experiment(FILE, "f", ["model.head=mlp", "data.augment=[random_resized_crop]"])
    assert experiment.model.head.mlp.hidden == 512
    assert experiment.data.augment[0].random_resized_crop.scale == (0.5, 1.0)


def test_yaml_that_never_ends_is_refused() -> None:
    assert "refers to itself" in error_of("data: &x {augment: [*x]}")


TENFOLD = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TENFOLD, "more than 100,000 values"),
        (f"seed: 1 # {'x' * 10**6}", "use at most 1,000,000"),
        ("seed: " + "[" * 5000, "nested too deeply"),
        ("seed: !!bool abc", "line 1: 'abc' is no valid true or false"),
        ("seed: !!int ''", "'' is no valid whole number"),
        ("seed: !!timestamp abc", "'abc' is no valid date"),
        ("seed: 2001-99-99", "'2001-99-99' is no valid date"),
        ("seed: " + "9" * 5000, "9... is no valid whole number"),
        ("seed: 0x" + "f" * 9000, "f... is no valid whole number"),
        ("? [seed]\n: 1", "a key is a list or a group"),
        ('"\\ud800": 1', "is no valid text"),
        ("data: {name: " + "x" * 9999 + "}", "xxx...; use cifar100"),
        ("phases: [{name: " + "x" * 101 + "}]", "at most 100 of them"),
    ],
)
def test_hostile_yaml_is_one_short_line(text: str, message: str) -> None:
    started = time.perf_counter()
    said = error_of(text)
    assert message in said and len(said) < 300 and time.perf_counter() - started < 5


def test_a_long_override_is_cut_and_a_huge_file_is_not_read(tmp_path: Path) -> None:
    assert len(error_of(FILE, "seed=" + "9" * 5000)) < 300
    file = tmp_path / "huge.yaml"
    file.touch()
    os.truncate(file, 10**12)
    with pytest.raises(InputError, match="more than 1,000,000 bytes"):
        load_experiment(str(file))


def numbers(schema: Any, path: str = "") -> Iterator[tuple[str, dict]]:
    """Every place of a JSON schema at which a number may stand."""
    if isinstance(schema, dict) and schema.get("type") in ("integer", "number"):
        yield path, schema
    elif isinstance(schema, dict | list):
        for key, part in schema.items() if isinstance(schema, dict) else enumerate(schema):
            yield from numbers(part, f"{path}/{key}")


@pytest.mark.parametrize("kind", [Experiment, Sweep])
def test_every_number_has_an_upper_limit(kind: type[Settings]) -> None:
    found = dict(numbers(kind.model_json_schema()))
    assert len(found) > (40 if kind is Experiment else 4)
    assert [path for path, number in found.items() if not number.keys() & {"maximum", "exclusiveMaximum"}] == []


@pytest.mark.parametrize(
    "override",
    ["phases.0.rounds=1" + "0" * 22, "data.image_size=2147483648", f"seed={2**63}", "phases.0.local.lr=1e39"],
)
def test_numbers_beyond_reason_are_refused(override: str) -> None:
    assert "it should be less than" in error_of(FILE, override)


def test_images_that_memory_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_data(DataSettings(name="digits"))
    Transform(DataSettings(image_size=4096), Samples(data.train.images[:1], data.train.labels[:1]))
    monkeypatch.setattr(memory, "machine_memory", lambda: 16 * 10**9)
    with pytest.raises(InputError, match=r"data.image_size 4096 .* 40.3 GB, and this machine has 16.0 GB"):
        Transform(DataSettings(image_size=4096), data.train)


@pytest.mark.parametrize("name", ["~nosuchuser/x", "x" * 5000, "nul\0"])
def test_impossible_paths(name: str) -> None:
    for call in (
        lambda: load_experiment(name),
        lambda: parse_experiment(FILE, "f", [f"data.path='{name}'"]).resolved(),
    ):
        with pytest.raises(InputError):
            call()


def test_runs_are_called_like_their_experiment() -> None:
    assert experiment_name("002-table4.3-fedavg-iid-edit") == "002-table4.3-fedavg-iid-edit"
    assert experiment_name("some/folder/mine.yaml") == "mine"


def test_unknown_preset() -> None:
    with pytest.raises(InputError, match="neither a file nor a preset; did you mean 'digits-iid'"):
        load_experiment("digit-iid")


@given(
    st.builds(
        dict,
        seed=st.integers(0, 2**40),
        clients=st.builds(dict, count=st.integers(1, 10**6), fraction=st.floats(1e-6, 1)),
        evaluate=st.builds(dict, every=st.integers(1, 99), test=st.sampled_from(["end", "each", "never"])),
        model=st.just({"head": {"ridge": {"penalty": 2.5}}}),
    )
)
def test_what_is_written_reads_the_same(settings: dict) -> None:
    experiment = Experiment.model_validate(settings)
    assert parse_experiment(experiment.to_yaml()) == experiment
    assert parse_experiment(yaml.safe_dump(settings)) == experiment


@pytest.mark.parametrize(
    ("changes", "allowed", "workers", "threads"),
    [
        ([], None, 8, 1),  # a core for each client
        (["clients.fraction=0.1"], None, 4, 1),  # more cores than clients in a round
        (["clients.count=1"], None, 1, 8),  # then the result depends on the machine, and the run says so
        (["threads=4"], None, 2, 4),
        (["threads=16"], None, 1, 16),
        (["workers=3"], None, 3, 1),
        (["workers=30"], None, 30, 1),
        (["workers=3", "threads=5"], None, 3, 5),
        ([], "2", 2, 1),
        ([], "", 8, 1),  # as if it were not set
        (["workers=5"], "2", 5, 1),  # what the file says counts more
        (["clients.fraction=0.1", "model.head={ridge: {penalty: 1.0}}"], None, 8, 1),  # where everybody takes part
    ],
)
def test_workers_and_threads_follow_from_cores_and_clients(
    changes: list[str], allowed: str | None, workers: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("FEDSIEVE_WORKERS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("FEDSIEVE_WORKERS", allowed)
    settings = load_experiment("digits-iid", ["clients.count=40", "device=cpu", *changes]).resolved()
    assert (settings.workers, settings.threads) == (workers, threads)
    assert settings.resolved() == settings


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_wrong_number_of_allowed_workers(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIEVE_WORKERS", text)
    with pytest.raises(InputError, match=f"FEDSIEVE_WORKERS is '{text}'; give a whole number"):
        load_experiment("digits-iid").resolved()


@pytest.mark.parametrize("phases", ["3", "abc", "[3]", "{a: 1}", "[null]", "null"])
@pytest.mark.parametrize("combine", ["all", "active", "{fisher_mixing: {}}", "null", "[1]"])
def test_a_damaged_file_of_an_older_run_is_one_line(phases: str, combine: str) -> None:
    with pytest.raises(InputError):
        parse_kept(f"clients: {{combine: {combine}}}\nphases: {phases}\n", "experiment.yaml")


def test_the_phases_of_an_older_run_do_not_share_their_method() -> None:
    phase = "{name: %s, train: head, rounds: 1, local: {steps: 1, lr: 0.1}}"
    text = f"clients: {{combine: {{fisher_mixing: {{}}}}}}\nphases: [{phase % 'a'}, {phase % 'b'}]\n"
    first, second = parse_kept(text, "run", ["phases.0.method.fisher_mixing.dtype=bfloat16"]).phases
    assert (first.method.fisher_mixing.dtype, second.method.fisher_mixing.dtype) == ("bfloat16", "float16")
