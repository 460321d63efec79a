"""Which engine an experiment runs on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedsieve.config.decorators import KINDS
from fedsieve.config.engine_settings import RaySettings
from fedsieve.context import RunContext
from fedsieve.engine.client_runtime import ClientRuntime
from fedsieve.engine.kept import KeptInFolder
from fedsieve.engine.parcel import CannotTravelError, packed
from fedsieve.engine.serial import Serial
from fedsieve.engine.worker_pool import WorkerPool
from fedsieve.errors import InputError, RunError
from fedsieve.federate.local_optimizers import LOCAL_OPTIMIZERS
from fedsieve.model.given_module import first_line
from fedsieve.phase import Phase

if TYPE_CHECKING:
    from fedsieve.engine.ray_engine import RayEngine

SHARED = [kind for kind in KINDS if kind != "callback"]  # the parts that worker processes know, with the experiment


@contextmanager
def engine_for(context: RunContext, phases: list[Phase], folder: Path) -> Iterator["Serial | WorkerPool | RayEngine"]:
    """The engine that the experiment asks for; its processes end with this context."""
    experiment = context.experiment
    runtime = ClientRuntime(context, phases, KeptInFolder(folder))
    is_changed = LOCAL_OPTIMIZERS.is_changed or any(KINDS[kind].is_changed for kind in SHARED)
    if experiment.on_ray is not None:
        if is_changed:
            what = "engine: ray: parts that were added in this process are not known at other nodes"
            raise InputError(f"{what}; put them into a plugin, or use engine: local")
        with on_ray(runtime, experiment.on_ray) as engine:
            yield engine
        return
    if experiment.workers != 1 and is_changed:
        context.note(
            "parts that were added in this process are not known to others; going on in one process (plugins are known)"
        )
    if experiment.workers == 1 or is_changed:
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


@contextmanager
def on_ray(runtime: ClientRuntime, settings: RaySettings) -> Iterator["RayEngine"]:
    """Ray is imported by nobody else, since it takes time and may not be installed."""
    from fedsieve.engine.ray_connection import connected, cpus_for
    from fedsieve.engine.ray_engine import RayEngine

    with connected(settings, cpus_for(runtime.context.experiment)) as ray:
        try:
            engine = RayEngine(runtime, ray, settings)
            try:
                yield engine
            finally:
                engine.close()
        except ray.exceptions.RayError as error:  # a full object store, say
            raise RunError(f"Ray: {first_line(error)}; see that it is well, and go on with --resume") from None
