"""The connection of this process, the driver, to a Ray cluster: a private one, or one that this machine belongs to."""

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from fedsieve.config.engine_settings import RaySettings
from fedsieve.config.schema import Experiment
from fedsieve.engine.cluster_nodes import alive_nodes
from fedsieve.engine.private_cluster import private_cluster
from fedsieve.engine.private_cluster import settings as private_settings
from fedsieve.engine.witness import witness
from fedsieve.errors import InputError

EXTRA = "pip install 'fedsieve[ray]'"
PATIENCE = 5  # seconds until something must have answered at an address
QUIET = {
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # what matters is raised as well
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray prints advice
    "RAY_NUM_REDIS_GET_RETRIES": str(PATIENCE),  # in seconds, until Ray gives up an address
}
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and no settings
SETTINGS = 4  # the type of the frame with which an HTTP/2 server answers


@contextmanager
def connected(settings: RaySettings, cpus: int) -> Iterator[Any]:
    """The module `ray`, connected to the cluster that the settings name; a private one has so many CPUs.

    A connection that this process had before is used and kept.
    """
    with _environment(QUIET):  # some of it is read on import
        ray = _imported()
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if settings.address not in ("auto", here):
            wanted = "null starts a private cluster" if settings.address is None else f"{settings.address} is another"
            what = f"engine.ray.address: {wanted}, and this process is connected to the cluster at {here}"
            raise InputError(f"{what}; use auto, or call ray.shutdown() first")
        yield ray
        return
    with ExitStack() as stack:
        stack.callback(_read_environment_again, ray)  # last of all, when it is as before
        stack.enter_context(_environment(QUIET))
        address, lifelines = settings.address, list[int]()
        if address is None:
            stack.enter_context(_environment(private_settings()))
            address, lifeline = stack.enter_context(private_cluster(cpus))
            lifelines.append(lifeline)
        elif address != "auto":
            must_answer(address)
        stack.enter_context(_silence(ray))
        _read_environment_again(ray)
        try:
            with _same_sigterm(), _no_stderr():
                ray.init(address=address, namespace="fedsieve", log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # of many kinds: other versions, other tokens, nobody there
            raise InputError(f"engine.ray.address: {address}: {_reason(error)}; {_remedy(error)}") from None
        stack.callback(ray.shutdown)
        here = alive_nodes(ray)[ray.get_runtime_context().get_node_id()]
        stack.enter_context(witness(here["RayletSocketName"], ray.get_runtime_context().gcs_address, *lifelines))
        yield ray


def cpus_for(experiment: Experiment) -> int:
    """The CPUs of a private cluster: this machine's, or what the workers that are asked for take."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert isinstance(experiment.threads, int)
    workers = 1 if experiment.workers == "auto" else experiment.workers
    return max(cores, workers * experiment.threads)


def _imported() -> Any:
    try:
        import ray
    except ImportError as error:
        raise InputError(f"engine: ray needs Ray, which is not installed ({error}); {EXTRA}") from None
    return ray


def must_answer(address: str) -> None:
    """InputError unless a gRPC server answers at HOST:PORT within seconds: Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PATIENCE) as line:
            if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):  # then it takes certificates to say hello
                line.settimeout(PATIENCE)
                line.sendall(HELLO)
                said = line.recv(9)
                if len(said) < 4 or said[3] != SETTINGS:
                    raise OSError("what answers there is not Ray")
    except (OSError, UnicodeError, OverflowError) as error:  # names and ports may be impossible ones
        reason = getattr(error, "strerror", None) or str(error)
        reason = "nothing answers there" if isinstance(error, TimeoutError) else reason
        what = f"engine.ray.address: {address}: {reason}"
        raise InputError(f"{what}; give the HOST:PORT that `ray start --head` printed, auto or null") from None


def _reason(error: Exception) -> str:
    """What is wrong, in one line without colours."""
    text = f"{error} {error.__cause__ or ''}"
    if "nauthenticated" in text or "InvalidAuthToken" in text:
        return "it asks for another token"
    plain = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    return plain.removesuffix(".")[:400] if "ersion mismatch" in plain else plain.partition(". ")[0].removesuffix(".")


def _remedy(error: Exception) -> str:
    text = f"{error} {error.__cause__ or ''}"
    if "ersion mismatch" in text:
        return "install the same versions of Ray and Python on all nodes"
    if "oken" in text or "nauthenticated" in text:
        return "give the cluster's with RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=FILE"
    return "start a node on this machine first, with `ray start --address HOST:PORT`"


def _read_environment_again(ray: Any) -> None:
    """Ray keeps what it first read of tokens; a process may join a cluster without and start one with a token."""
    with suppress(AttributeError):  # private names, which other versions may lack
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
        ray._raylet.Config.initialize("")


@contextmanager
def _silence(ray: Any) -> Iterator[None]:
    """Ray prints a page when a node dies, log lines of it included; the engine says so in one line."""
    worker = ray._private.worker
    before = getattr(worker, "print_to_stdstream", None)
    worker.print_to_stdstream = lambda *_, **__: None
    try:
        yield
    finally:
        worker.print_to_stdstream = before


@contextmanager
def _same_sigterm() -> Iterator[None]:
    """Ray's handler of the signal would stay when the run is over, and turn it into another exit code."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Ray logs before it has read how much it may."""
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
