"""Specs of workloads on one machine: one dataclass per kind, keyword-only.

Users whose specs are equal in every field share resources. Every field is checked when a spec is
created, from JSON (`spec_documents`) or in Python. Kinds of backends define further specs in their
own `specs` modules.

    SpecError    (a ValueError) a field of a spec is wrong; the error names the field and the
    expected value

The fields of the specs of containers, models and environments are documented in
docs/reference/resource-engine.md, "Specs".
"""

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, get_args, get_type_hints

import pydantic

from moorage.backends.spec_fields import (
    Command,
    Copies,
    Count,
    Cpus,
    Devices,
    Environment,
    Folder,
    FreePort,
    Memory,
    MemoryDelay,
    Name,
    Port,
    ProbeSeconds,
    StartSeconds,
    StopSeconds,
    Text,
)
from moorage.records.json_values import JsonObject

WORDS_SHOWN_MAX: Final = 64
"""Maximum characters of a command that a message shows."""
_STRICT: Final = pydantic.ConfigDict(
    extra="forbid", arbitrary_types_allowed=True, revalidate_instances="always"
)

BUILT_IN: Final[set[str]] = set()
"""The categories of specs that Moorage defines."""


ContainerCategory = Literal["container", "python_env", "scienceworld", "alfworld", "webshop"]
"""The categories of containers: `container`, and names of agent environments."""
ENVIRONMENTS: Final = frozenset(get_args(ContainerCategory)) - {"container"}


class SpecError(ValueError):
    """A spec has a wrong field.

    Args:
        path: The path of the field, e.g. `spec.cpu_count`.
        expected: The expected value.
    """

    def __init__(self, path: str, expected: str) -> None:
        super().__init__(f"{path}: expected {expected}")
        self.path = path
        self.expected = expected


@dataclass(kw_only=True)
class BaseResourceSpec:
    """The fields of every spec.

    Args:
        category: The class's own category; or one of the user's, with the user's own runner.
        max_global_num: Most resources of this spec and backend at a time, including free ones and
            those being created; None: no limit.
        extra: Further options for the backend or its runner.
    """

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT
    category: str = "resource"

    max_global_num: Annotated[int, pydantic.Field(ge=1)] | None = None
    extra: JsonObject = field(default_factory=JsonObject)

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            SpecError: A field is wrong; the error names it, and the expected value.
        """
        for name, reader in _readers(type(self)).items():  # type: ignore[arg-type]  # Classes are hashable.
            try:
                setattr(self, name, reader.validate_python(getattr(self, name)))
            except pydantic.ValidationError as error:
                raise _spec_error(name, error) from error
        own = type(self).category
        if self.category == type(self).__dataclass_fields__["category"].default:
            self.category = own  # The class attribute counts.
        elif self.category != own and (not self.category or self.category in BUILT_IN):
            raise SpecError("category", f"{own} or one of your own")

    def __init_subclass__(cls) -> None:
        """Record the category of a spec class of Moorage in `BUILT_IN`."""
        if cls.__module__.startswith("moorage."):
            BUILT_IN.add(cls.category)

    @property
    def limit_seconds(self) -> float | None:
        """The seconds until the workload must be ready; None for no limit."""
        limit: float | None = getattr(self, "start_timeout", None)
        return limit

    @property
    def title(self) -> str:
        """The name of the spec in messages: an image, a model or a class."""
        for name in ("image", "model_name_or_path", "env_cls_path"):
            if given := getattr(self, name, None):
                return str(given)
        return "default"


@dataclass(kw_only=True)
class Readiness:
    """The readiness check of a workload; it needs `path`, `port` or `command`, or several.

    Args:
        path: Path of an HTTP GET that must return a status below 400.
        port: Port of the probe; by default the spec's own.
        command: Command that must exit with 0; it runs inside the workload.
        every_seconds: Seconds between two probes.
        timeout_seconds: Longest duration of one probe.
    """

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT

    path: Text | None = None
    port: Port | None = None
    command: Command | None = None
    every_seconds: ProbeSeconds = 0.2
    timeout_seconds: ProbeSeconds = 2.0


@dataclass(kw_only=True)
class ProcessResourceSpec(BaseResourceSpec):
    """A command on a machine, in its own session.

    Args:
        command: The program and its arguments. No shell is involved.
        workdir: The working folder; by default a new empty folder.
        environment: Variables in addition to the lease's.
        cpu_count: Number of processors that it is bound to; by default the lease's.
        mem_limit: Bytes, or text as `512m`, `2g`; larger allocations fail.
        gpus: Number of GPUs; with a lease, its GPUs.
        reset_command: Command that runs between two users of a warm process; must exit with 0.
        stop_seconds: Seconds between SIGTERM and SIGKILL.
        start_timeout: Seconds until it must be ready.
    """

    category: str = "process"

    command: Command = field(default_factory=list[str])
    workdir: Folder | None = None
    environment: Environment = field(default_factory=dict[str, str])
    cpu_count: Cpus | None = None
    mem_limit: Memory | None = None
    gpus: Count | None = None
    reset_command: Command | None = None
    stop_seconds: StopSeconds = 10.0
    start_timeout: StartSeconds | None = None

    @property
    def title(self) -> str:
        """Return the program of the spec, which is its title in messages."""
        return self.command[0]


@dataclass(kw_only=True)
class ServiceResourceSpec(ProcessResourceSpec):
    """A command that serves requests, and is ready when its readiness check succeeds.

    Args:
        port: The port it listens on; 0: a free port, which replaces `{port}` in the command and is
            set as `PORT` in the environment.
        host: The address it listens on.
        readiness: The readiness check; by default a connection to `port`.
    """

    category: str = "service"

    port: FreePort = 0
    host: Name = "127.0.0.1"
    readiness: Readiness | None = None
    start_timeout: StartSeconds | None = 300.0


@dataclass(kw_only=True)
class VLLMModelResourceSpec(BaseResourceSpec):
    """A model served by vLLM.

    Args:
        model_name_or_path: Name or path of the model for vLLM.
        tensor_parallel_size: Number of GPUs per copy and stage.
        port: The port it listens on.
        pipeline_parallel_size: Number of stages of the pipeline.
        data_parallel_size: Number of copies of the model.
        template: Path of the chat template.
        gpu_memory_utilization: Share of a GPU's memory that it takes.
        tool_call_parser: Name of a parser of vLLM.
        python: Python interpreter that has vLLM; by default the one that runs this program.
        start_timeout: Seconds until it must answer.
    """

    category: str = "vllm"

    model_name_or_path: Name = ""
    tensor_parallel_size: Copies = 1
    port: FreePort = 8000
    pipeline_parallel_size: Copies = 1
    data_parallel_size: Copies = 1
    template: Text | None = None
    gpu_memory_utilization: Annotated[float, pydantic.Field(gt=0, le=1)] = 0.8
    tool_call_parser: Text | None = "hermes"
    python: Name | None = None
    start_timeout: StartSeconds | None = 300.0

    def service(self) -> ServiceResourceSpec:
        """Return the model as a service: vLLM's own server, with its readiness check."""
        python = self.python or sys.executable or "python3"
        command = [
            *(python, "-m", "vllm.entrypoints.openai.api_server"),
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
        image: The image; by default `ubuntu:22.04`.
        cpu_count: Number of processors; may be a fraction.
        mem_limit: Bytes, or text as `512m`, `2g`.
        gpus: Number of GPUs, `"all"`, or a list of ids; with a lease, its GPUs.
        ports: Port in the container -> port of the host, 0 for a free one.
        environment: Variables in addition to the lease's.
        mount: Path of the host -> path in the container, with the suffix `:ro` for read-only;
            `bind` and `rbind`, as in `:ro,rbind`, have no effect.
        host_ip: Address of the host on which ports are opened; by default 127.0.0.1.
        container_port: The port that `endpoint` names.
        command: The command to run; by default the image's own.
        readiness: The readiness check; by default the container must only run.
        start_timeout: Seconds until it must be ready.
        stop_seconds: Seconds between SIGTERM and SIGKILL.
        ray_actor_options: Options for the backend `ray`.
    """

    category: str = "container"

    image: Name | None = None
    cpu_count: Cpus | None = None
    mem_limit: Memory | None = None
    gpus: Devices | None = None
    ports: dict[Port, FreePort] = field(default_factory=dict[int, int])
    environment: Environment = field(default_factory=dict[str, str])
    mount: dict[Text, Text] = field(default_factory=dict[str, str])
    host_ip: Text | None = None
    container_port: Port | None = None
    command: Command | None = None
    readiness: Readiness | None = None
    start_timeout: StartSeconds | None = None
    stop_seconds: StopSeconds = 10.0
    ray_actor_options: JsonObject = field(default_factory=JsonObject)

    @property
    def title(self) -> str:
        """Return the image of the spec, which is its title in messages."""
        return self.image or "ubuntu:22.04"


@dataclass(kw_only=True)
class APIModelResourceSpec(BaseResourceSpec):
    """A model that another server offers at an OpenAI-compatible address.

    Args:
        model_name_or_path: Name of the model at the service.
        port: Port at `host`, if `base_url` is not given.
        base_url: E.g. `https://models.example/v1`.
        host: The service's host, if `base_url` is not given.
        api_key: Sent as a bearer token; never stored.
        request_timeout: Seconds for one request.
        start_timeout: Seconds until the service must answer.
    """

    category: str = "api_model"

    model_name_or_path: str = ""
    port: Port | None = None
    base_url: str | None = None
    host: str | None = None
    api_key: str | None = field(default=None, repr=False)
    request_timeout: StartSeconds | None = None
    start_timeout: StartSeconds | None = 60.0

    @property
    def url(self) -> str:
        """The base URL of the model's server, without a final slash."""
        given = self.base_url or f"http://{self.host or '127.0.0.1'}:{self.port or 8000}/v1"
        return given.rstrip("/")


@dataclass(kw_only=True)
class LocalEnvResourceSpec(BaseResourceSpec):
    """An object of a class in the caller's process. The daemon refuses it, as it runs no code.

    Its creation blocks the event loop; do slow work in the object's own `start`, a coroutine.

    Args:
        env_cls_path: `package.module.Class`.
        init_kwargs: Keyword arguments of the class.
    """

    category: str = "local_env"

    env_cls_path: str = ""
    init_kwargs: JsonObject = field(default_factory=JsonObject)


@dataclass(kw_only=True)
class MemoryResourceSpec(BaseResourceSpec):
    """A fake workload that is only an entry in a dictionary, with faults on demand.

    Args:
        name: Makes specs different, so that they share no resources.
        start_seconds: Duration of the start.
        stop_seconds: Duration of the stop.
        fail: Reason with which the start fails half way; empty: it succeeds.
        fail_stops: Number of stops that fail before one succeeds.
        die_seconds: Seconds from readiness until it ends by itself.
        exit_code: Exit code when it ends by itself.
        lose_seconds: Seconds from the start until the gang loses its last member.
        fail_reset: Reason with which every reset fails; empty: resets succeed.
        resettable: Whether it can be reset.
    """

    category: str = "memory"

    name: str = "default"
    start_seconds: MemoryDelay = 0.0
    stop_seconds: MemoryDelay = 0.0
    fail: str = ""
    fail_stops: int = 0
    die_seconds: StopSeconds | None = None
    exit_code: int = 1
    lose_seconds: StopSeconds | None = None
    fail_reset: str = ""
    resettable: bool = True
    start_timeout: StartSeconds | None = None

    @property
    def title(self) -> str:
        """Return the name of the spec, which is its title in messages."""
        return self.name


@functools.cache
def _readers(kind: type[BaseResourceSpec]) -> Mapping[str, pydantic.TypeAdapter[Any]]:
    """Return a validator for each field of a spec class, by field name."""
    hints = get_type_hints(kind, include_extras=True)
    loose = pydantic.ConfigDict(arbitrary_types_allowed=True)
    return {
        name: pydantic.TypeAdapter(hint, config=None if is_dataclass(hint) else loose)
        for name, hint in ((each.name, hints[each.name]) for each in fields(kind))
    }


def _spec_error(name: str, error: pydantic.ValidationError) -> SpecError:
    """Convert pydantic's first error about a field into a `SpecError`."""
    first = error.errors(include_url=False)[0]
    place = ".".join([name, *(str(part) for part in first["loc"] if part != "[key]")])
    if first["type"] == "unexpected_keyword_argument":
        known = ", ".join(each.name for each in fields(Readiness))
        return SpecError(place, f"one of {known}")
    if first["type"] == "list_type" and isinstance(first["input"], str):
        words = first["input"][:WORDS_SHOWN_MAX].split()
        return SpecError(place, f"a list, such as {json.dumps(words, ensure_ascii=False)}")
    text = first["msg"].removeprefix("Value error, expected ")
    expected = text.removeprefix("Input should be ")
    compared = expected.startswith(("greater", "less"))
    return SpecError(
        place, f"a number {expected}" if compared else expected[:1].lower() + expected[1:]
    )
