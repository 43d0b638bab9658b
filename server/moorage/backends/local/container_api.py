"""Calls this machine's container engine, Docker or Podman, at its Docker-compatible API. Blocks.

`Containers` is the only caller, in threads. The Docker SDK works with both engines. Where Podman's
Docker-compatible API falls short (it silently ignores devices, and cannot change limits), Podman's
own API at the same socket is used. All errors leave this module as `BackendError` with the engine's
message.
"""

import contextlib
import importlib
import importlib.util
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from moorage.backends.base import LOG_BYTES_MAX, BackendError, Log, UnsupportedSpecError
from moorage.backends.local.container_plans import ContainerPlan, is_shell
from moorage.extras import install_command
from moorage.records.json_values import JsonMapping, JsonObject

ANSWER_SECONDS_MAX: Final = 60.0
"""Longest wait for an answer of the container engine, except for a pull and a stop."""
REMOVE_SECONDS_MAX: Final = 20.0
"""Longest wait until the container engine has removed an ended container."""
LOG_FILE_BYTES: Final = 32 * 1024 * 1024
"""Maximum bytes in each of a container's two log files; a full one replaces the other."""
EXECUTION_BYTES_MAX: Final = 1024 * 1024
"""Maximum stored bytes of the output of a command in a container; the rest is dropped."""
_PERIOD_MICROSECONDS: Final = 100_000
_KILL: Final = signal.SIGKILL
_LIBPOD: Final = "/v4.0.0/libpod"
_ENDS: Final = frozenset({"die", "destroy", "remove"})
"""Events after which a container may have ended; one that is removed at once may send no `die`."""


CONNECT_SECONDS_MAX: Final = 0.5
"""Longest wait to connect to a container engine's socket that exists."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A container's state as the engine reports it.

    Args:
        state: The engine's state: `created`, `running`, `paused`, `exited`, `dead`, …
        exit_code: Exit code once it has ended; above 128: 128 plus a signal's number.
        out_of_memory: Whether it was killed because it exceeded its memory limit.
        bounded: Whether it has a memory limit.
        error: The engine's message why the container could not be started.
        ports: Port in the container -> port of the host.
    """

    state: str
    exit_code: int
    out_of_memory: bool
    bounded: bool
    error: str
    ports: Mapping[int, int]

    @property
    def running(self) -> bool:
        """Whether the container has processes."""
        return self.state in {"running", "paused", "restarting", "stopping"}

    @property
    def ended(self) -> bool:
        """Whether the container has run and ended."""
        return self.state in {"exited", "dead", "stopped", "removing"}


class ContainerApi:
    """Calls the container engine of this machine over one connection.

    Raises:
        BackendError: No container engine answers at the socket.
    """

    def __init__(self, place: Path) -> None:
        # The Docker SDK is imported here, since it is an optional extra.
        self._docker: ModuleType = importlib.import_module("docker")
        self._requests: ModuleType = importlib.import_module("requests")
        self.place = place
        with self._errors("connect"):
            known = {"base_url": f"unix://{place}", "timeout": ANSWER_SECONDS_MAX}
            any_version = self._docker.constants.DEFAULT_DOCKER_API_VERSION
            # `/version` would be slow: Podman looks up the packages of its helper programs for it.
            with contextlib.closing(self._docker.APIClient(version=any_version, **known)) as asking:
                answer = asking.get(f"{asking.base_url}/_ping", timeout=ANSWER_SECONDS_MAX)
            answer.raise_for_status()
            spoken = answer.headers.get("Api-Version", "0")  # The SDK refuses version 0.
            self._api: Any = self._docker.APIClient(version=spoken, **known)
        name, _, version = answer.headers.get("Server", "").partition(" ")[0].partition("/")
        self._podman = name == "Libpod"
        self._name = f"{'Podman' if self._podman else 'Docker'} {version}"

    def __str__(self) -> str:
        """Return the engine's name, version and socket, for messages."""
        return f"{self._name} at {self.place}"

    def close(self) -> None:
        """Close the connections that no call is using."""
        self._api.close()

    # Images --------------------------------------------------------------------------------------

    def has_image(self, image: str) -> bool:
        """Return whether an image is on this machine."""
        try:
            with self._errors(f"look for the image {image}"):
                self._api.inspect_image(image)
        except _MissingError:
            return False
        return True

    def pull(self, image: str, given_up: threading.Event) -> None:
        """Pull an image; return when it is on this machine, or when `given_up` is set."""
        with self._errors(f"pull {image}"):
            news = self._api.pull(image, stream=True, decode=True)
            with contextlib.closing(news):  # Closing ends a pull under way.
                for line in news:
                    if given_up.is_set():
                        return
                    if "error" in line:
                        raise BackendError(f"the image {image} cannot be pulled: {line['error']}")

    # Containers ----------------------------------------------------------------------------------

    def create(self, plan: ContainerPlan) -> None:
        """Create a container, unless one with its name exists.

        Raises:
            UnsupportedSpecError: The engine does not enforce a limit; nothing was created.
        """
        if self.inspect(plan.name) is not None:
            return
        try:
            with self._errors(f"create a container of {plan.image}"):
                if self._podman and plan.devices:
                    self._create_podman(plan)
                else:
                    self._create(plan)
        except BackendError:
            if self.inspect(plan.name) is None:
                raise
            return  # Another caller created it first.
        with self._errors("look at the new container"):
            host = self._api.inspect_container(plan.name)["HostConfig"]
        ignored = [
            name
            for name, wanted, got in (
                ("mem_limit", plan.memory_bytes, host.get("Memory")),
                ("cpu_count", plan.cpu_count, host.get("NanoCpus") or host.get("CpuQuota")),
                # Podman's own API accepts devices or fails, and lists them only after the start.
                ("gpus", plan.devices, self._podman or host.get("DeviceRequests")),
            )
            if wanted and not got
        ]
        if ignored:
            self.remove(plan.name)
            raise UnsupportedSpecError(f"{self} does not enforce {', '.join(ignored)} here")

    def _create(self, plan: ContainerPlan) -> None:
        types = self._docker.types
        signal_name = {"stop_signal": _KILL.name} if self._only_a_shell(plan) else {}
        requests = [types.DeviceRequest(driver="cdi", device_ids=list(plan.devices))]
        host = self._api.create_host_config(
            nano_cpus=None if plan.cpu_count is None else int(plan.cpu_count * 1e9),
            mem_limit=plan.memory_bytes,
            memswap_limit=plan.memory_bytes,  # Memory plus swap: no swap.
            device_requests=requests if plan.devices else None,
            port_bindings={
                inside: (plan.host_ip, outside or None) for inside, outside in plan.ports.items()
            },
            mounts=[
                types.Mount(inside, outside, type="bind", read_only=read_only)
                for outside, inside, read_only in plan.mounts
            ],
            log_config=types.LogConfig(
                type="json-file", config={"max-size": f"{LOG_FILE_BYTES}b", "max-file": "2"}
            ),
        )
        self._api.create_container(
            plan.image,
            command=None if plan.command is None else list(plan.command),
            name=plan.name,
            environment=dict(plan.environment),
            labels=dict(plan.labels),
            ports=list(plan.ports),
            host_config=host,
            stdin_open=plan.stdin,
            **signal_name,
        )

    def _only_a_shell(self, plan: ContainerPlan) -> bool:
        """Return whether a container runs only a shell, which ignores SIGTERM."""
        own = self._api.inspect_image(plan.image).get("Config") or {}
        command = own.get("Cmd") if plan.command is None else plan.command
        return is_shell([*(own.get("Entrypoint") or ()), *(command or ())])

    def _create_podman(self, plan: ContainerPlan) -> None:
        """Create a container through Podman's own API, which takes CDI devices (NVIDIA GPUs)."""
        limits: JsonObject = _limits(plan.cpu_count, plan.memory_bytes)
        self._libpod(
            "containers/create",
            {
                "name": plan.name,
                "image": plan.image,
                "command": None if plan.command is None else list(plan.command),
                "stdin": plan.stdin,
                "env": dict(plan.environment),
                "labels": dict(plan.labels),
                "devices": [{"path": device} for device in plan.devices],
                "resource_limits": limits,
                "portmappings": [
                    {"container_port": inside, "host_port": outside, "host_ip": plan.host_ip}
                    for inside, outside in plan.ports.items()
                ],
                "mounts": [
                    {
                        "type": "bind",
                        "source": outside,
                        "destination": inside,
                        "options": ["rbind", "ro" if read_only else "rw"],
                    }
                    for outside, inside, read_only in plan.mounts
                ],
                "log_configuration": {"driver": "k8s-file", "size": LOG_FILE_BYTES},
                **({"stop_signal": int(_KILL)} if self._only_a_shell(plan) else {}),
            },
        )

    def start(self, name: str) -> None:
        """Start a created container. A second call does nothing."""
        with self._errors("start the container"):
            self._api.start(name)

    def inspect(self, name: str) -> Seen | None:
        """Return the state of a container; None if no container has this name."""
        try:
            with self._errors(f"look at the container {name}"):
                found = self._describe(name)
        except _MissingError:
            return None
        state = found["State"]
        ports = {
            int(inside.partition("/")[0]): int(bindings[0]["HostPort"])
            for inside, bindings in (
                (found.get("NetworkSettings") or {}).get("Ports") or {}
            ).items()
            if bindings
        }
        return Seen(
            state=state["Status"],
            exit_code=int(state["ExitCode"]),
            out_of_memory=bool(state.get("OOMKilled")),
            bounded=bool(found["HostConfig"].get("Memory")),
            error=state.get("Error") or "",
            ports=ports,
        )

    def labelled(self, label: str, value: str) -> list[Mapping[str, str]]:
        """Return the labels of all containers, ended ones too, whose `label` has this value."""
        with self._errors("list containers"):
            wanted = {"label": [f"{label}={value}"]}
            found = self._api.containers(all=True, filters=wanted)
        return [each.get("Labels") or {} for each in found]

    def stop(self, name: str, seconds: float) -> None:
        """Stop a container; SIGKILL it after `seconds`. No error if it has ended already."""
        with contextlib.suppress(BackendError), self._errors("go on with the container"):
            self._api.unpause(name)  # A paused container gets no signal.
        with contextlib.suppress(_MissingError), self._errors("stop the container"):
            self._api.stop(name, timeout=math.ceil(seconds))

    def remove(self, name: str) -> None:
        """Kill a container if it runs, and remove all that is left of it.

        Raises:
            BackendError: The container still exists.
        """
        deadline = time.monotonic() + REMOVE_SECONDS_MAX
        pause = 0.05
        while True:
            # Kill the container first: Podman's removal would wait for its stop time.
            with contextlib.suppress(BackendError), self._errors("kill the container"):
                self._api.kill(name)
            try:
                with self._errors("remove the container"):
                    self._api.remove_container(name, v=True, force=True)
            except _MissingError:
                return
            except BackendError:  # Another process may be removing it now.
                if self.inspect(name) is None:
                    return
                if time.monotonic() > deadline:
                    raise
            time.sleep(pause)  # The API has no way to wait for a removal.

    def update(self, name: str, cpu_count: float | None, memory_bytes: int | None) -> None:
        """Change limits of a running container; a limit that is None stays unchanged."""
        limits = _limits(cpu_count, memory_bytes)
        with self._errors("change limits"):
            if self._podman:
                self._libpod(f"containers/{name}/update", limits)
                return
            changes: dict[str, int] = {}
            if memory_bytes is not None:
                changes |= {"Memory": memory_bytes, "MemorySwap": memory_bytes}
            if cpu_count is not None:  # As in `create`: an engine accepts only one form.
                changes["NanoCpus"] = int(cpu_count * 1e9)
            url = self._api._url("/containers/{0}/update", name)  # noqa: SLF001  # The SDK's method lacks NanoCpus.
            self._api._raise_for_status(self._api.post(url, json=changes))  # noqa: SLF001  # As above.

    # Output, commands, news ----------------------------------------------------------------------

    def tail(self, name: str, lines: int) -> tuple[str, ...]:
        """Return the last lines of a container's output; no lines if the container is gone."""
        try:
            with self._errors("read output"):
                data: bytes = self._api.logs(name, stdout=True, stderr=True, tail=lines)
        except _MissingError:
            return ()
        return tuple(data.decode(errors="replace").splitlines()[-lines:])

    def output(self, name: str) -> Iterator[bytes]:
        """Yield the output of a container so far."""
        with self._errors("read output"):
            # The SDK's own method leaks the connection if the container is removed meanwhile.
            url = self._api._url("/containers/{0}/logs", name)  # noqa: SLF001  # As above.
            wanted = {"stdout": 1, "stderr": 1}
            response = self._api.get(url, params=wanted, stream=True, timeout=ANSWER_SECONDS_MAX)
            yield from self._pieces(response)

    def _pieces(self, response: Any) -> Iterator[bytes]:
        """Yield the output that an answer streams; then close its connection."""
        with contextlib.closing(response):
            self._api._raise_for_status(response)  # noqa: SLF001  # As above.
            yield from self._api._multiplexed_response_stream_helper(response)  # noqa: SLF001  # As above.

    def log(self, name: str, offset: int) -> Log:
        """Read the output of a container, from a byte offset on; see `Backend.logs`.

        The API has no offsets, so the output is read from its start up to the piece.
        """
        seen = self.inspect(name)  # Before the output: once ended, it is complete.
        data, start, size = bytearray(), 0, 0
        for piece in self.output(name):
            size += len(piece)
            data += piece
            excess = len(data) - LOG_BYTES_MAX
            if offset < 0:
                excess = len(data) + offset  # Keep the last bytes so far.
            elif start < offset:
                excess = min(offset - start, len(data))
            elif excess >= 0:
                break
            if excess > 0:
                del data[:excess]
                start += excess
        if size < max(offset, 0):  # The log was rotated since.
            return self.log(name, 0)
        del data[LOG_BYTES_MAX:]
        end = start + len(data)
        over = seen is None or seen.ended
        return Log.of(bytes(data), start, over=over and end >= size)

    def begin_command(
        self,
        name: str,
        command: Sequence[str],
        *,
        workdir: str | None = None,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Prepare a command for a running container, and return the command's id."""
        with self._errors("run a command in the container"):
            made = self._api.exec_create(
                name,
                list(command),
                workdir=workdir,
                user=user or "",
                environment=dict(environment or {}),
            )
        return str(made["Id"])

    def run_command(self, command: str) -> tuple[int, str]:
        """Run a prepared command to its end; return its exit code and output."""
        data = bytearray()
        with self._errors("run a command in the container"):
            # The SDK's own method loses output that arrives together with the answer's header.
            url = self._api._url("/exec/{0}/start", command)  # noqa: SLF001  # As above.
            wanted = {"Tty": False, "Detach": False}
            for piece in self._pieces(self._api._post_json(url, data=wanted, stream=True)):  # noqa: SLF001  # As above.
                data += piece[: EXECUTION_BYTES_MAX - len(data)]
            code = self._api.exec_inspect(command)["ExitCode"]
        return int(code or 0), data.decode(errors="replace")

    def command_runs(self, command: str) -> bool:
        """Return whether a prepared command has started and not ended."""
        try:
            with self._errors("look at a command"):
                return bool(self._api.exec_inspect(command)["Running"])
        except _MissingError:
            return False

    def events(self, label: str, value: str) -> "Events":
        """Return a stream of future ends of containers whose `label` has this value."""
        with self._errors("listen to events"):
            wanted = {"label": [f"{label}={value}"], "type": ["container"]}
            return Events(self._api.events(filters=wanted, decode=True))

    def _describe(self, name: str) -> Any:
        try:
            return self._api.inspect_container(name)
        except self._docker.errors.APIError as error:
            # Podman reads the control group of the container's process, which may just have ended.
            if "no such process" not in str(error.explanation):
                raise
            return self._api.inspect_container(name)

    def _libpod(self, path: str, body: JsonMapping) -> None:
        url = f"{self._api.base_url}{_LIBPOD}/{path}"
        self._api._raise_for_status(self._api.post(url, json=body, timeout=ANSWER_SECONDS_MAX))  # noqa: SLF001  # Raises the SDK's errors.

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Convert errors of the Docker SDK and of the connection into `BackendError`."""
        errors = self._docker.errors
        try:
            yield
        except errors.NotFound as error:
            raise _MissingError(f"cannot {doing}: {error.explanation or error}") from error
        except errors.APIError as error:
            raise BackendError(f"cannot {doing}: {error.explanation or error}") from error
        except (errors.DockerException, self._requests.RequestException, OSError) as error:
            reason = f"the container engine at {self.place} does not answer: {error}"
            raise BackendError(f"cannot {doing}: {reason}") from error


class Events:
    """A stream of ends of containers; another thread can close it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Mapping[str, str]]:
        """Yield the labels of each ended container; stop when the engine closes the stream."""
        try:
            with contextlib.suppress(Exception):  # Any error ends the stream.
                for event in self._stream:
                    if event.get("Action") in _ENDS:
                        yield (event.get("Actor") or {}).get("Attributes") or {}
        finally:
            self.close()
            self._stream._response.close()  # noqa: SLF001  # The SDK would leave it open.

    def close(self) -> None:
        """Close the stream, also while another thread reads it."""
        with contextlib.suppress(OSError):  # The engine may have closed it.
            self._stream.close()


class _MissingError(BackendError):
    """The container engine has no such container, image or command."""


def _limits(cpu_count: float | None, memory_bytes: int | None) -> JsonObject:
    """Return CPU and memory limits in the form of the OCI runtime specification."""
    limits: JsonObject = {}
    if memory_bytes is not None:
        limits["memory"] = {"limit": memory_bytes, "swap": memory_bytes}
    if cpu_count is not None:
        quota = max(1000, int(cpu_count * _PERIOD_MICROSECONDS))
        limits["cpu"] = {"quota": quota, "period": _PERIOD_MICROSECONDS}
    return limits


def find_socket() -> Path:
    """Return the path of a container engine's socket that accepts connections.

    Tries only `DOCKER_HOST` if it is set; else Docker's and Podman's usual places.

    Raises:
        UnsupportedSpecError: No socket accepts connections, or the Docker SDK is not installed.
    """
    if importlib.util.find_spec("docker") is None:
        reason = f"containers need the Docker SDK: {install_command('containers')}"
        raise UnsupportedSpecError(reason)
    tried = []
    for place in _places():
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(CONNECT_SECONDS_MAX)
                probe.connect(os.fspath(place))
        except OSError as error:
            tried.append(f"{place}: {error.strerror or error}")
        else:
            return place
    raise UnsupportedSpecError(
        f"no container engine is reachable ({'; '.join(tried)}): start Docker, or"
        " `podman system service`"
    )


def _places() -> list[Path]:
    given = os.environ.get("DOCKER_HOST")
    if given:
        scheme, _, path = given.rpartition("://")
        if scheme not in {"", "unix"}:
            raise UnsupportedSpecError(
                f"DOCKER_HOST is {given}, and the backend local takes unix://PATH: its containers"
                " run on this machine"
            )
        return [Path(path)]
    own = os.environ.get("XDG_RUNTIME_DIR")
    mine = [Path(own) / "docker.sock", Path(own) / "podman" / "podman.sock"] if own else []
    return [Path("/var/run/docker.sock"), Path("/run/podman/podman.sock"), *mine]
