"""What a machine tells of itself before it takes part in a run: its versions, its devices, and the canary's hash."""

import hashlib
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

import fedsieve
from fedsieve.config.schema import Experiment
from fedsieve.engine.canary import canary

Facts = dict[str, Any]


def versions() -> Facts:
    """What can be told even if nothing else works."""
    return {
        "fedsieve": fedsieve.__version__,
        "files": files_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def facts(experiment: Experiment) -> Facts:
    """To be called in a process that is set up for this experiment (`configure_torch`)."""
    has_gpu = torch.cuda.is_available()
    is_able = experiment.device == "cpu" or has_gpu
    return {
        **versions(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())] if has_gpu else [],
        "canary": canary(experiment.device, experiment.precision) if is_able else None,
    }


@cache
def files_digest() -> str:
    """Of fedsieve's own code: versions under development have the same number."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def difference(mine: Facts, theirs: Facts, who: str = "the driver") -> str | None:
    """Why a machine cannot take part in a run of this one: its versions differ."""
    if (mine["fedsieve"], mine["files"]) != (theirs["fedsieve"], theirs["files"]):
        versions = [f"{one['fedsieve']} (files {one['files']})" for one in (theirs, mine)]
        return f"it has fedsieve {versions[0]}, and {who} has {versions[1]}; install the same"
    builds = [one["torch"].partition("+")[0] for one in (theirs, mine)]  # the build for a GPU may be another one
    if builds[0] != builds[1]:
        return f"it has torch {builds[0]}, and {who} has {builds[1]}; install the same"
    return None


def obstacle(mine: Facts, theirs: Facts) -> str | None:
    """Why a machine cannot take part, until somebody changes something there."""
    if (reason := difference(mine, theirs) or theirs.get("failed")) is not None:
        return reason
    if theirs["canary"] is None:
        return "its torch finds no GPU; install one for CUDA, or use gpus_per_client: 0"
    return None


def other_bits(mine: Facts, theirs: Facts) -> str | None:
    """Why results would depend on whether this machine takes part. It sets the standard if this one has no GPU."""
    mine["canary"] = mine["canary"] or theirs["canary"]
    if mine["canary"] == theirs["canary"]:
        return None
    what = f"its last bits differ from the driver's (CPU {theirs['cpu']}, torch {theirs['torch']}"
    here = f"here {mine['cpu']}, torch {mine['torch']})"
    hidden = ", and CUDA_VISIBLE_DEVICES= for the driver leaves its own GPU out of account" if mine["gpus"] else ""
    return f"{what}; {here}; engine.ray.same_bits: false uses it all the same{hidden}"
