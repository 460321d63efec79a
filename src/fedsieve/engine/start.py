"""Which engine an experiment runs on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsieve.config.decorators import KINDS
from fedsieve.context import RunContext
from fedsieve.engine.client_runtime import ClientRuntime
from fedsieve.engine.kept import KeptInFolder
from fedsieve.engine.parcel import CannotTravelError, packed
from fedsieve.engine.serial import Serial
from fedsieve.engine.worker_pool import WorkerPool
from fedsieve.federate.local_optimizers import LOCAL_OPTIMIZERS
from fedsieve.phase import Phase

SHARED = [kind for kind in KINDS if kind != "callback"]  # the parts that worker processes know, with the experiment


@contextmanager
def engine_for(context: RunContext, phases: list[Phase], folder: Path) -> Iterator[Serial | WorkerPool]:
    """The engine for the experiment's number of workers; its processes end with this context."""
    runtime = ClientRuntime(context, phases, KeptInFolder(folder))
    is_changed = LOCAL_OPTIMIZERS.is_changed or any(KINDS[kind].is_changed for kind in SHARED)
    if context.experiment.workers != 1 and is_changed:
        context.note(
            "parts that were added in this process are not known to others; going on in one process (plugins are known)"
        )
    if context.experiment.workers == 1 or is_changed:
        yield Serial(runtime)
        return
    try:
        parcel = packed(context)
    except CannotTravelError as error:
        context.note(f"{error}; going on in one process")
        yield Serial(runtime)
        return
    pool = WorkerPool(runtime, parcel)
    try:
        yield pool
    finally:
        pool.close()
