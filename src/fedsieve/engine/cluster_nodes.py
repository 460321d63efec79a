"""The nodes of a Ray cluster, as Ray tells of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsieve.errors import InputError


@dataclass
class Node:
    """A node of the cluster, as a run uses it."""

    id: str
    name: str
    room: int  # actors that its CPUs and GPUs can take
    is_ready: bool = False  # examined, and its data is loaded
    refused: str | None = None  # why it is not used
    data: dict[str, Any] = field(default_factory=dict)  # references to arrays in its object store
    stillborn: int = 0  # actors that died before they were ready, since the last one that was


def alive_nodes(ray: Any) -> dict[str, Mapping[str, Any]]:
    """What Ray tells of each node, by the node's id."""
    return {one["NodeID"]: one for one in ray.nodes() if one["Alive"]}


def name_of(node: Mapping[str, Any]) -> str:
    """A node's name for people; several may be on one machine."""
    return f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:6]})"


def room_of(node: Mapping[str, Any], cpus: int, gpus: float) -> int:
    """How many actors of so many CPUs and GPUs a node can take."""
    resources = node["Resources"]
    rooms = [resources.get("CPU", 0) // cpus]
    if gpus:
        rooms.append(resources.get("GPU", 0) / gpus + 1e-9)
    return int(min(rooms))


def must_have_room(ray: Any, cpus: int, gpus: float) -> None:
    """InputError if no node can ever take an actor."""
    nodes = alive_nodes(ray).values()
    if any(room_of(node, cpus, gpus) for node in nodes):
        return
    resources = [node["Resources"] for node in nodes]
    most = {kind: max((one.get(kind, 0) for one in resources), default=0) for kind in ("CPU", "GPU")}
    if gpus > most["GPU"]:
        what = f"engine.ray.gpus_per_client: {gpus:g} is asked for"
        raise InputError(f"{what}, and the node with most GPUs has {most['GPU']:g}; use as many or fewer")
    if cpus > most["CPU"]:
        what = f"threads: each actor takes {cpus} CPUs"
        raise InputError(f"{what}, and the node with most has {most['CPU']:g}; use as many threads or fewer")
    what = f"each actor takes {cpus} CPUs and {gpus:g} GPUs"
    raise InputError(f"engine.ray: {what}, and no single node has both; use fewer threads or gpus_per_client")
