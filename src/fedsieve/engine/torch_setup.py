"""How torch computes in every process of a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedsieve.config.schema import Experiment
from fedsieve.files.memory import keep_freed_memory
from fedsieve.observe.profile import stopwatch

SYNCHRONIZE = "FEDSIEVE_SYNCHRONIZE"  # set by --profile: wait for the GPU, to measure each section
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # with which cuBLAS gives the same bits each time


def configure_torch(experiment: Experiment, worker: int = 0) -> None:
    """Make the same command on the same machine give the same bits, and spread workers over the GPUs."""
    assert experiment.threads != "auto"
    torch.set_num_threads(experiment.threads)
    if experiment.on_ray is None:  # a driver's heap would grow: Ray's small blocks lie between large ones
        keep_freed_memory()
    if experiment.device == "cuda" and torch.cuda.is_available():  # else GPUs are at other nodes
        os.environ.setdefault(WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        torch.cuda.set_device(worker % torch.cuda.device_count())
        stopwatch.synchronize = torch.cuda.synchronize if os.environ.get(SYNCHRONIZE) else None


@contextmanager
def torch_as_before() -> Iterator[None]:
    """After this context, torch is as it was: what `configure_torch` sets, and the state of its random numbers."""
    threads, workspace, benchmark = torch.get_num_threads(), os.environ.get(WORKSPACE), torch.backends.cudnn.benchmark
    is_strict, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    state, on_gpus, gpu = torch.get_rng_state(), None, None
    if torch.cuda.is_initialized():  # else there is no state yet, and asking for it would take the GPU's memory
        on_gpus, gpu = torch.cuda.get_rng_state_all(), torch.cuda.current_device()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
        torch.use_deterministic_algorithms(is_strict, warn_only=warns)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop(WORKSPACE, None)
        if on_gpus is not None and gpu is not None:
            torch.cuda.set_rng_state_all(on_gpus)
            torch.cuda.set_device(gpu)
