"""What is told and checked before a run begins."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.errors import InputError
from fedsieve.experiment import run
from fedsieve.experiment.notes import check_room, held_in_memory, kept_masks, remembered
from fedsieve.observe.callbacks import Callback
from fedsieve.phase import plan
from listeners import Listener, interrupt

Maker = Callable[..., Experiment]
SCAFFOLD = ("phases.1.method=scaffold", "phases.1.local.momentum=0.0")


def test_what_clients_remember_is_told_and_is_what_lies_on_disk(experiment: Maker, tmp_path: Path) -> None:
    """SCAFFOLD's control variates, and what int8 rounding left out of both vectors."""

    class Looks(Listener):
        largest = 0

        def round(self, line: dict) -> None:
            sizes = [file.stat().st_size for file in (tmp_path / "run/clients/all").glob("*.safetensors")]
            self.largest = max([self.largest, *sizes])

    settings, listener = experiment(*SCAFFOLD, "wire.values=int8").resolved(), Looks()
    run(settings, tmp_path / "run", callback=listener)
    phase = plan(settings, RunContext(settings, Callback()))[1]
    each = remembered(settings, phase)
    assert each == 4 * (phase.scope.weights + phase.scope.size + phase.scope.weights)
    assert each < listener.largest < each + 1000  # and a header
    assert any(note.startswith("phase all: each client remembers") for note in listener.notes)


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_written(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match=r"phase all: what clients remember takes .*, and there are 1\.0 kB free at"):
        run(experiment(*SCAFFOLD), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_a_run_has_written_counts_as_room_when_it_is_resumed(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks of both phases, which stay for the whole run, and states of the second."""
    mask = "{sparsity: 0.5, rule: smallest_magnitude}"
    settings = experiment(*SCAFFOLD, f"phases.*.mask={mask}", "clients.fraction=1.0").resolved()
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "run", callback=interrupt(4))
    phases = plan(settings, RunContext(settings, Callback()))
    starts = sum(4 * phase.scope.size for phase in phases)
    needed = starts + 6 * sum(map(kept_masks, phases)) + (6 + 3 * 6) * remembered(settings, phases[1])
    masks, states = (
        [file.stat().st_size for file in (tmp_path / "run").glob(f"{kept}/*/*")] for kept in ("masks", "clients")
    )
    assert len(masks) == 2 * (6 + 1) and 0 <= sum(masks) - starts - 6 * sum(map(kept_masks, phases)) < 1000 * len(masks)
    written = sum(masks) + sum(states)
    for free, fits in ((needed - written - 1, False), (needed - written, True)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        if fits:
            check_room(settings, phases, tmp_path / "run")
            continue
        with pytest.raises(InputError, match="phase all: what clients remember takes up to"):
            check_room(settings, phases, tmp_path / "run")


def test_a_median_that_does_not_fit_into_memory(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = experiment("phases.*.aggregate=median", "phases.1.mask={sparsity: 0.5, rule: random}").resolved()
    listener = Listener()
    run(settings, tmp_path / "fits", callback=listener)
    assert sum("median holds all updates of a round" in note for note in listener.notes) == 2
    head, masked = plan(settings, RunContext(settings, Callback()))
    assert held_in_memory(settings, head) == 3 * 4 * head.scope.size
    assert held_in_memory(settings, masked) == 3 * 12 * (masked.scope.size - masked.scope.sieved_weights // 2)
    monkeypatch.setattr("fedsieve.files.memory.machine_memory", lambda: 1_000_000)
    with pytest.raises(InputError, match=r"median holds all 3 updates of a round: .* use aggregate: mean"):
        run(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("refresh", ["once", "round", "epoch"])
def test_masks_that_are_the_same_for_every_client_are_named(refresh: str, experiment: Maker, tmp_path: Path) -> None:
    """Magnitudes are those of the server's weights, except in a client's second epoch."""
    found = {}
    for scope in ("client", "server"):
        listener, mask = Listener(), f"{{rule: largest_magnitude, sparsity: 0.7, refresh: {refresh}, scope: {scope}}}"
        if (scope, refresh) == ("server", "epoch"):
            mask = mask.replace("epoch", "round")
        settings = experiment(f"phases.1.mask={mask}", "phases.1.local={epochs: 2, lr: 0.1}", "data.limit=100")
        found[scope] = run(settings, tmp_path / scope, callback=listener)
        told = [note for note in listener.notes if "all: largest_magnitude gives every client the same mask" in note]
        assert bool(told) == (scope == "client" and refresh != "epoch")
    is_same = found["client"]["model_sha256"] == found["server"]["model_sha256"]
    assert is_same == (refresh != "epoch")
    assert not is_same or found["client"]["bytes_up"] > found["server"]["bytes_up"]
