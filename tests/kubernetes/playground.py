"""A Kubernetes cluster with fake GPU nodes, and a `moored` beside it, for tests on a laptop.

`make kubernetes-playground` starts it; Ctrl-C ends everything. Arguments of the command line are
passed to `moored serve`, e.g. `--port 0`. The daemon follows the cluster: if you cordon a node with
kubectl, it gets no new lease.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kubernetes_binaries import CONTROL_PLANE, BinariesError, binaries
from kubernetes_objects import device_class, gpu, node, resource_slice
from kubernetes_plane import Plane

from moorage_client.services import Services
from moorage_policies import catalog

CLUSTER_ID: Final = "playground"
SHOWN: Final = """
A Kubernetes cluster is up: two nodes whose GPUs a DRA driver publishes, two where a device plugin
counts them, and one without any. Its pods are fake and its API is real.

    export KUBECONFIG={kubeconfig} PATH={path}:$PATH
    kubectl get nodes,resourceslices
    kubectl cordon dra-1

Moorage is beside it and follows what changes:

    export MOORAGE_URL={ws} MOORAGE_HTTP_URL={http}
    moorage ask first_fit:1.0-stable --gpus 2 --ttl 600
    moorage leases
    moorage fleet

Logs are in {logs}. Ctrl-C ends all of it.
"""


def populate(plane: Plane) -> None:
    """Create the fake GPU nodes of the playground."""
    plane.create(device_class())
    rack = "topology.kubernetes.io/rack"
    for number in (1, 2):
        name, labels = f"dra-{number}", {rack: f"rack-{number}"}
        devices = [
            gpu(index, f"GPU-{name}-{index}", nvlinkGroup=f"pair-{index // 2}", numaNode=index // 2)
            for index in range(4)
        ]
        plane.create(node(name, labels=labels), resource_slice(name, devices))
        plane.create(node(f"plugin-{number}", gpus=8, labels=labels))
    plane.create(node("cpu-1"))


@contextlib.contextmanager
def moored(data: Path, kubeconfig: Path, *options: str) -> Iterator[dict[str, Any]]:
    """Run a daemon until the block ends; yield its ready line."""
    environment = {
        **os.environ,
        "MOORAGE_BACKENDS": "kubernetes",
        "MOORAGE_KUBERNETES_CLUSTERS": f"{CLUSTER_ID}=test",
        "MOORAGE_KUBERNETES_CONFIG": str(kubeconfig),
    }
    tied = ["setpriv", "--pdeathsig", "TERM", "--"]  # It ends with this program.
    command = [sys.executable, "-P", "-m", "moorage", "serve", "--data", str(data), *options]
    with (data.parent / "moored.log").open("w") as log:
        daemon = subprocess.Popen(
            [*tied, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only this program, which then ends the daemon.
        )
    try:
        line = daemon.stdout.readline()
        if not line:
            sys.exit("moored did not start:\n" + (data.parent / "moored.log").read_text())
        yield json.loads(line)
    finally:
        daemon.terminate()
        daemon.wait()
        daemon.stdout.close()


async def main(*options: str) -> None:
    """Start the control plane and the daemon, and run both until Ctrl-C."""
    programs = binaries(*CONTROL_PLANE, "kubectl")
    task = asyncio.current_task()
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, task.cancel)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moorage-")))
        (folder / "plane").mkdir()
        plane = stack.enter_context(Plane.run(folder / "plane"))
        populate(plane)
        kubeconfig, tools = plane.kubeconfig(), folder / "bin"
        tools.mkdir()
        (tools / "kubectl").symlink_to(programs["kubectl"])
        path = f"{tools}:{Path(sys.executable).parent}"
        ready = stack.enter_context(moored(folder / "data", kubeconfig, *options))
        services = stack.enter_context(Services(ready["http"]))
        services.publish_policy(catalog.document("first_fit"))
        plane.until(lambda: services.clusters({"id": CLUSTER_ID}), "the daemon has read it")
        shown = SHOWN.format(kubeconfig=kubeconfig, path=path, logs=plane.logs, **ready)
        print(shown, flush=True)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        print("Ending all of it.", flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except BinariesError as error:
        sys.exit(str(error))
