"""Which engine an experiment runs on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsieve.context import RunContext
from fedsieve.engine.client_runtime import ClientRuntime
from fedsieve.engine.serial import Serial
from fedsieve.engine.worker_pool import WorkerPool
from fedsieve.federate.local_optimizers import LOCAL_OPTIMIZERS
from fedsieve.federate.methods import METHODS
from fedsieve.phase import Phase


@contextmanager
def engine_for(context: RunContext, phases: list[Phase], folder: Path) -> Iterator[Serial | WorkerPool]:
    """The engine for the experiment's number of workers; its processes end with this context."""
    runtime = ClientRuntime(context, phases, folder)
    has_own_parts = METHODS.is_changed or LOCAL_OPTIMIZERS.is_changed
    if context.experiment.workers != 1 and has_own_parts:
        context.note("methods that were added in this process are not known to others; going on in one process")
    if context.experiment.workers == 1 or has_own_parts:
        yield Serial(runtime)
        return
    pool = WorkerPool(runtime)
    try:
        yield pool
    finally:
        pool.close()
