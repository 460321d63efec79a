"""How torch computes in every process of a run."""

import ctypes
import os
import sys

import torch

from fedsieve.config.schema import Experiment
from fedsieve.observe.profile import stopwatch

SYNCHRONIZE = "FEDSIEVE_SYNCHRONIZE"  # set by --profile: wait for the GPU, to measure each section
TRIM_THRESHOLD, MMAP_THRESHOLD, NEVER = -1, -3, (1 << 31) - 1  # of glibc's mallopt


def configure_torch(experiment: Experiment, worker: int = 0) -> None:
    """Make the same command on the same machine give the same bits, and spread workers over the GPUs."""
    assert experiment.threads != "auto"
    torch.set_num_threads(experiment.threads)
    _keep_freed_memory()
    if experiment.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        torch.cuda.set_device(worker % torch.cuda.device_count())
        stopwatch.synchronize = torch.cuda.synchronize if os.environ.get(SYNCHRONIZE) else None


def _keep_freed_memory() -> None:
    """Let glibc keep large blocks of freed memory, since they are soon needed again.

    Giving them back to the system and getting them anew, page by page, would take some 3% of a training step, and more
    than half of the time of adding up the updates.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if change is not None:
        change(TRIM_THRESHOLD, NEVER)
        change(MMAP_THRESHOLD, NEVER)
