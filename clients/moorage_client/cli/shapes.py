"""What the commands show of a server's answers, field by field.

A server may answer anything. What is printed as JSON is printed as it came; what is shown to a
person is read as one of these first, so that a wrong answer is one error that names the field.
Unknown fields are left out, and what a server does not say is empty.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from moorage.records.fields import ATTEMPTS_MAX

ExitCode = Annotated[int, Meta(ge=-64, le=255)]
"""Of a process; negative: the signal that ended it."""
Attempt = Annotated[int, Meta(ge=0, le=ATTEMPTS_MAX)]
"""Which start of a workload."""
Name = str | int | float | None
Document = dict[str, Any]


class ShownWaiter(Struct):
    """A row of `moorage queue`."""

    position: int = 0
    expected_at: float | None = None
    request: str = ""
    tenant: str = ""
    policy_rule_uri: str = ""
    priority: int = 0
    deadline: float = 0.0
    since: float = 0.0
    resources: dict[str, Name | list[Name]] | None = None


class ShownDecision(Struct):
    """A row of `moorage history`."""

    at: float = 0.0
    request: str = ""
    tenant: str = ""
    state: str = ""
    policy_rule_uri: str = ""
    resources: dict[str, Name | list[Any]] | None = None
    reason: str = ""


class NodeVerdictRow(Struct):
    """A node in `moorage why --nodes`."""

    cluster_id: str = ""
    text: str = ""


class ClusterRow(Struct):
    """A row of `moorage fleet`."""

    cluster_id: str = ""
    nodes: int | str = ""
    nodes_unavailable: int = 0
    gpus: int | str = ""
    gpu_milli_free: int | None = None
    gpu_milli_total: int | None = None
    cpu_milli_free: int | None = None
    cpu_milli_total: int | None = None
    memory_mib_free: int | str = "?"
    memory_mib_total: int | str = "?"


class NodeRow(Struct):
    """A row of `moorage fleet CLUSTER`."""

    node_id: str = ""
    models: list[str] = []
    gpus: dict[str, int] = {}
    cpu_milli_free: int | str = ""
    memory_mib_free: int | str = ""
    duplicate_of: str = ""
    unavailable: str = ""


class ShownOutput(Struct):
    """A piece of a workload's output."""

    base64: str = ""
    offset: int = 0
    attempt: Attempt = 1
    over: bool = False
    exit_code: ExitCode | None = None


class ShownExecution(Struct):
    """What a command inside of a workload did."""

    exit_code: ExitCode
    output: str = ""


class Known(Struct):
    """The names that a refusal of an unknown name lists."""

    nearest: list[str] = []
    registered: list[str] = []
    backends: list[str] = []


class PolicyRow(Struct):
    """A row of `moorage policy list`."""

    policy_rule_uri: str = ""
    description: str | None = ""


class ShownPolicyChange(Struct):
    """A row of `moorage policy show --history`."""

    at: float = 0.0
    who: str = ""
    what: str = ""
    digest: str = ""
    fields: list[str] = []


class ShownCanary(Struct):
    """Who gets a share of an alias's requests."""

    version: str = ""
    percent: float = 0.0
    by: str = ""


class ShownAlias(Struct):
    """What an alias means."""

    alias: str = ""
    policy_rule_uri: str = ""
    former: str | None = None
    canary: ShownCanary | None = None
    shadow: str | None = None
    who: str = ""
    history: list[Document] = []


class Latency(Struct):
    """How long evaluations take."""

    p50: float | str = ""
    p99: float | str = ""


class ShownStatistics(Struct):
    """How a version does under an alias."""

    policy_rule_uri: str = ""
    asked: int = 0
    granted: int = 0
    advised: int = 0
    refused: dict[str, int] = {}
    faults: int = 0
    latency_ms: Latency | None = None


class CanaryReport(Struct):
    """What `moorage policy canary --report` shows."""

    active: ShownStatistics | None = None
    candidate: ShownStatistics | None = None


class ShownSide(Struct):
    """What one of two compared versions did, in all."""

    policy_rule_uri: str = ""
    placed: int = 0
    refused: int = 0
    gpus_opened: int | str = ""
    nodes_opened: int | str = ""
    latency_ms: Latency | None = None


class Place(Struct):
    """A part of a placement."""

    cluster_id: str = ""
    node_id: str = ""
    gpus: list[str] = []


class Refused(Struct):
    """Why a version said no."""

    code: str = ""
    reason: str = ""


class ShownAnswer(Struct):
    """What a version answered to one request."""

    error: Refused | None = None
    placement: list[Place] | None = None
    data: str = ""


class ShownSample(Struct):
    """A request that two versions answered differently."""

    active: ShownAnswer
    candidate: ShownAnswer
    request: str = ""


class ShadowReport(Struct):
    """What `moorage policy shadow --report` shows; of another tenant's alias, not all of it."""

    active: ShownSide
    candidate: ShownSide
    asked: int | None = None
    dropped: int | None = None
    compared: int | None = None
    same: int | None = None
    differ: int | None = None
    differ_alone: int | None = None
    cost: Any = None
    whole: bool = True
    samples: list[ShownSample] = []


class ShownCircuit(Struct):
    """Why a policy rests for a while."""

    retry_after_seconds: float = 0.0
    overruns: int = 0


class PolicyLogs(Struct):
    """What `moorage policy logs` shows."""

    policy_rule_uri: str = ""
    rests: ShownCircuit | None = None
    printed: dict[str, str] = {}
    changed: dict[str, Any] = {}


class Count(Struct):
    """How many of something a cluster has; CPUs may be parts of one."""

    count: int | float = 0


class ClusterStored(Struct):
    """A row of `moorage fleet import`."""

    id: str
    nodes: Count | None = None
    gpus: Count | None = None
    vcpus: Count | None = None
    memory: int | float | None = 0


class Slot(Struct):
    """An instance of a pool, with what is free of it or held."""

    id: str | int
    slots: int | float = 0


class ShownHolding(Struct):
    """Who holds what of a pool."""

    transaction: str
    resources: dict[str, list[Slot]] = {}
    pid: int | None = None
    expires_at: float | None = None


class PoolState(Struct):
    """What `moorage pool show` shows."""

    resources: dict[str, list[Slot]] = {}
    holdings: list[ShownHolding] = []


class Finding(Struct):
    """What is wrong with a policy's code."""

    message: str = ""
    file: str | None = ""
    line: int | None = None
    text: str | None = ""
