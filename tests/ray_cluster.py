"""A real Ray cluster of several nodes on this machine, for tests; it ends with the process that started it.

    python tests/ray_cluster.py FOLDER

reads orders from stdin, one JSON object a line, and answers each with another. When stdin is closed, it kills all
processes and deletes the folder, so a failed or killed test leaves nothing behind.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsieve.engine.private_cluster import LOOPBACK, adopt_orphans, end_all

SECURITY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-the-tests-" + "0" * 40}
SOONER = {"RAY_health_check_period_ms": "1000"}  # until a dead node is noticed
STORE = 200_000_000  # bytes, for the objects of each node


class RayCluster:
    """A head and another node, with a CPU each, at first; `address` is what drivers join."""

    def __init__(self) -> None:
        place = os.environ.get("RAY_TMPDIR", "/tmp")  # a short one: it holds sockets
        self.folder = Path(tempfile.mkdtemp(prefix="fedsieve-test-", dir=place))
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Ray's log
            text=True,
            env={**os.environ, **SECURITY, **SOONER, "RAY_TMPDIR": str(self.folder)},
            start_new_session=True,  # Ctrl-C is for the tests
        )
        self.head = self.add()
        self.other = self.add()

    @property
    def address(self) -> str:
        return str(self._order({"do": "address"}))

    def engine(self, more: str = "") -> list[str]:
        """Changes to an experiment, so that it runs here, on both nodes."""
        return [f"engine={{ray: {{address: '{self.address}', {more}}}}}", "workers=2"]

    def add(self, cpus: int = 1, **environment: str) -> str:
        """The id of a new node, whose processes have these environment variables, and a cache of their own."""
        return str(self._order({"do": "add", "cpus": cpus, "environment": environment}))

    def kill(self, node: str) -> None:
        """Kill all processes of a node at once."""
        self._order({"do": "kill", "node": node})
        if node == self.other:
            self.other = ""

    def restore(self) -> None:
        """Add a second node if it was killed, and wait until all that were killed have been noticed."""
        self.other = self.other or self.add()
        self._order({"do": "settle"})

    def close(self) -> None:
        self.process.communicate()

    def _order(self, order: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        answer, error = json.loads(self.process.stdout.readline() or '["", "it is gone"]')
        if error:
            self.close()
            raise RuntimeError(f"the cluster ended: {error}")
        return answer


def processes_below(folder: Path) -> list[str]:
    return list(commands_below(folder).values())


def commands_below(folder: Path) -> dict[int, str]:
    """The commands of processes that have a folder among their arguments or variables."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command, environment = ((process / name).read_bytes() for name in ("cmdline", "environ"))
            if str(folder).encode() in command + environment:
                found[int(process.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def serve(folder: Path) -> None:
    from ray.cluster_utils import Cluster

    (folder / "ray").mkdir()  # Ray writes the cluster's address there
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints, too
    cluster, nodes = Cluster(), dict[str, Any]()
    for line in sys.stdin:
        answer = error = ""
        try:
            answer = done(json.loads(line), cluster, nodes, folder)
        except Exception:
            error = traceback.format_exc()
        print(json.dumps([answer, error]), file=answers, flush=True)


def done(order: dict[str, Any], cluster: Any, nodes: dict[str, Any], folder: Path) -> str:
    """Carry out an order, and answer it."""
    if order["do"] == "add":
        own_cache = {"FEDSIEVE_CACHE": str(folder / f"cache-{len(nodes)}")}
        node = cluster.add_node(
            node_ip_address=LOOPBACK,
            temp_dir=str(folder),
            num_cpus=order["cpus"],
            object_store_memory=STORE,
            include_dashboard=False,
            env_vars={**own_cache, **order["environment"]},
        )
        nodes[node.node_id] = node
        return str(node.node_id)
    if order["do"] == "kill":
        cluster.remove_node(nodes.pop(order["node"]), allow_graceful=False)
    elif order["do"] == "settle":
        while {one["NodeID"] for one in cluster.global_state.node_table() if one["Alive"]} != nodes.keys():
            time.sleep(0.1)
    return str(cluster.address)


if __name__ == "__main__":
    adopt_orphans()
    try:
        serve(Path(sys.argv[1]))
    finally:
        end_all(Path(sys.argv[1]))
