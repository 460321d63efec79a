"""Run folders and checkpoints: what is refused, and what survives damage."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from xxhash import xxh3_128

from fedsieve.config.experiment_file import load_experiment
from fedsieve.config.mask_settings import MaskSettings
from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError, RunError
from fedsieve.experiment import run
from fedsieve.federate.versions import Versions
from fedsieve.files.sealed import digest_of_file
from fedsieve.runs.checkpoint import Checkpoint, Companions, Progress, find_newest, save
from fedsieve.runs.client_memory import ClientStore
from fedsieve.runs.folder import RunFolder, keep_start
from fedsieve.runs.read import read_experiment
from fedsieve.sieve.mask import Mask
from listeners import Listener, interrupt

Maker = Callable[..., Experiment]


def interrupted(settings: Experiment, out: Path, rounds: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(settings, out, callback=interrupt(rounds))


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "text"])
def test_a_damaged_newest_checkpoint_falls_back(experiment: Maker, tmp_path: Path, damage: str, monkeypatch) -> None:
    monkeypatch.setattr("fedsieve.runs.folder.CHECKPOINT_SHARE", float("inf"))  # one each round
    expected = run(experiment(), tmp_path / "whole")["model_sha256"]
    out = tmp_path / "run"
    interrupted(experiment(), out, 4)
    _, newest = sorted((out / "checkpoints").glob("*.safetensors"))
    content = bytearray(newest.read_bytes())
    if damage == "flip":
        content[-5] ^= 1
    newest.write_bytes({"truncate": bytes(content[:-100]), "empty": b"", "text": b"{}"}.get(damage, bytes(content)))
    listener = Listener()
    assert run(experiment(), out, resume=True, callback=listener)["model_sha256"] == expected
    assert any(newest.name in note and "damaged" in note for note in listener.notes)
    assert newest.with_suffix(".damaged").exists()  # kept for whoever wants to know why


def test_all_checkpoints_damaged_is_a_new_start(experiment: Maker, tmp_path: Path) -> None:
    expected = run(experiment(), tmp_path / "whole")["model_sha256"]
    out = tmp_path / "run"
    interrupted(experiment(), out, 4)
    for path in (out / "checkpoints").glob("*"):
        path.write_bytes(b"nonsense")
    assert run(experiment(), out, resume=True)["model_sha256"] == expected
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 5


def test_checkpoints_of_an_older_version_are_refused(experiment: Maker, tmp_path: Path) -> None:
    out = tmp_path / "run"
    interrupted(experiment(), out, 4)
    for path in (out / "checkpoints").iterdir():
        save_file({"vector": torch.ones(3)}, path, metadata={"progress": "{}", "digest": "0"})
    content = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=r"0000000\d\.safetensors was made by another version of fedsieve; finish"):
        run(experiment(), out, resume=True)
    assert content == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_another_number_of_threads_is_noticed(experiment: Maker, tmp_path: Path) -> None:
    """The bits depend on it, and it is read from the run's own file unless the experiment gives it."""
    out = tmp_path / "run"
    interrupted(experiment("threads=auto"), out, 1)
    file = out / "experiment.yaml"
    number = int(re.search(r"threads: (\d+)", file.read_text())[1])
    file.write_text(file.read_text().replace(f"threads: {number}", f"threads: {number + 1}"))
    told = f"{file} is damaged: it says threads: {number + 1}, and the run began with {number}"
    with pytest.raises(RunError, match=re.escape(told)):
        run(experiment("threads=auto"), out, resume=True)


def test_other_peoples_hidden_files_stay(experiment: Maker, tmp_path: Path) -> None:
    out = tmp_path / "run"
    others = [".tmp-my-notes", ".notes.partial", ".git/.tmp-object", ".git/.index.partial", ".git/clients/.tmpA1b2C3"]
    later = ["clients/all/.tmpA1b2C3", "clients/mine.txt", "checkpoints/.mine.partial", "masks/all/.tmpA1b2C3"]
    ours = [
        ".metrics.jsonl.partial",
        "checkpoints/.00000003.safetensors.partial",
        "masks/all/.start.safetensors.partial",
        "clients/all/.client-000001-round-00000004.safetensors.partial",
    ]

    def put(names: list[str]) -> None:
        for name in names:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text("mine")

    put(others)
    interrupted(experiment("phases.1.optimizer_state=carry", "phases.1.mask={sparsity: 0.5}"), out, 4)
    put(later + ours)
    run(experiment("phases.1.optimizer_state=carry", "phases.1.mask={sparsity: 0.5}"), out, resume=True)
    assert all((out / name).read_text() == "mine" for name in others + later)
    assert not any((out / name).exists() for name in ours)
    assert not list((out / "clients" / "all").glob("client-*"))


def test_a_line_cut_short_is_mended(experiment: Maker, tmp_path: Path) -> None:
    out = tmp_path / "run"
    interrupted(experiment(), out, 4)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "all", "rou')
    run(experiment(), out, resume=True)
    assert [json.loads(line)["round"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 1, 2]


def test_an_interrupted_run_goes_on(experiment: Maker, tmp_path: Path) -> None:
    expected = run(experiment("clients.count=1"), tmp_path / "whole")["model_sha256"]  # one client carries momentum
    for rounds in (1, 2, 3, 4):
        out = tmp_path / f"after-{rounds}"
        interrupted(experiment("clients.count=1"), out, rounds)
        assert run(experiment("clients.count=1"), out, resume=True)["model_sha256"] == expected


def test_what_is_there_is_never_overwritten(experiment: Maker, tmp_path: Path) -> None:
    out = tmp_path / "run"
    interrupted(experiment(), out, 2)
    with pytest.raises(InputError, match=r"unfinished run.*--resume"):
        run(experiment(), out)
    with pytest.raises(InputError, match=r"different run \(seed is 7 in its experiment\.yaml, 8 here\)"):
        run(experiment("seed=8"), out, resume=True)
    run(experiment(), out, resume=True)
    content = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="a finished run"):
        run(experiment(), out)
    with pytest.raises(InputError, match=r"phases\.0\.rounds is 3 in its experiment\.yaml, 9 here"):
        run(experiment("phases.0.rounds=9"), out)
    assert run(experiment(), out, resume=True) == json.loads((out / "result.json").read_text())
    assert content == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("all my work")
    with pytest.raises(InputError, match="something else"):
        run(experiment(), tmp_path / "other", resume=True)
    with pytest.raises(InputError, match="is a file"):
        run(experiment(), tmp_path / "other" / "thesis.tex")


def test_two_processes_do_not_share_a_folder(experiment: Maker, tmp_path: Path) -> None:
    settings = experiment().resolved()
    first = RunFolder(tmp_path / "run", settings, resume=False)
    first.start()
    for _ in range(2):  # being refused must not open the door for the next
        second = RunFolder(tmp_path / "run", settings, resume=True)
        with pytest.raises(InputError, match="in use"):
            second.start()
        second.close()
    first.close()


def test_a_run_that_came_in_between_is_not_overwritten(experiment: Maker, tmp_path: Path) -> None:
    late = RunFolder(tmp_path / "run", experiment("seed=8").resolved(), resume=False)  # the folder is free now
    run(experiment(), tmp_path / "run")
    with pytest.raises(InputError, match="different run"):
        late.start()
    assert "seed: 7" in (tmp_path / "run" / "experiment.yaml").read_text()


def test_other_data_is_noticed(experiment: Maker, images: Path, tmp_path: Path) -> None:
    """The file that the experiment names has changed since the run was interrupted."""
    copy = tmp_path / "data.npz"
    copy.write_bytes(images.read_bytes())
    interrupted(experiment(f"data.path={copy}"), tmp_path / "run", 2)
    with np.load(images) as file:
        arrays = dict(file)
    arrays["x_train"][0, 0, 0, 0] ^= 1
    np.savez(copy, **arrays)
    with pytest.raises(InputError, match="other data"):
        run(experiment(f"data.path={copy}"), tmp_path / "run", resume=True)


def test_masks_of_other_data_are_not_taken(experiment: Maker, images: Path, tmp_path: Path) -> None:
    """The run ends in its first round, when it has masks and no checkpoint, and the data is another one after that."""
    copy = tmp_path / "data.npz"
    settings = experiment(f"data.path={copy}", "phases.0.local.lr=1.0e+30", "phases.0.local.epochs=9")
    mask = {"scope": "federated", "sparsity": 0.5}
    head = settings.phases[0].model_copy(update={"mask": MaskSettings.model_validate(mask)})
    settings = settings.model_copy(update={"phases": (head,)})
    with np.load(images) as file:
        arrays = dict(file)
    bits = {}
    for name, turned in (("run", False), ("run", True), ("fresh", True)):
        np.savez(copy, **(arrays | {"x_train": arrays["x_train"][::-1] if turned else arrays["x_train"]}))
        with pytest.raises(RunError, match="round 1"):
            run(settings, tmp_path / name, resume=True)
        assert not (tmp_path / name / "checkpoints").exists()
        bits[name, turned] = Mask.load(tmp_path / name / "masks" / "head" / "shared.safetensors")
    assert bits["run", True] == bits["fresh", True] != bits["run", False]


def test_masks_of_another_backbone_are_not_taken(experiment: Maker, backbone: Path, tmp_path: Path) -> None:
    """Likewise if the weights outside of the phase's scope, which the masks were scored with, are others after that."""
    copy = tmp_path / "backbone.safetensors"
    settings = experiment(f"model.backbone={copy}", "phases.0.local.lr=1.0e+30", "phases.0.local.epochs=9")
    mask = MaskSettings.model_validate({"scope": "server", "sparsity": 0.5})
    settings = settings.model_copy(update={"phases": (settings.phases[0].model_copy(update={"mask": mask}),)})
    tensors = load_file(backbone)
    bits = {}
    for name, factor in (("run", 1.0), ("run", 3.0), ("fresh", 3.0)):
        save_file({key: factor * tensor if "fc1" in key else tensor for key, tensor in tensors.items()}, copy)
        with pytest.raises(RunError, match="round 1"):
            run(settings, tmp_path / name, resume=True)
        bits[name, factor] = Mask.load(tmp_path / name / "masks" / "head" / "shared.safetensors")
    assert bits["run", 3.0] == bits["fresh", 3.0] != bits["run", 1.0]


@given(
    weights=st.lists(st.tuples(st.floats(width=32, allow_nan=False), st.integers(-1, 2**31 - 1)), max_size=20),
    seen=st.lists(st.integers(-1, 500), max_size=5),
    block=st.integers(1, 30),
)
def test_checkpoints_come_back_as_they_were(tmp_path_factory, weights, seen, block) -> None:
    """Weights that never changed are not in the file: they are those that the run starts from."""
    run = tmp_path_factory.mktemp("run")
    folder = run / "checkpoints"
    started_from = torch.arange(float(len(weights)))
    changed = torch.tensor([change for _, change in weights], dtype=torch.int32)
    values = torch.where(changed > 0, torch.tensor([value for value, _ in weights]), started_from)
    versions = Versions(changed, torch.tensor(seen, dtype=torch.int32), 9)
    progress = Progress(phase=1, round=2, rounds=7, seconds=0.1, best={"round": 1, "val_accuracy": 0.5})
    oldest = []
    for rounds in (5, 6, 7):
        progress.rounds = rounds
        with patch("fedsieve.runs.checkpoint.BLOCK", block):
            oldest.append(save(folder, Checkpoint(progress, values, None, versions)))
    assert oldest == [5, 5, 6]
    assert sorted(path.name for path in folder.iterdir()) == ["00000006.safetensors", "00000007.safetensors"]
    (saved, before), damaged = find_newest(run)
    assert not damaged and before.progress.rounds == 6
    (ever,) = (changed > 0).nonzero(as_tuple=True)
    assert (saved.first, len(saved.vector)) == ((int(ever[0]), int(ever[-1] - ever[0]) + 1) if len(ever) else (0, 0))
    at_start = Versions(changed.clamp(max=0), torch.full((len(seen),), -1, dtype=torch.int32))
    found = saved.onto(Checkpoint(Progress(), started_from, None, at_start))
    assert found.progress == progress and found.best is None
    assert found.vector is started_from and torch.equal(found.vector, values)
    assert torch.equal(found.versions.changed, changed)
    assert (found.versions.now, found.versions.seen.tolist()) == (9, seen)


def test_a_checkpoint_knows_the_files_that_belong_to_it(tmp_path: Path) -> None:
    metrics, start = tmp_path / "metrics.jsonl", tmp_path / "masks" / "all" / "start.safetensors"
    metrics.write_bytes(b"one\ntwo\n")
    keep_start(tmp_path, "all", torch.arange(3.0))
    store = ClientStore(tmp_path / "clients" / "all")
    versions = Versions(torch.ones(4).int(), torch.zeros(2).int())
    for round in (1, 2):
        store.write(round, round, {"old": torch.arange(3.0)})
        files = {str(start.relative_to(tmp_path)): digest_of_file(start)}
        companions = Companions(4 * round, digest(metrics, 4 * round), files, "clients/all", store.states())
        state = Checkpoint(Progress(rounds=round), torch.ones(4), None, versions, {"v": torch.ones(2)}, companions)
        save(tmp_path / "checkpoints", state)
    (found, _), passed = find_newest(tmp_path)
    assert found.progress.rounds == 2 and not passed
    assert list(found.companions.states) == list(store.states()) and found.companions.files == files
    assert torch.equal(found.method["v"], torch.ones(2))

    first, second = (store.folder / f"client-00000{one}-round-0000000{one}.safetensors" for one in (1, 2))
    of_both = (start, metrics, first)
    for path, damage in [(path, damage) for path in of_both for damage in (b"", None)]:
        with damaged(path, damage), pytest.raises(RunError, match=f"{path} is damaged or gone, .* start it anew"):
            find_newest(tmp_path)
    newest = tmp_path / "checkpoints" / "00000002.safetensors"
    content = newest.read_bytes()
    other_type = content.replace(b"F32", b"I32")
    for path, damage in ((second, b"x"), (metrics, b"one\ntoo\n"), (metrics, b"one\n"), (newest, other_type)):
        with damaged(path, damage):
            (found,), passed = find_newest(tmp_path)
            assert found.progress.rounds == 1 and passed == {newest: path}


@contextmanager
def damaged(path: Path, content: bytes | None) -> Iterator[None]:
    before = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    yield
    path.write_bytes(before)


def digest(path: Path, length: int) -> str:
    return xxh3_128(path.read_bytes()[:length]).hexdigest()


def test_a_checkpoint_is_as_small_as_what_changed(tmp_path: Path) -> None:
    changed = torch.zeros(1_000_000, dtype=torch.int32)
    changed[900_000:900_100] = 3
    save(tmp_path, Checkpoint(Progress(), torch.randn(1_000_000), None, Versions(changed, torch.zeros(2).int())))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2000


@pytest.mark.parametrize(("balanced", "now"), [(True, "concentration"), (False, "alpha")])
def test_a_run_of_the_time_when_alpha_was_the_total_concentration(
    experiment: Maker, tmp_path: Path, balanced: bool, now: str
) -> None:
    """Its experiment.yaml has `alpha` and no `concentration`, and keeps its meaning; one of today has both keys."""
    settings = experiment(f"clients.split={{kind: dirichlet, {now}: 0.5, balanced: {str(balanced).lower()}}}")
    run(settings, tmp_path / "run")
    file = tmp_path / "run" / "experiment.yaml"
    written = yaml.safe_load(file.read_text())
    assert {"alpha", "concentration"} <= written["clients"]["split"].keys()
    del written["clients"]["split"]["concentration"]
    written["clients"]["split"]["alpha"] = 0.5
    file.write_text(yaml.safe_dump(written))
    result = json.loads((tmp_path / "run/result.json").read_text())
    del result["files"], result["digest"]  # nor were there digests
    (tmp_path / "run/result.json").write_text(json.dumps(result))

    split = read_experiment(tmp_path / "run").clients.split
    assert getattr(split, now) == 0.5 and split == settings.clients.split
    with pytest.raises(InputError, match="holds a finished run of this experiment"):
        RunFolder(tmp_path / "run", settings.resolved(), resume=False)
    with pytest.raises(InputError, match=r"a different run \(clients.split.alpha is") if balanced else nullcontext():
        other = experiment(f"clients.split={{kind: dirichlet, alpha: 0.5, balanced: {str(balanced).lower()}}}")
        RunFolder(tmp_path / "run", other.resolved(), resume=True)
    assert load_experiment(str(file)).clients.split == settings.clients.split
    copy = file.rename(tmp_path / "mine.yaml")
    assert load_experiment(str(copy)).clients.split.alpha == 0.5  # as a file of a person, it says what it says
