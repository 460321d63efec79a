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
from pathlib import Path
from typing import Any

from fedsieve.engine.private_cluster import LOOPBACK, adopt_orphans, end_all

SECURITY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-the-tests-" + "0" * 40}
STORE = 200_000_000  # bytes, for the objects of each node


class RayCluster:
    """A head and another node, with a CPU each, at first; `address` is what drivers join."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fedsieve-test-", dir="/tmp"))  # short: it holds sockets
        self.said = self.folder.with_suffix(".log")
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**os.environ, **SECURITY, "RAY_TMPDIR": str(self.folder)},  # where it writes its address, too
                start_new_session=True,  # Ctrl-C is for the tests
            )
        self.head = self.add()
        self.other = self.add()

    @property
    def address(self) -> str:
        return str(self._order({"do": "address"}))

    def add(self, **environment: str) -> str:
        """The id of a new node, whose processes have these environment variables, and a cache of their own."""
        return str(self._order({"do": "add", "environment": environment}))

    def kill(self, node: str) -> None:
        """Kill all processes of a node at once."""
        self._order({"do": "kill", "node": node})
        if node == self.other:
            self.other = ""

    def restore(self) -> None:
        """Add a second node if it was killed."""
        self.other = self.other or self.add()

    def close(self) -> None:
        self.process.communicate()
        self.said.unlink()

    def _order(self, order: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"the cluster ended: {self.said.read_text()[-2000:]}")
        return json.loads(line)


def serve(folder: Path) -> None:
    from ray.cluster_utils import Cluster

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints, too
    cluster, nodes = Cluster(), {}
    for line in sys.stdin:
        order = json.loads(line)
        answer = None
        if order["do"] == "add":
            own_cache = {"FEDSIEVE_CACHE": str(folder / f"cache-{len(nodes)}")}
            node = cluster.add_node(
                node_ip_address=LOOPBACK,
                temp_dir=str(folder),
                object_store_memory=STORE,
                include_dashboard=False,
                env_vars={**own_cache, **order["environment"]},
            )
            nodes[answer := node.node_id] = node
        elif order["do"] == "kill":
            cluster.remove_node(nodes.pop(order["node"]), allow_graceful=False)
        else:
            answer = cluster.address
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    adopt_orphans()
    try:
        serve(Path(sys.argv[1]))
    finally:
        end_all(Path(sys.argv[1]))
