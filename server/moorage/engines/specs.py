"""What can be started on one machine: one dataclass per kind, keyword-only.

Resources are shared between users whose specs are equal in every field. `remote_specs` has the
kinds of other places; `spec_documents` reads them all from JSON.

Source: the documents of the resource engine, whose four specs keep their fields and defaults here.
"""

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import pydantic

__all__ = [
    "APIModelResourceSpec",
    "BaseResourceSpec",
    "ContainerResourceSpec",
    "LocalEnvResourceSpec",
    "MemoryResourceSpec",
    "ProcessResourceSpec",
    "Readiness",
    "ServiceResourceSpec",
    "SpecError",
    "VLLMModelResourceSpec",
    "check_limits",
    "memory_bytes",
]

_STRICT: Final = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MEMORY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


class SpecError(ValueError):
    """A spec cannot be read.

    Args:
        path: Where in the spec, e.g. `spec.cpu_count`.
        expected: What was expected there.

    """

    def __init__(self, path: str, expected: str) -> None:
        super().__init__(f"{path}: expected {expected}")
        self.path = path
        self.expected = expected


@dataclass(kw_only=True)
class BaseResourceSpec:
    """What every spec has.

    Args:
        max_global_num: Most resources of this spec and backend at a time, free ones and those
            being made included; None for no limit.
        extra: Anything else a backend or its runner understands.

    """

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT
    category: ClassVar[str] = "resource"

    max_global_num: int | None = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        """Check what no type can say."""
        cap = self.max_global_num
        if cap is not None and cap < 1:
            raise ValueError("max_global_num: expected a number from 1 on, or none")

    @property
    def limit_seconds(self) -> float | None:
        """How long it may take to be ready; None for as long as it takes."""
        limit: float | None = getattr(self, "start_timeout", None)
        return limit

    @property
    def title(self) -> str:
        """What a person calls the thing: an image, a model, a class."""
        for name in ("image", "model_name_or_path", "env_cls_path"):
            if given := getattr(self, name, None):
                return str(given)
        return "default"


@dataclass(kw_only=True)
class Readiness:
    """How to see that a workload answers. Of `path`, `port` and `command`, at least one.

    Args:
        path: HTTP GET of it must answer with a status below 400.
        port: Of the probe; the spec's own where not given.
        command: Must exit with 0, run inside of the workload.
        every_seconds: Between two probes.
        timeout_seconds: Of one probe.

    """

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT

    path: str | None = None
    port: int | None = None
    command: list[str] | None = None
    every_seconds: float = 0.2
    timeout_seconds: float = 2.0


@dataclass(kw_only=True)
class ProcessResourceSpec(BaseResourceSpec):
    """A command on a machine, in a session of its own.

    Args:
        command: The program and its arguments. No shell is involved.
        workdir: Where it runs; its log directory where not given.
        environment: Variables, beside those of the lease.
        cpu_count: Processors it is bound to; those of the lease where not given.
        mem_limit: Bytes, or text as `512m`, `2g`; beyond it, allocating fails.
        gpus: How many GPUs; those of the lease where there is one.
        reset_command: Run between two users of a warm process; must exit with 0.
        stop_seconds: Between SIGTERM and SIGKILL.
        start_timeout: Seconds until it must be ready.

    """

    category: ClassVar[str] = "process"

    command: list[str] = field(default_factory=list[str])
    workdir: str | None = None
    environment: dict[str, str] = field(default_factory=dict[str, str])
    cpu_count: float | None = None
    mem_limit: int | str | None = None
    gpus: int | None = None
    reset_command: list[str] | None = None
    stop_seconds: float = 10.0
    start_timeout: float | None = None

    def __post_init__(self) -> None:
        """Check what no type can say."""
        super().__post_init__()
        if not self.command or not self.command[0]:
            raise ValueError("command: expected a list of texts, the program first")
        check_limits(self.cpu_count, self.mem_limit, self.gpus)

    @property
    def title(self) -> str:
        """Return the program."""
        return self.command[0]


@dataclass(kw_only=True)
class ServiceResourceSpec(ProcessResourceSpec):
    """A command that serves, and is ready when it says so.

    Args:
        port: Where it listens; 0 has a free port chosen and put into `{port}` of the command
            and into `PORT` of the environment.
        host: The address it listens on.
        readiness: How to see that it answers; a connection to `port` where not given.

    """

    category: ClassVar[str] = "service"

    port: int = 0
    host: str = "127.0.0.1"
    readiness: Readiness | None = None
    start_timeout: float | None = 300.0


@dataclass(kw_only=True)
class VLLMModelResourceSpec(BaseResourceSpec):
    """A model served by vLLM.

    Args:
        model_name_or_path: As vLLM knows it.
        tensor_parallel_size: GPUs that one copy is split over.
        port: Where it listens.
        pipeline_parallel_size: Stages of the pipeline.
        data_parallel_size: Copies.
        template: File of the chat template.
        gpu_memory_utilization: Share of a GPU's memory that it takes.
        tool_call_parser: As vLLM knows it.
        start_timeout: Seconds until it must answer.

    """

    category: ClassVar[str] = "vllm"

    model_name_or_path: str = ""
    tensor_parallel_size: int = 1
    port: int = 8000
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    template: str | None = None
    gpu_memory_utilization: float = 0.8
    tool_call_parser: str | None = "hermes"
    start_timeout: float | None = 300.0

    def __post_init__(self) -> None:
        """Check what no type can say."""
        super().__post_init__()
        if not self.model_name_or_path:
            raise ValueError("model_name_or_path: expected a model's name or path")

    @property
    def title(self) -> str:
        """Return the model."""
        return self.model_name_or_path

    def service(self) -> ServiceResourceSpec:
        """Return the service that it is: vLLM's own server, with its readiness probe."""
        command = [
            *("python3", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", self.model_name_or_path, "--host", "127.0.0.1", "--port", "{port}"),
            *("--tensor-parallel-size", str(self.tensor_parallel_size)),
            *("--pipeline-parallel-size", str(self.pipeline_parallel_size)),
            *("--data-parallel-size", str(self.data_parallel_size)),
            *("--gpu-memory-utilization", str(self.gpu_memory_utilization)),
        ]
        if self.template is not None:
            command += ["--chat-template", self.template]
        if self.tool_call_parser is not None:
            command += ["--enable-auto-tool-choice", "--tool-call-parser", self.tool_call_parser]
        return ServiceResourceSpec(
            command=command,
            port=self.port,
            gpus=self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size,
            readiness=Readiness(path="/v1/models", every_seconds=1.0),
            start_timeout=self.start_timeout,
            max_global_num=self.max_global_num,
            extra=self.extra,
        )


@dataclass(kw_only=True)
class ContainerResourceSpec(BaseResourceSpec):
    """A container.

    Args:
        image: What it is made of; `ubuntu:22.04` where not given.
        cpu_count: Processors, also fractions.
        mem_limit: Bytes, or text as `512m`, `2g`.
        gpus: How many GPUs, `"all"`, or a list of ids; those of the lease where there is one.
        ports: Port in the container -> port of the host, 0 for a free one.
        environment: Variables, beside those of the lease.
        mount: Path of the host -> path in the container, `:ro` behind it for read-only.
        host_ip: Address of the host that ports are opened on; 127.0.0.1 where not given.
        container_port: The port that `endpoint` names.
        command: What runs in it; the image's own where not given.
        readiness: How to see that it answers; that it runs where not given.
        start_timeout: Seconds until it must be ready.
        stop_seconds: Between SIGTERM and SIGKILL.
        ray_actor_options: For the backend `ray`.

    """

    category: ClassVar[str] = "container"

    image: str | None = None
    cpu_count: float | None = None
    mem_limit: int | str | None = None
    gpus: int | str | list[str] | None = None
    ports: dict[int, int] = field(default_factory=dict[int, int])
    environment: dict[str, str] = field(default_factory=dict[str, str])
    mount: dict[str, str] = field(default_factory=dict[str, str])
    host_ip: str | None = None
    container_port: int | None = None
    command: list[str] | None = None
    readiness: Readiness | None = None
    start_timeout: float | None = None
    stop_seconds: float = 10.0
    ray_actor_options: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        """Check what no type can say."""
        super().__post_init__()
        check_limits(self.cpu_count, self.mem_limit, self.gpus)

    @property
    def title(self) -> str:
        """Return the image."""
        return self.image or "ubuntu:22.04"


@dataclass(kw_only=True)
class APIModelResourceSpec(BaseResourceSpec):
    """A model that somebody else serves behind an OpenAI-compatible address.

    Args:
        model_name_or_path: As the service knows it.
        port: With `host`, where `base_url` is not given.
        base_url: E.g. `https://models.example/v1`.
        host: The service's host.
        api_key: Sent as a bearer token; never written down.
        request_timeout: Seconds for one request.
        start_timeout: Seconds until the service must answer.

    """

    category: ClassVar[str] = "api_model"

    model_name_or_path: str = ""
    port: int | None = None
    base_url: str | None = None
    host: str | None = None
    api_key: str | None = field(default=None, repr=False)
    request_timeout: float | None = None
    start_timeout: float | None = 60.0

    @property
    def title(self) -> str:
        """Return the model."""
        return self.model_name_or_path or "default"

    @property
    def url(self) -> str:
        """Where it is, without a slash at the end."""
        given = self.base_url or f"http://{self.host or '127.0.0.1'}:{self.port or 8000}/v1"
        return given.rstrip("/")


@dataclass(kw_only=True)
class LocalEnvResourceSpec(BaseResourceSpec):
    """An object of a class of the caller's own process. Not for the daemon, which runs no code.

    Args:
        env_cls_path: `package.module.Class`.
        init_kwargs: Its arguments.

    """

    category: ClassVar[str] = "local_env"

    env_cls_path: str = ""
    init_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def title(self) -> str:
        """Return the class."""
        return self.env_cls_path or "default"


@dataclass(kw_only=True)
class MemoryResourceSpec(BaseResourceSpec):
    """A workload that is nothing but an entry of a dictionary, with faults on demand.

    Args:
        name: Tells kinds of workload apart.
        start_seconds: How long the start takes.
        stop_seconds: How long the stop takes.
        fail: Fails the start with this reason, half way.
        fail_stops: So many stops fail before one succeeds.
        die_seconds: Ends by itself so long after it was ready.
        exit_code: With this, when it ends by itself.
        fail_reset: Fails every reset with this reason.
        resettable: Whether it can be reset at all.

    """

    category: ClassVar[str] = "memory"

    name: str = "default"
    start_seconds: float = 0.0
    stop_seconds: float = 0.0
    fail: str = ""
    fail_stops: int = 0
    die_seconds: float | None = None
    exit_code: int = 1
    fail_reset: str = ""
    resettable: bool = True
    start_timeout: float | None = None

    def __post_init__(self) -> None:
        """Check what no type can say."""
        super().__post_init__()
        for name in ("start_seconds", "stop_seconds"):
            if not 0 <= getattr(self, name) <= MEMORY_DELAY_SECONDS_MAX:
                reason = f"expected a number of seconds from 0 to {MEMORY_DELAY_SECONDS_MAX:g}"
                raise ValueError(f"{name}: {reason}")

    @property
    def title(self) -> str:
        """Return the name."""
        return self.name


MEMORY_DELAY_SECONDS_MAX: Final = 60.0
"""Longest delay that a `MemoryResourceSpec` may ask for."""


def memory_bytes(given: int | str) -> int:
    """Return bytes, of a number or of a text such as `512m`, `2g`, `1.5GiB`.

    Raises:
        ValueError: It is neither.

    """
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    match = _MEMORY.fullmatch(given.strip()) if isinstance(given, str) else None
    if match is None or (size := int(float(match[1]) * _UNITS[match[2].lower()])) <= 0:
        raise ValueError("mem_limit: expected bytes, or text such as 512m or 2g")
    return size


def check_limits(
    cpu_count: float | None, mem_limit: int | str | None, gpus: int | str | list[str] | None
) -> None:
    """Check the limits that several kinds share.

    Raises:
        ValueError: It starts with the field's name.

    """
    if cpu_count is not None and cpu_count <= 0:
        raise ValueError("cpu_count: expected a number above 0")
    if mem_limit is not None:
        memory_bytes(mem_limit)
    if isinstance(gpus, str) and gpus != "all":
        raise ValueError("gpus: expected a number, a list of ids, or all")
    if isinstance(gpus, int) and gpus < 0:
        raise ValueError("gpus: expected a number from 0 on")
