"""`fedsieve mask`: the mask of a phase without the phase, what is shown of it, and two of them compared."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsieve.analysis.report.plots import plot_density
from fedsieve.config.schema import Experiment
from fedsieve.federate.mask_source import MaskSource
from fedsieve.sieve.density import density, overlap
from fedsieve.sieve.mask import Mask

Maker = Callable[..., Experiment]
MASK = "phases.1.mask={sparsity: 0.9, calibration_rounds: 2, fisher: {samples: 8}}"
LAYERS = ["q", "k", "v", "proj", "fc1", "fc2", "norms"]


@pytest.fixture
def file(experiment: Maker, tmp_path: Path) -> str:
    """The small experiment with every client in every round, and a mask in its second phase."""
    path = tmp_path / "small.yaml"
    path.write_text(experiment("clients.fraction=1.0", "phases.0.rounds=1", "phases.1.rounds=1", MASK).to_yaml())
    return str(path)


# ------------------------------------------------------------------------------- the mask that a run uses


@pytest.mark.parametrize(
    ("scope", "client", "kept"),
    [
        ("client", 0, "client-000000"),
        ("client", 4, "client-000004"),
        ("federated", 0, "shared"),
        ("server", 0, "shared"),
    ],
)
def test_it_is_the_mask_of_the_run(fedsieve: Callable, file: str, scope: str, client: int, kept: str) -> None:
    asked = [file, f"phases.1.mask.scope={scope}"]
    assert fedsieve("run", *asked, "--out", "run")[0] == 0
    assert fedsieve("mask", *asked, "--client", str(client), "--out", "mask")[0] == 0
    mask = Mask.load(Path("mask/mask.safetensors"))
    assert mask == Mask.load(Path(f"run/masks/all/{kept}.safetensors"))
    assert mask.density == pytest.approx(0.1, abs=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        "model.head=ridge",
        "phases=[{name: all, train: all, rounds: 1, local: {steps: 1, lr: 0.1}, mask: {sparsity: 0.5}}]",
    ],
)
def test_with_a_ridge_head_and_with_nothing_before(fedsieve: Callable, file: str, change: str) -> None:
    asked = [file, change, "clients.count=2"]
    assert fedsieve("run", *asked, "--out", "run")[0] == 0
    assert fedsieve("mask", *asked, "--out", "mask")[0] == 0
    assert Mask.load(Path("mask/mask.safetensors")) == Mask.load(Path("run/masks/all/client-000000.safetensors"))
    assert Path("mask/before").exists() == (change == "model.head=ridge")


@pytest.mark.parametrize("change", ["refresh=round", "refresh=epoch", "scope=server"])
def test_drawn_anew_it_is_the_first_of_the_run(
    fedsieve: Callable, file: str, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    used: list[Mask] = []
    original = MaskSource.mask

    def recorded(self: MaskSource, *arguments: object) -> Mask:
        used.append(original(self, *arguments))  # type: ignore[arg-type]
        return used[-1]

    asked = [file, f"phases.1.mask.{change}"] + ["phases.1.mask.refresh=round"] * (not change.startswith("refresh"))
    with monkeypatch.context() as patched:
        patched.setattr(MaskSource, "mask", recorded)
        assert fedsieve("run", *asked, "--out", "run")[0] == 0
    assert fedsieve("mask", *asked, "--out", "mask")[0] == 0
    assert Mask.load(Path("mask/mask.safetensors")) == used[0]


def test_a_mask_from_a_file_needs_no_run(fedsieve: Callable, file: str) -> None:
    assert fedsieve("mask", file, "--out", "one")[0] == 0
    assert fedsieve("mask", file, "phases.1.mask={file: one/mask.safetensors}", "--out", "two")[0] == 0
    assert Mask.load(Path("two/mask.safetensors")) == Mask.load(Path("one/mask.safetensors"))
    assert not Path("two/before").exists()


def test_what_comes_before_is_run_once(fedsieve: Callable, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted before the mask is there, the same command goes on."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fedsieve.analysis.phase_mask.first_mask", interrupt)
        code, _, said = fedsieve("mask", file, "--out", "mask")
    assert code == 130 and said.startswith("error: interrupted") and "--out" in said
    code, printed, _ = fedsieve("mask", file, "--out", "mask")
    assert code == 0 and "before is finished already" in printed
    assert fedsieve("mask", file, "--out", "new")[0] == 0
    assert Mask.load(Path("mask/mask.safetensors")) == Mask.load(Path("new/mask.safetensors"))
    Path("new/mask.safetensors").unlink()
    Path("new/density.png").unlink()
    code, _, said = fedsieve("mask", file, "seed=8", "--out", "new")
    assert code == 2 and "before holds a different run (seed is 7 in its experiment.yaml, 8 here)" in said


# --------------------------------------------------------------------------------------- what is shown of it


def naive_cells(mask: Mask) -> dict[tuple[str, str], set[int]]:
    """The positions in the mask that belong to each row and column of the table."""
    cells: dict[tuple[str, str], set[int]] = {}
    start = 0
    for name, shape in mask.shapes.items():
        size = int(np.prod(shape))
        places = np.arange(start, start + size).reshape(shape)
        start += size
        block = re.search(r"blocks\.(\d+)\.", name)
        if block is None:
            kinds = {
                "patch_embed": "patch",
                "cls_token": "tokens",
                "pos_embed": "tokens",
                "backbone.norm": "final norm",
            }
            row = next((kind for part, kind in kinds.items() if part in name), "head")
            parts = {(row, "all"): places}
        elif "qkv" in name:
            third = shape[0] // 3
            parts = {(block[1], x): places[i * third : (i + 1) * third] for i, x in enumerate("qkv")}
        else:
            parts = {(block[1], next((kind for kind in LAYERS[3:6] if kind in name), "norms")): places}
        for (row, column), part in parts.items():
            for cell in {(row, column), (row, "all")}:
                cells.setdefault(cell, set()).update(part.flatten().tolist())
    return cells


def positions(mask: Mask) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.bits.numpy(), bitorder="little")).tolist())


def cells_of(shown: dict) -> Iterator[tuple[tuple[str, str], float | None]]:
    for block, row in shown["blocks"].items():
        assert list(row) == [*LAYERS, "all"]
        yield from (((block, column), share) for column, share in row.items())
    yield from (((row, "all"), share) for row, share in shown["rest"].items())


def table_cells(printed: str) -> dict[tuple[str, str], str]:
    """What stands in a printed table, by row and column."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in printed.splitlines()]
    header, *rows = [row for row in rows if row]
    return {(row[0], column): cell for row in rows for column, cell in zip(header[1:], row[1:], strict=True) if cell}


def as_percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}%".replace("100.0%", "100%")


def test_densities_are_those_of_a_naive_count(fedsieve: Callable, file: str) -> None:
    code, printed, _ = fedsieve("mask", "--json", "--out", "one", file)
    shown = json.loads(printed)
    mask = Mask.load(Path("one/mask.safetensors"))
    active, cells = positions(mask), naive_cells(mask)
    assert code == 0 and (shown["active"], shown["size"]) == (len(active), mask.size)
    assert shown["density"] == len(active) / mask.size
    assert shown["tensors"] == {name: mask[name].double().mean().item() for name in mask.shapes}
    assert dict(cells_of(shown)) == {cell: len(active & places) / len(places) for cell, places in cells.items()}
    code, printed, _ = fedsieve("mask", file)
    assert code == 0
    assert printed.splitlines()[-1] == "written to runs/small-mask: mask.safetensors and density.png"
    expected = {cell: as_percent(len(active & places) / len(places)) for cell, places in cells.items()}
    assert table_cells(printed) == expected | {("total", "all"): as_percent(len(active) / mask.size)}
    assert f"{len(active):,} of {mask.size:,} weights may change" in printed
    assert max(map(len, printed.splitlines())) <= 80
    width, height = Image.open("runs/small-mask/density.png").size
    assert width > 800 and height > 300
    assert fedsieve("mask", file)[0] == 0 and Path("runs/small-mask-2/mask.safetensors").exists()


def test_what_is_out_of_scope_is_left_empty(fedsieve: Callable, file: str) -> None:
    scope = ["phases.1.train={blocks: [1], head: true}", "phases.1.mask.only=[attention, head]"]
    code, printed, _ = fedsieve("mask", file, *scope, "--out", "one", "--phase", "all")
    cells = table_cells(printed)
    assert code == 0 and {row for row, _ in cells} == {"0", "1", "patch", "tokens", "final norm", "head", "total"}
    covered = {("1", column) for column in ("q", "k", "v", "proj", "all")} | {("head", "all"), ("total", "all")}
    assert {cell for cell, share in cells.items() if share != "–"} == covered


def test_networks_without_blocks_have_a_row_for_each_kind(tmp_path: Path) -> None:
    shapes = {
        "backbone.network.embedder.convolution.weight": (4, 3),
        "backbone.network.encoder.layer.0.attention.query.weight": (2, 5),
        "backbone.network.encoder.layer.1.attention.query.weight": (2, 5),
        "backbone.network.encoder.layer.0.layernorm.weight": (5,),
        "backbone.network.something": (),
        "head.weight": (10,),
    }
    active = torch.arange(48) % 3 == 0
    layers = density(Mask.pack(shapes, active))
    numbers = active.numpy()
    expected = {
        "norm": numbers[32:37].mean(),
        "patch": numbers[:12].mean(),
        "attention": numbers[12:32].mean(),
        "head": numbers[38:].mean(),
        "other": numbers[37],
    }
    assert layers.blocks == {} and layers.rest == expected and layers.total == numbers.mean()
    plot_density(layers, tmp_path / "density.png")
    assert Image.open(tmp_path / "density.png").size[1] > 200


def test_an_empty_mask_can_be_drawn_and_compared(tmp_path: Path) -> None:
    mask = Mask.empty({"backbone.blocks.0.attn.proj.weight": (3, 3)})
    assert density(mask).total == 0 and overlap(mask, mask).blocks[0]["proj"] == 1
    plot_density(density(mask), tmp_path / "density.png")


# ------------------------------------------------------------------------------------------------- compare


def test_overlaps_are_those_of_sets(fedsieve: Callable, file: str) -> None:
    for client in ("0", "3"):
        assert fedsieve("mask", file, "--client", client, "--out", f"client{client}")[0] == 0
    first, second = (Mask.load(Path(f"client{client}/mask.safetensors")) for client in (0, 3))
    ones, others, cells = positions(first), positions(second), naive_cells(first)

    def jaccard(places: set[int]) -> float:
        either = (ones | others) & places
        return len(ones & others & places) / len(either) if either else 1.0

    code, printed, _ = fedsieve("mask", "compare", "client0", "client3/mask.safetensors", "--json")
    shown = json.loads(printed)
    assert code == 0 and shown["overlap"] == jaccard(ones | others) and 0 < shown["overlap"] < 1
    assert shown["densities"] == [len(ones) / first.size, len(others) / first.size]
    assert shown["tensors"] == {name: jaccard(set(range(*first.ranges[name]))) for name in first.shapes}
    assert dict(cells_of(shown)) == {cell: jaccard(places) for cell, places in cells.items()}
    code, printed, _ = fedsieve("mask", "compare", "client0", "client3")
    expected = {cell: as_percent(jaccard(places)) for cell, places in cells.items()}
    assert code == 0 and table_cells(printed) == expected | {("total", "all"): as_percent(shown["overlap"])}
    assert printed.splitlines()[-2:] == ["density 10.0%: client0", "density 10.0%: client3"]


# ----------------------------------------------------------------------------------------------- bad input

BAD = {
    "no mask": (["phases.1.mask=null"], "no phase of this experiment has a mask; add phases.1.mask={sparsity: 0.9}"),
    "unknown phase": (["--phase", "edit"], "--phase edit: there is no such phase; use head or all"),
    "phase without a mask": (["--phase", "head"], "phase head has no mask; add phases.0.mask={sparsity: 0.9}"),
    "nothing but ridge": (["model.head=ridge", "phases=[]"], "this experiment has no phases"),
    "no such client": (["--client", "6"], "--client 6: there is no such client; use 0 to 5"),
    "client below 0": (["--client", "-1"], "--client -1: there is no such client; use 0 to 5"),
    "no such block": (["phases.1.train={blocks: [3]}"], "the backbone has no block 3"),
    "out below a file": (["--out", "FILE/mask"], "cannot be made"),
    "out is a file": (["--out", "FILE"], "is a file"),
    "no override": (["--phase=all", "seed"], "'seed' is no override"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_written(fedsieve: Callable, file: str, case: str) -> None:
    arguments, expected = BAD[case]
    code, printed, said = fedsieve("mask", file, *(part.replace("FILE", file) for part in arguments))
    assert code == 2 and not printed
    assert said.startswith("error: ") and len(said.splitlines()) == 1 and expected in said
    assert list(Path.cwd().iterdir()) == []


def test_an_existing_folder_is_refused(fedsieve: Callable, file: str) -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    code, printed, said = fedsieve("mask", file, "--out", "mine")
    assert (code, printed, len(said.splitlines())) == (2, "", 1)
    assert said.startswith("error: --out mine holds something else than a mask")
    Path("mine/notes.txt").unlink()
    Mask.full({"one": (3,)}).save(Path("mine/mask.safetensors"))
    code, _, said = fedsieve("mask", file, "--out", "mine")
    assert code == 2 and said == "error: --out mine holds a mask already; give another folder\n"
    assert [path.name for path in Path("mine").iterdir()] == ["mask.safetensors"]


def test_masks_that_cannot_be_compared(fedsieve: Callable, tmp_path: Path) -> None:
    one, other, none = (tmp_path / name for name in ("one.safetensors", "other.safetensors", "none.safetensors"))
    Mask.full({"a": (3,), "b": (2, 2)}).save(one)
    Mask.full({"a": (3,), "c": (2, 2)}).save(other)
    none.write_bytes(b"no mask")
    for arguments, part in [
        ([one, other], "other.safetensors belongs to another model or phase: it has c where b is expected"),
        ([one, none], "none.safetensors is no mask"),
        ([tmp_path, one], "mask.safetensors does not exist"),
        ([tmp_path / "nowhere", one], "nowhere does not exist"),
        ([one], "Missing argument 'B'"),
    ]:
        code, printed, said = fedsieve("mask", "compare", *map(str, arguments))
        assert code == 2 and not printed and len(said.splitlines()) == 1
        assert said.startswith("error: ") and part in said


def test_help_explains_both(fedsieve: Callable) -> None:
    assert re.search(r"mask +Calibrate", fedsieve("--help")[1])
    code, printed, _ = fedsieve("mask", "--help")
    assert code == 0 and "EXPERIMENT" in printed and "compare A B" in printed and "calibrate" in printed
    for arguments in (["mask", "digits-iid", "--help"], ["mask", "calibrate", "--help"]):
        code, printed, _ = fedsieve(*arguments)
        assert code == 0 and all(part in printed for part in ("--phase", "--client", "--out", "KEY=VALUE"))
    code, printed, _ = fedsieve("mask", "compare", "--help")
    assert code == 0 and "Jaccard" in printed
    code, _, said = fedsieve("mask")
    assert code == 2 and "EXPERIMENT" in said


def test_an_experiment_whose_data_are_at_nodes(fedsieve: Callable, file: str) -> None:
    code, printed, said = fedsieve("mask", file, "engine=flower", "--out", "mask")
    assert code == 2 and not printed and not Path("mask").exists()
    assert said == "error: the data of this experiment are at its nodes; engine=local uses data that are here\n"
    assert fedsieve("split", file, "engine=flower", "--export", "shards")[0] == 0  # this is how one makes them
