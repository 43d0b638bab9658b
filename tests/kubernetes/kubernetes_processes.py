"""A simulated kubelet that runs each pod of the chart as a `moored serve` on this machine."""

import contextlib
import threading
import time
from pathlib import Path
from typing import Any, Final, Self

import httpx
from kubernetes_plane import Plane, PlaneError

from moorage.testing.daemon_process import child, serve_command, serve_variables

NAMESPACE: Final = "moorage"
ROUND_SECONDS: Final = 0.1


class ProcessKubelet:
    """Starts a process for each pod, ends it with the pod, and reports its probe's result.

    KWOK only ends pods whose variable SIM_FATE is `hang`.

    Args:
        plane: The control plane with the pods.
        folder: An empty folder for the data of the servers.
        storage: The common database of the servers.
    """

    def __init__(self, plane: Plane, folder: Path, storage: str) -> None:
        self._plane, self._folder, self._storage = plane, folder, storage
        self._stacks: dict[str, contextlib.ExitStack] = {}
        self._http: dict[str, str] = {}
        self._reported: dict[str, bool] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Self:
        """Begin to follow pods."""
        self._folder.mkdir()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        self._over.set()
        self._thread.join()
        for stack in self._stacks.values():
            stack.close()

    def _work(self) -> None:
        while not self._over.wait(ROUND_SECONDS):
            pods = {each["metadata"]["name"]: each for each in self._plane.all("Pod", NAMESPACE)}
            for name in self._stacks.keys() - pods.keys():
                self._stacks.pop(name).close()
            for name, pod in pods.items():
                if name not in self._stacks:
                    self._begin(name, pod)
                self._report(name)

    def _begin(self, name: str, pod: dict[str, Any]) -> None:
        given = {each["name"]: each for each in pod["spec"]["containers"][0]["env"]}
        source = given["MOORAGE_ROLLOUT"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert source == "metadata.labels['pod-template-hash']"
        assert given["MOORAGE_STORAGE"]["value"] == self._storage
        variables = {
            **serve_variables(),
            "MOORAGE_STORAGE": self._storage,
            "MOORAGE_ROLLOUT": pod["metadata"]["labels"]["pod-template-hash"],
        }
        stack = self._stacks[name] = contextlib.ExitStack()
        place = self._folder / name
        started = child(serve_command(place), place.with_suffix(".log"), variables)
        _, ready = stack.enter_context(started)
        self._http[name] = ready["http"]

    def _report(self, name: str) -> None:
        try:
            is_ready = httpx.get(f"{self._http[name]}/readyz", trust_env=False).is_success
        except httpx.HTTPError:
            is_ready = False
        if self._reported.get(name) == is_ready:
            return
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": str(is_ready), "lastTransitionTime": since}
        with contextlib.suppress(PlaneError):  # The pod was just deleted.
            status = {"phase": "Running", "conditions": [ready]}
            self._plane.patch("Pod", name, {"status": status}, NAMESPACE, at="status")
            self._reported[name] = is_ready
