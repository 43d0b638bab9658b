"""The interface between daemon and sandbox: values, errors, and Protocols.

The daemon imports these through `moorage.sandbox.host.sandbox`. Errors of the package:

    SandboxError
    ├── JailError      the jail is incomplete; nothing may be served
    └── PolicyFault    a policy (or its cell) failed; carries the refusal to answer with
    ServiceError       raised *by* the daemon's `HostServices`, never by the sandbox
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Consult
from moorage.model import PolicyRef, Tenant
from moorage.policy import Fleet
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.sandbox.wire.frames import ENTRY, CodeFinding

Mode = Literal["jail", "unsafe"]
Method = Literal[
    "read_cluster", "execute_query", "get_cluster", "query_clusters", "get_block", "query_blocks"
]
"""The calls that the injected clients may make."""
Isolation = Literal["per_policy_version", "per_tenant", "per_eval"]


class SandboxError(Exception):
    """The base of all errors that the sandbox raises."""


class JailError(SandboxError):
    """The jail cannot be built here, or an attack of the self-test succeeded.

    Args:
        layer: The layer or attack, e.g. `seccomp` or `open`.
        reason: The failure, and the remedy.
    """

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(f"sandbox layer {layer!r}: {reason}")
        self.layer = layer
        self.reason = reason


class PolicyFault(SandboxError):  # noqa: N818  # The policy is at fault, not the server.
    """A policy, or its cell, failed at a call; `refusal` has the reason for the caller."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.code}: {refusal.reason}")
        self.refusal = refusal


class CallRefusedError(Exception):
    """A service refused a call; the injected client raises the error that the original raises.

    Args:
        message: The message of the service.
        status: The service's HTTP status; 0: there was none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class Guard(Protocol):
    """The checks of a policy's schemas; the daemon passes them for policies with schemas.

    The host applies the checks, since a cell could forge the result.
    """

    def overrides(
        self, parameters: JsonMapping, settings: JsonMapping
    ) -> tuple[JsonMapping, JsonMapping]:
        """Return the caller's overrides of defaults, completed, or raise `PolicyFault`."""

    async def complete(self, input_data: JsonValue) -> JsonValue:
        """Return the argument of a plain call of `eval`, completed, or raise `PolicyFault`."""

    def command(self, action: str, data: JsonValue) -> JsonValue:
        """Return the data of a management command, completed, or raise `PolicyFault`."""

    def judge(self, value: JsonValue) -> Refusal | None:
        """Return the refusal of the value that `eval` returned, or None."""


@dataclass(frozen=True)
class PolicyCode:
    """One policy version as the registry stores it. The server never compiles or parses the code.

    Args:
        files: The content of each file, by its path in the archive. `function.py` is the entry;
            every other `.py` file is importable from it by its dotted path. A leading `code/` is
            ignored.
        settings: Default settings of the policy document.
        parameters: Default parameters of the policy document.
        guard: Applies the policy's schemas; None: it has none.
        deadline_seconds: Deadline of one evaluation; 0: the server's default.
        entry: The author's name for `function.py`, for messages and tracebacks.
    """

    ref: PolicyRef
    files: Mapping[str, bytes]
    settings: JsonMapping = field(default_factory=JsonObject)
    parameters: JsonMapping = field(default_factory=JsonObject)
    guard: Guard | None = field(default=None, compare=False)
    deadline_seconds: float = 0.0
    entry: str = ENTRY


@dataclass(frozen=True, slots=True)
class Document:
    """The document under `cluster_data[id]` of a policy, packed.

    Args:
        version: Changes whenever the content does.
        blob: msgpack of `{"data": <cluster document>, "cluster_metrics": <metrics or None>}`.
    """

    id: str
    version: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The workers that run cells on other machines.

    Args:
        address: The address of a Ray cluster, as `ray.init` takes it.
        cells: The largest number of cells on each Ray node; each cell has a reserved processor on
            the node.
        tell: Called with a node or Ray itself, its new state, and whether that state is good.
    """

    address: str
    cells: int
    tell: Callable[[str, str, bool], None]


class Meter(Protocol):
    """Counts the processor time of each tenant's evaluations; the daemon implements it.

    Trial evaluations of policies do not count. Requests of shadows have separate tenants.
    """

    def burnt(self, tenant: Tenant, seconds: float, /) -> None:
        """Count the processor time of an evaluation."""

    def refusal(self, tenant: Tenant, /) -> Refusal | None:
        """Return why no new evaluation of a tenant may start now, or None."""


class HostServices(Protocol):
    """The services behind a cell's calls; implemented by the daemon over the catalog."""

    async def call(
        self, client: str, method: Method, arguments: tuple[JsonValue, ...]
    ) -> JsonValue:
        """Answer an injected client with plain JSON data.

        Args:
            client: `cluster_client`, `cluster_metrics_client` or `block_metrics_client`.
            method: `read_cluster(id)`, `execute_query(query)`; `get_cluster(id)`,
                `query_clusters(query | None)`; `get_block(id)`, `query_blocks(query | None)`. Ids
                are validated before they arrive here.
            arguments: The positional arguments, as many as the method has above.

        Raises:
            CallRefusedError: The service refused. The stub then returns `(False, message)` or
                raises `APIError`, as the original class would.
        """

    def at_hand(self, client: str, method: Method, ids: Sequence[str]) -> Mapping[str, bytes]:
        """Return the answers of `call` about these clusters, as msgpack, if they are in memory.

        A policy waits for the answer to its call, and an answer from memory takes half the time.
        Cells cache answers: before `call` gives another answer about a cluster, the daemon has to
        call `Sandbox.drop_documents`. Answers are also prefetched, so this method calls no service.
        """

    def documents(self, cluster_ids: Sequence[str]) -> Sequence[Document]:
        """Return the documents of these clusters, from memory; unknown ids are left out."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trial evaluation of a policy, with a fleet and services of its own.

    Args:
        tenant: The tenant of the trial; different samples of a policy need different tenants, or
            their contexts mix.
        fleet: The fleet, in place of the live fleet.
        services: Answer the injected clients, in the place of the server's.
        consult: The consultation; None if `input_data` is given instead.
        input_data: The argument of `eval` without a consultation, as JSON data.
        parameters: The parameters that replace the policy's defaults, beside `input_data`.
        settings: The settings that replace the policy's defaults, beside `input_data`.
    """

    tenant: Tenant
    fleet: Fleet
    services: HostServices
    consult: Consult | None = None
    input_data: JsonValue = None
    parameters: JsonMapping = field(default_factory=JsonObject)
    settings: JsonMapping = field(default_factory=JsonObject)


@dataclass(frozen=True, slots=True)
class SampleOutcome:
    """The outcome of a sample: the value that `eval` returned, or the reason why there is none."""

    value: JsonValue = None
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome of `Sandbox.check`: the policy is usable if there are no findings.

    Args:
        management: Whether the class has a `management` method.
        output: The text that the code printed or logged while it was loaded.
        outcomes: The outcomes of the samples, in order; if one ended the cell, all later ones have
            its refusal.
        warnings: Why some requests may fail.
    """

    findings: tuple[CodeFinding, ...]
    management: bool = False
    output: str = ""
    outcomes: tuple[SampleOutcome, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the policy may be registered."""
        return not self.findings


@dataclass(frozen=True, slots=True)
class OpenCircuit:
    """A policy whose requests of one tenant are refused for a while.

    Args:
        tenant: The tenant whose requests are refused while the circuit is open.
        overruns: The policy's latest evaluations for this tenant that were stopped at their
            deadline.
        seconds: How long the circuit stays open, in seconds.
    """

    ref: PolicyRef
    tenant: Tenant
    overruns: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """The state of the jail, for /metrics and `moored doctor`.

    Args:
        mode: `jail`, or `unsafe` by a setting.
        layers: Active layers by name with their details, e.g. `{"seccomp": "filter", "landlock":
            "abi 7"}`. Inactive layers are left out.
        probes: Attacks of the start-up self-test and how each was stopped.
        cells: Living cells per policy URI.
        counters: `evaluations`, `failures`, `calls` (that reached the host), `timeouts`, `crashes`,
            `kills`, `protocol_breaches`, `spawns`, `respawns`, `resent`, `demotions`, `recycled`,
            `evicted`, `busy`, `zygote_restarts`, `granted`, `not_granted`; absent while 0.
            `context_conflicts`: dropped changes of a context. `circuits_opened`,
            `circuit_refusals`: of the circuit breaker. `worker_starts`, `worker_losses`,
            `worker_doubts`, `bridge_restarts`: of workers on Ray.
        circuits_open: Open circuits now, counted once per policy and tenant.
        warning: A warning, if policies run in unsafe mode, without the jail; else empty.
        workers: The latest state of Ray, and of each of its known nodes.
        workers_up: Number of nodes on which policies run.
    """

    mode: Mode
    layers: Mapping[str, str]
    probes: Mapping[str, str]
    cells: Mapping[str, int]
    counters: Mapping[str, int]
    circuits_open: int = 0
    warning: str = ""
    workers: Mapping[str, str] = field(default_factory=dict[str, str])
    workers_up: int = 0
