"""What machines tell of themselves, and how they are compared."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import fedsieve
from fedsieve.config.schema import Experiment
from fedsieve.engine.canary import canary
from fedsieve.engine.node_facts import Facts, difference, facts, files_digest, obstacle, other_bits

CANARY = "from fedsieve.engine.canary import canary; print(canary('cpu', 'float32'))"


def canary_elsewhere(**environment: str) -> str:
    """The canary's hash in a process of its own, on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", CANARY], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_canary_says_whether_another_process_has_the_same_bits() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        here = canary("cpu", "float32")
        assert here == canary("cpu", "float32") == canary_elsewhere()
        assert here != canary("cpu", "bfloat16")
    finally:
        torch.set_num_threads(threads)
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert here != canary_elsewhere(ATEN_CPU_CAPABILITY="default")


@pytest.fixture
def mine(experiment: Callable[..., Experiment]) -> Facts:
    return facts(experiment())


def test_facts_are_those_of_this_process(mine: Facts) -> None:
    assert (mine["fedsieve"], mine["torch"], mine["files"]) == (
        fedsieve.__version__,
        torch.__version__,
        files_digest(),
    )
    assert mine["cpus"] == os.cpu_count() and len(mine["gpus"]) == torch.cuda.device_count()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"torch": "2.0.0"}, "it has torch 2.0.0, and the driver has"),
        ({"fedsieve": "9.9"}, "it has fedsieve 9.9 "),
        ({"files": "0123456789ab"}, "(files 0123456789ab), and the driver has "),
        ({"canary": None}, None),
        ({"python": "3.99.1", "cpus": 1000, "gpus": ["a GPU"]}, None),
    ],
)
def test_what_keeps_a_machine_from_taking_part(mine: Facts, changed: Facts, said: str | None) -> None:
    found = difference(mine, {**mine, **changed})
    assert found is None if said is None else found is not None and said in found


def test_a_machine_without_the_gpu_that_is_asked_for(mine: Facts) -> None:
    assert obstacle(mine, dict(mine)) is None
    assert "finds no GPU" in str(obstacle(mine, {**mine, "canary": None}))


def test_versions_explain_more_than_what_failed_for_them(mine: Facts) -> None:
    theirs = {key: mine[key] for key in ("fedsieve", "files", "torch", "python")} | {"failed": "unknown key"}
    assert obstacle(mine, theirs) == "unknown key"
    assert "it has torch 2.0.0" in str(obstacle(mine, {**theirs, "torch": "2.0.0"}))


def test_a_driver_without_a_gpu_takes_the_first_nodes_bits_as_the_standard(mine: Facts) -> None:
    driver = {**mine, "canary": None}
    assert other_bits(driver, {**mine, "canary": "1" * 64}) is None
    assert other_bits(driver, {**mine, "canary": "2" * 64}) is not None


def test_builds_of_one_torch_fit_each_other(mine: Facts) -> None:
    assert difference({**mine, "torch": "2.13.0+cpu"}, {**mine, "torch": "2.13.0+cu128"}) is None


def test_other_bits_are_told_with_what_may_explain_them(mine: Facts) -> None:
    assert other_bits(mine, dict(mine)) is None
    found = other_bits(mine, {**mine, "canary": "0" * 64, "cpu": "arm64 NEON"})
    assert found is not None and "CPU arm64 NEON" in found and mine["cpu"] in found and "same_bits: false" in found
