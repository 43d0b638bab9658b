"""The last day of a server in numbers, as `GET /history` answers it and the console draws it."""

from msgspec import Struct, field

from moorage.records.fields import Seconds
from moorage.records.json_values import JsonValue
from moorage.records.requests import Resources


class GpuUse(Struct):
    """GPU milli of one model: total, held, and idle but out of service.

    `largest` is how many GPUs are wholly free on one node, at most; `nodes_empty` counts the nodes
    of which all are.
    """

    total: int
    used: int
    unavailable: int
    largest: int = 0
    nodes_empty: int = 0


class GpuHistory(Struct):
    """Total and held GPU milli of a model at each point."""

    total: list[int]
    used: list[int]


class Quantiles(Struct):
    """Half of the durations within a point were at most `p50`, 99 of 100 at most `p99`.

    They are read from buckets, between whose bounds is interpolated; null: there was none.
    """

    p50: list[float | None]
    p99: list[float | None]


class OldestWaiter(Struct):
    """A request that waits, since when, and for whom."""

    request: str
    tenant: str
    since: Seconds
    resources: Resources | None


class EndingSoon(Struct):
    """Leases that end within the hour unless they are renewed, and the GPU milli they hold."""

    leases: int = 0
    gpu_milli: int = 0


class AbsentAgent(Struct):
    """A machine whose agent is not connected, since when, and whether it counts as lost."""

    cluster_id: str
    node_id: str
    since: Seconds
    lost: bool


class AgentsNow(Struct):
    """Agents of machines: how many are connected and not, and the first that are not."""

    connected: int = 0
    absent: int = 0
    lost: int = 0
    first: list[AbsentAgent] = field(default_factory=list[AbsentAgent])


class ClusterOut(Struct):
    """A cluster of which no node is in service, and why, as its first node says it."""

    cluster_id: str
    nodes: int
    reason: str


class NewsEvent(Struct):
    """An event of the fleet, of policies or of a failed workload, as `watch` sends it."""

    at: Seconds
    topic: str
    event: str
    data: JsonValue


class HistoryNow(Struct):
    """How it stands at this moment.

    Attributes:
        oldest: Who waits longest, of those that you may see.
        ending: What ends within the hour, of what you may see.
        agents: Of all machines, for those who see what all tenants hold.
        clusters_out: Clusters of which no node is in service, the first of them.
    """

    at: Seconds
    models: dict[str, GpuUse]
    tenants: dict[str, int]
    waiting: int
    longest_wait_seconds: float
    failing: int
    nodes: int
    nodes_unavailable: int
    leases: int
    sessions: int
    memory_mib: int
    oldest: list[OldestWaiter] = field(default_factory=list[OldestWaiter])
    ending: EndingSoon = field(default_factory=EndingSoon)
    agents: AgentsNow | None = None
    clusters_out: list[ClusterOut] = field(default_factory=list[ClusterOut])


class History(Struct, kw_only=True):
    """Points of `minutes` samples each, oldest first; all lists have one entry a point.

    A gauge is that of the last minute of its point, and `loop_seconds` and `longest_wait_seconds`
    are the largest. `grants` and `refusals` count what happened within the point.

    Attributes:
        at: When each point ends.
        minutes: How many minutes each point has.
        models: GPUs by model; those beyond the largest as `other`.
        tenants: GPU milli held by tenant; `warm` waits for the next request. Who may not see
            the others has its own, and `others`.
        failing: Leases whose workload failed.
        grant: From a request to its grant.
        evaluation: From a question to a policy to its answer.
        commit: Making one group of facts durable.
        loop_seconds: How late the server's event loop was at most.
        refusals: Failure replies by code.
        events: The last of the fleet and of policies that you may see, newest first.
    """

    now: HistoryNow
    at: list[Seconds]
    minutes: list[int]
    models: dict[str, GpuHistory]
    tenants: dict[str, list[int]]
    waiting: list[int]
    longest_wait_seconds: list[float]
    failing: list[int]
    grants: list[int]
    grant: Quantiles
    evaluation: Quantiles
    commit: Quantiles
    loop_seconds: list[float]
    memory_mib: list[int]
    sessions: list[int]
    refusals: dict[str, list[int]]
    events: list[NewsEvent] = field(default_factory=list[NewsEvent])
