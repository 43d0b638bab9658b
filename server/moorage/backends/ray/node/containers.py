"""Runs a container on a node of Ray, with the command line of the node's Docker or Podman.

Ray sends this code to the node, like `host`. `run` starts an attached process: its output is the
container's output, and it ends with the container.
"""

import shutil
import socket
import subprocess
import uuid
from collections.abc import Mapping, Sequence

from moorage.records.json_values import JsonMapping

_LOOK_SECONDS_MAX = 10.0
_ENGINES = ("docker", "podman")
_DEVICE_VARIABLES = tuple(f"{vendor}_VISIBLE_DEVICES" for vendor in ("AMD", "ASCEND", "HABANA"))


class EngineError(Exception):
    """The node cannot run containers; the message says why."""


class NodeContainer:
    """Makes the command lines for one container.

    Args:
        given: Description of the container; see `orders`.
        host: Address on which its ports are opened.
        gpus: The node's GPUs that the container gets.

    Raises:
        EngineError: This node has no container engine.
    """

    def __init__(
        self, given: JsonMapping, host: str, gpus: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._program = next(filter(_works, filter(None, map(shutil.which, _ENGINES))), "")
        if not self._program:
            raise EngineError(
                "a container needs a working docker or podman in Ray's PATH; node"
                f" {socket.gethostname()} has none"
            )
        self.name = f"moorage-ray-{uuid.uuid4().hex[:16]}"
        self.ports = {int(port): door or free_port() for port, door in given["ports"].items()}
        self._given, self._host, self._gpus = given, host, gpus
        # An engine that assigns devices by these variables must not add any.
        none = dict.fromkeys(_DEVICE_VARIABLES, "") | {"NVIDIA_VISIBLE_DEVICES": "void"}
        self._environment = {**environment, **none}

    @property
    def run(self) -> list[str]:
        """The command that runs the container; it ends when the container ends."""
        given = self._given
        options = ["--name", self.name, *(["-i"] if given["stdin"] else [])]
        for key, text in self._environment.items():
            options += ["-e", f"{key}={text}"]
        for port, door in self.ports.items():
            host = f"[{self._host}]" if ":" in self._host else self._host
            options += ["-p", f"{host}:{door}:{port}"]
        for outside, inside, read_only in given["mounts"]:
            options += ["-v", f"{outside}:{inside}{':ro' if read_only else ''}"]
        for gpu in self._gpus:
            options += ["--device", f"nvidia.com/gpu={gpu}"]
        if given["cpus"]:
            options += ["--cpus", str(given["cpus"])]
        if given["memory_bytes"]:
            options += ["--memory", str(given["memory_bytes"])]
            options += ["--memory-swap", str(given["memory_bytes"])]
        return [self._program, "run", *options, "--", given["image"], *given["command"]]

    @property
    def remove(self) -> list[str]:
        """The command that removes the container."""
        return [self._program, "rm", "--force", "--volumes", self.name]

    def execute(
        self, command: Sequence[str], folder: str | None, environment: Mapping[str, str]
    ) -> list[str]:
        """Return the engine's command that runs the given command in the container."""
        options = [] if folder is None else ["--workdir", folder]
        for key, text in environment.items():
            options += ["-e", f"{key}={text}"]
        return [self._program, "exec", *options, self.name, *command]

    def runs(self) -> bool:
        """Return whether the container has started; its image may still be downloading."""
        looked = subprocess.run(  # noqa: S603  # The engine's own program.
            [self._program, "inspect", "--format", "{{.State.Running}}", self.name],
            check=False,
            capture_output=True,
            text=True,
            timeout=_LOOK_SECONDS_MAX,
        )
        return looked.stdout.strip() == "true"


def _works(program: str) -> bool:
    """Return whether a container engine answers; Docker's client without its daemon does not."""
    try:
        seen = subprocess.run(  # noqa: S603  # The engine's own program.
            [program, "version"], check=False, capture_output=True, timeout=_LOOK_SECONDS_MAX
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return seen.returncode == 0


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])
