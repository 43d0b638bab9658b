"""The sources `kubernetes` and `kubernetes:CONTEXT`: the current state of a cluster.

A program of the server package, started with this interpreter, asks the API server: the client
imports neither that package nor the library of the extra `kubernetes`.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Final

from moorage.extras import install_command
from moorage.launch import command
from moorage.records.json_values import JsonObject
from moorage_client.inventory.documents import Inventory, InventoryError

KUBERNETES: Final = "kubernetes"
PROGRAM: Final = "moorage.backends.kubernetes.follow"
STOP_SECONDS_MAX: Final = 10.0


def is_live(source: str) -> bool:
    """Return whether a source names a Kubernetes cluster that runs."""
    return source.partition(":")[0] == KUBERNETES


def live_inventory(source: str, cluster_id: str) -> Inventory:
    """Return the current state of a Kubernetes cluster, read from its API server.

    Args:
        source: `kubernetes`, or `kubernetes:CONTEXT` for another context than the current one.
        cluster_id: Id of the cluster; empty: the context's name.

    Raises:
        InventoryError: The cluster cannot be read.
    """
    with follow_cluster(source, cluster_id, watch=False) as lines:
        line = lines.readline()
    if not line:
        raise InventoryError(
            source, "", f"{PROGRAM} to print a cluster, but it printed none; its errors are above"
        )
    said: JsonObject = json.loads(line)
    if "error" in said:
        raise InventoryError(source, "", f"a cluster that can be read ({said['error']})")
    return Inventory((said["document"],))


def cluster_id_of(source: str, cluster_id: str) -> str:
    """Return the id of the cluster of a source: by default the name of its context.

    Raises:
        InventoryError: No id is given, and no kubeconfig names a current context.
    """
    found = cluster_id or source.partition(":")[2] or current_context()
    if not found:
        raise InventoryError(source, "", "a name for its cluster; give --cluster-id NAME")
    return found


def current_context() -> str:
    """Return the current context of the kubeconfig, as kubectl finds it; "" without a context."""
    import yaml  # noqa: PLC0415  # Slow to import.

    default = os.path.expanduser("~/.kube/config")  # noqa: PTH111  # Raises nothing without a home.
    named = os.environ.get("KUBECONFIG") or default
    for file in filter(None, named.split(os.pathsep)):
        try:
            with Path(file).open(encoding="utf-8-sig") as text:
                config = yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError):
            continue  # The request to the cluster will report the fault.
        context = config.get("current-context") if isinstance(config, dict) else None
        if context and isinstance(context, str):
            return context
    return ""


@contextmanager
def follow_cluster(source: str, cluster_id: str, *, watch: bool) -> Iterator[IO[bytes]]:
    """Yield the JSON lines about a cluster that `moorage.backends.kubernetes.follow` prints.

    Raises:
        InventoryError: The extra `kubernetes` is not installed, or the cluster has no id.
    """
    if any(find_spec(name) is None for name in ("aiohttp", "kubernetes")):
        expected = f"the extra `kubernetes` to be installed; run {install_command('kubernetes')}"
        raise InventoryError(source, "", expected)
    job = {
        "cluster_id": cluster_id_of(source, cluster_id),
        "context": source.partition(":")[2],
        "watch": watch,
    }
    with subprocess.Popen(  # noqa: S603  # Our own program.
        command(PROGRAM, json.dumps(job)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # Ctrl-C is for us.
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            yield child.stdout
        finally:
            child.stdin.close()  # The child ends at the end of its input.
            try:
                child.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                child.kill()
