"""The parts of messages: resources, terms of a lease, its workload, and quotas.

`messages` is the only one that reads them; the fields themselves are in `fields`.
"""

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import asdict, astuple

from moorage import model
from moorage.records import fields as f
from moorage.records.json_values import JsonObject


class LabelRequirement(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One label of a node, as Kubernetes' `matchExpressions` say it.

    Attributes:
        key: The name of the label.
        operator: What must hold of its value.
        values: What it is compared with; of `In` and `NotIn` alone.
    """

    key: f.Name
    operator: f.Operator
    values: f.LabelValues = ()

    def __post_init__(self) -> None:
        """Refuse what Kubernetes refuses: values where none are compared, none if some are."""
        compared = self.operator in {"In", "NotIn"}
        if compared and not self.values:
            raise ValueError(f"`values` beside {self.operator}, at least one")
        if self.values and not compared:
            raise ValueError(f"no `values` beside {self.operator}")


class Resources(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`resources` of a request: what must fit. Units as in `model.Demand`.

    Attributes:
        gpus: GPUs of each node.
        gpu_milli: Of each of these GPUs, 1000 for a whole one.
        models: The GPUs are of one of these; empty: of any.
        gpu_memory_mib: The least memory of each GPU.
        cpu_milli: CPU of each node.
        memory_mib: Memory of each node.
        nodes: The number of nodes; more than one are a gang, granted whole or not at all.
        topology: What the GPUs of a node, or for `rack` and `zone` those of a gang, have in common.
        where: What must hold of the labels of each node, all of it.
    """

    gpus: f.Gpus = 0
    gpu_milli: f.GpuMilli = model.GPU_MILLI
    models: f.Models = ()
    gpu_memory_mib: f.MemoryMib = 0
    cpu_milli: f.CpuMilli = 0
    memory_mib: f.MemoryMib = 0
    nodes: f.Nodes = 1
    topology: f.Topology = ""
    where: Annotated[
        tuple[LabelRequirement, ...],
        Meta(
            max_length=f.REQUIREMENTS_MAX,
            description=f"a list of at most {f.REQUIREMENTS_MAX} objects with `key`, `operator`"
            " and `values`",
        ),
    ] = ()

    def requirements(self) -> tuple[model.Requirement, ...]:
        """Convert `where` to the label requirements of the core."""
        return tuple([model.Requirement(w.key, w.operator, w.values) for w in self.where])

    def demand(self) -> model.Demand:
        """Convert these resources to a `Demand` of the core."""
        amounts = astuple(self)[:-1]  # The fields of both are in the same order.
        return model.Demand(*(*amounts, self.requirements()))


def resources_of(demand: model.Demand) -> JsonObject:
    """Return a demand as the `resources` it came from, with all of its fields."""
    return asdict(demand) | {"where": [each._asdict() for each in demand.where]}


Alternatives = Annotated[
    tuple[Resources, ...],
    Meta(
        max_length=f.ALTERNATIVES_MAX,
        description=f"a list of at most {f.ALTERNATIVES_MAX} objects like `resources`",
    ),
]


class AntiAffinityRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`anti_affinity` of a lease: the domain that no two leases of its tenant and group share.

    Attributes:
        group: Any name; it is the tenant's own.
        topology: What is not shared, as `topologyKey` of Kubernetes says it.
    """

    group: f.Identifier
    topology: f.ApartTopology = "node"


class LeaseRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`lease` of a request: for how long, how patiently. Units as in `model.LeaseTerms`.

    Attributes:
        ttl_seconds: How long it lasts from the grant, or the last renewal, on.
        wait_seconds: How long the request waits in the queue; 0 answers at once.
        priority: Higher ones go first.
        preemptible: It gives way to requests of a higher priority.
        runtime_seconds_min: It gives way no sooner after the grant.
        notice_seconds: What passes between the news that it gives way, and its end.
        idempotency_key: The same request with the same key gets the same lease.
        project: Whose quota it counts for, within the tenant.
        anti_affinity: It is not placed near other leases of its group.
        ttl_seconds_min: So short a lease will do where others reserved its nodes; 0: none will.
    """

    ttl_seconds: f.TtlSeconds = f.TTL_SECONDS
    wait_seconds: f.WaitSeconds = 0.0
    priority: f.Priority = 0
    preemptible: f.Flag = False
    runtime_seconds_min: f.WaitSeconds = 0.0
    notice_seconds: f.WaitSeconds = 0.0
    idempotency_key: f.OptionalIdentifier = ""
    project: f.OptionalIdentifier = ""
    ttl_seconds_min: f.WaitSeconds = 0.0
    anti_affinity: AntiAffinityRequest | None = None

    def __post_init__(self) -> None:
        """Refuse a shortest time that is longer than the whole."""
        if self.ttl_seconds_min > self.ttl_seconds:
            raise ValueError("`ttl_seconds_min` of at most `ttl_seconds`")

    def terms(self) -> model.LeaseTerms:
        """Convert these fields to the lease terms of the core."""
        apart = self.anti_affinity
        near = None if apart is None else model.AntiAffinity(apart.group, apart.topology)
        return model.LeaseTerms(**asdict(self) | {"anti_affinity": near})


class ProvisionRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`provision` of a request: which backend starts what, and what becomes of it if that fails.

    Attributes:
        backend: The name of one that the server has, e.g. `local`.
        spec: What to start, as that backend reads it.
        on_failure: Whether the lease ends with a workload that fails, or waits for a new place.
        attempts_max: The most starts in all, the first included.
        keep_warm_seconds: How long the workload stays after the release, for a request like it.
    """

    backend: f.Name
    spec: f.Document = {}
    on_failure: f.OnFailure = "end"
    attempts_max: f.Attempts | None = None
    keep_warm_seconds: f.KeepSeconds = 0.0

    def provisioning(self) -> model.Provision:
        """Convert these fields to a `Provision` of the core."""
        attempts = model.ATTEMPTS_MAX if self.attempts_max is None else self.attempts_max
        return model.Provision(**asdict(self) | {"attempts_max": attempts})


class QuotaAmounts(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The amount of each resource that is named.

    Attributes:
        gpu_milli: GPUs, 1000 for a whole one.
        cpu_milli: CPU, 1000 for a core.
        memory_mib: Memory.
    """

    gpu_milli: f.QuotaMilli | None = None
    cpu_milli: f.CpuMilli | None = None
    memory_mib: f.MemoryMib | None = None

    def amounts(self) -> model.Amounts:
        """Convert these amounts to the form of the core."""
        return model.Amounts(self.gpu_milli, self.cpu_milli, self.memory_mib)


class QuotaChange(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A quota, with the fields of `set_quota`; omitted fields have their defaults."""

    weight: f.Weight = 1.0
    nominal: QuotaAmounts = QuotaAmounts()
    borrow: QuotaAmounts = QuotaAmounts()
    lend: QuotaAmounts = QuotaAmounts()
    notice_seconds: f.WaitSeconds = 0.0

    def quota(self) -> model.Quota:
        """Convert these fields to a quota of the core."""
        limits = (self.nominal.amounts(), self.borrow.amounts(), self.lend.amounts())
        return model.Quota(self.weight, *limits, self.notice_seconds)


def cluster_ids(names: f.Clusters) -> tuple[model.ClusterId, ...] | None:
    """Return the ids of clusters as the core knows them; None stays None."""
    return None if names is None else tuple(map(model.ClusterId, map(str, names)))
