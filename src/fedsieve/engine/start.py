"""Which engine an experiment runs on."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedsieve.config.decorators import KINDS
from fedsieve.config.engine_settings import FederationSettings, RaySettings
from fedsieve.config.schema import Experiment
from fedsieve.context import Given, RunContext
from fedsieve.data.load import Dataset
from fedsieve.data.manifest import Federation, must_be_whole, read_federation
from fedsieve.data.roles import Roles, roles_of_server
from fedsieve.data.shards import read_server_data
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
    from fedsieve.federation.federation_engine import FederationEngine
    from fedsieve.federation.gathering import Gathering

SHARED = [kind for kind in KINDS if kind != "callback"]  # the parts that worker processes know, with the experiment


@contextmanager
def engine_for(
    context: RunContext, phases: list[Phase], folder: Path, gathering: "Gathering | None" = None
) -> Iterator["Serial | WorkerPool | RayEngine | FederationEngine"]:
    """The engine that the experiment asks for; its processes end with this context."""
    experiment = context.experiment
    runtime = ClientRuntime(context, phases, KeptInFolder(folder))
    is_changed = LOCAL_OPTIMIZERS.is_changed or any(KINDS[kind].is_changed for kind in SHARED)
    if gathering is not None:
        from fedsieve.federation.federation_engine import FederationEngine

        federation = FederationEngine(runtime, gathering)
        federation.join()
        yield federation
        federation.end()
        return
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


@contextmanager
def gathered(
    experiment: Experiment, folder: Path, given: Given, note: Callable[[str], None]
) -> Iterator["Gathering | None"]:
    """The nodes of a federation, once they are there; None: the experiment is a simulation."""
    settings = experiment.federation
    if settings is None:
        yield None
        return
    if given.data is not None or given.model is not None:
        raise InputError("a federation's data and models lie at its nodes, and cannot be given from Python")
    check_federation(experiment)
    from fedsieve.federation.gathering import Gathering, link_for

    with closing(link_for(settings, note)) as link:
        gathering = Gathering.begin(link, experiment, folder, note)
        gathering.wait()
        yield gathering


def roles_by_manifest(experiment: Experiment) -> Roles | None:
    """The server's part of the data, without asking any node; None: the experiment is a simulation."""
    settings = experiment.federation
    if settings is None:
        return None
    check_federation(experiment)
    if settings.manifest is None:
        raise InputError(
            "nodes are asked who they are when a run begins, not before; give engine's manifest, or run it"
        )
    federation = read_federation(Path(settings.manifest))
    return roles_of_server(experiment, federation, server_data(settings, federation))


def roles_at_server(experiment: Experiment, gathering: "Gathering") -> Roles:
    """The server's part of the data: validation and test images, or none."""
    assert gathering.federation is not None
    return roles_of_server(experiment, gathering.federation, server_data(gathering.settings, gathering.federation))


def server_data(settings: FederationSettings, federation: Federation) -> Dataset | None:
    """The validation and test images that lie beside the manifest."""
    if federation.server is None or settings.manifest is None:
        return None
    path = Path(settings.manifest).parent / federation.server.file
    if not path.exists():
        raise InputError(f"{path} is not there; copy it beside the manifest, or set `server` to null in the manifest")
    must_be_whole(path, federation.server)
    return read_server_data(path, federation.classes)


def check_federation(experiment: Experiment) -> None:
    """InputError for what needs all data in one place."""
    for number, phase in enumerate(experiment.phases):
        mask = phase.mask
        if mask is not None and mask.scope == "server" and mask.looks_at_data and mask.file is None:
            raise InputError(
                f"phases.{number}.mask.scope: server looks at training images, and the server of a federation has "
                "none; use scope: federated, or a rule that looks at no data"
            )
