"""The last day of a server in numbers, for `GET /history` and the console."""

from msgspec import Struct, field

from moorage.records.fields import Seconds
from moorage.records.json_values import JsonValue
from moorage.records.requests import Resources


class GpuUse(Struct):
    """GPU milli of one model: total, held, and idle but out of service.

    `largest` is the largest number of wholly free GPUs on one node; `nodes_empty` counts the nodes
    with only free GPUs.
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

    The values are interpolated between the bounds of histogram buckets; null: no duration.
    """

    p50: list[float | None]
    p99: list[float | None]


class OldestWaiter(Struct):
    """A waiting request, with its tenant and the start of its wait."""

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
    """Agents of machines: how many are connected and disconnected; the first disconnected ones."""

    connected: int = 0
    absent: int = 0
    lost: int = 0
    first: list[AbsentAgent] = field(default_factory=list[AbsentAgent])


class ClusterOut(Struct):
    """A cluster without a node in service, and the reason of its first node."""

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
    """The present state of the server.

    Attributes:
        oldest: The requests that have waited longest, of those that you may see.
        ending: The leases that end within the hour, of those that you may see.
        agents: The agents of all machines; only for callers that may see what all tenants hold.
        clusters_out: The first clusters without a node in service.
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

    A gauge has the value of the last minute of its point; `loop_seconds` and `longest_wait_seconds`
    have the largest value. `grants` and `refusals` count events within the point.

    Attributes:
        at: The time at which each point ends.
        minutes: How many minutes each point has.
        models: GPUs by model; models with few GPUs are summed up as `other`.
        tenants: GPU milli held by tenant; `warm` is held for warm reuse. A caller that may not see
            other tenants gets its own and their sum, `others`.
        failing: Leases whose workload failed.
        grant: Time from a request to its grant.
        evaluation: Time that a policy took for one evaluation.
        commit: Time to make one group of facts durable.
        loop_seconds: The largest delay of the server's event loop.
        refusals: Failure replies by code.
        events: The latest events of the fleet and of policies that you may see, newest first.
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
