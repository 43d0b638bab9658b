"""The parts of messages: resources, terms of a lease, its workload, and quotas.

Only `messages` reads these parts; the types of the fields are in `fields`.
"""

from typing import Annotated

from msgspec import Meta, Struct, convert
from msgspec.structs import asdict, astuple

from moorage import model
from moorage.records import fields as f
from moorage.records.json_values import JsonObject


class LabelRequirement(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A requirement on one label of a node, like an entry of Kubernetes' `matchExpressions`.

    Attributes:
        key: The name of the label.
        operator: The condition on the value.
        values: The values to compare with; only for `In` and `NotIn`.
    """

    key: f.Name
    operator: f.Operator
    values: f.LabelValues = ()

    def __post_init__(self) -> None:
        """Refuse values for operators that compare none, and no values for the others."""
        compared = self.operator in {"In", "NotIn"}
        if compared and not self.values:
            raise ValueError(f"`values` beside {self.operator}, at least one")
        if self.values and not compared:
            raise ValueError(f"no `values` beside {self.operator}")


class Resources(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`resources` of a request: the resources that must fit. Units are those of `model.Demand`.

    Attributes:
        gpus: GPUs of each node.
        gpu_milli: The share of each of these GPUs; 1000 is a whole GPU.
        models: Accepted GPU models; empty: any model.
        gpu_memory_mib: The least memory of each GPU.
        cpu_milli: CPU of each node.
        memory_mib: Memory of each node.
        nodes: The number of nodes; more than one are a gang, granted whole or not at all.
        topology: The common domain of a node's GPUs, or for `rack` and `zone` of a gang's nodes.
        where: Requirements on the labels of each node, all of which must hold.
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
        amounts = astuple(self)[:-1]  # `Resources` and `Demand` have the fields in the same order.
        return model.Demand(*(*amounts, self.requirements()))


def resources_of(demand: model.Demand) -> JsonObject:
    """Return the `resources` of a demand, with all fields."""
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
        group: The name of the group; each tenant has its own groups.
        topology: The domain that is not shared, like `topologyKey` in Kubernetes.
    """

    group: f.Identifier
    topology: f.ApartTopology = "node"


class LeaseRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`lease` of a request: the terms of the lease. Units are those of `model.LeaseTerms`.

    Attributes:
        ttl_seconds: How long the lease lasts after the grant or the last renewal.
        wait_seconds: How long the request may wait in the queue; 0 answers at once.
        priority: Requests of a higher priority go first.
        preemptible: Whether the lease gives way to requests of a higher priority.
        runtime_seconds_min: How long after the grant the lease does not give way.
        notice_seconds: The time between the notice that the lease gives way, and its end.
        idempotency_key: A repeated request with the same key gets the same lease; empty: no key.
        project: The tenant's project to whose use the lease is added.
        anti_affinity: Keeps the lease away from other leases of its group.
        ttl_seconds_min: Shortest acceptable TTL if a reservation begins earlier; 0: never shorten.
    """

    ttl_seconds: f.TtlSeconds = f.TTL_SECONDS
    wait_seconds: f.WaitSeconds = model.NO_SECONDS
    priority: f.Priority = 0
    preemptible: f.Flag = False
    runtime_seconds_min: f.WaitSeconds = model.NO_SECONDS
    notice_seconds: f.WaitSeconds = model.NO_SECONDS
    idempotency_key: f.OptionalIdentifier = ""
    project: f.OptionalIdentifier = ""
    ttl_seconds_min: f.WaitSeconds = model.NO_SECONDS
    anti_affinity: AntiAffinityRequest | None = None

    def __post_init__(self) -> None:
        """Refuse a shortest TTL that is longer than `ttl_seconds`."""
        if self.ttl_seconds_min > self.ttl_seconds:
            raise ValueError("`ttl_seconds_min` of at most `ttl_seconds`")

    def terms(self) -> model.LeaseTerms:
        """Convert these fields to the lease terms of the core."""
        terms: model.LeaseTerms = convert(self, model.LeaseTerms, from_attributes=True)
        return terms


class ProvisionRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`provision` of a request: the workload to start, its backend, and its retries.

    Attributes:
        backend: The name of a backend of the server, e.g. `local`.
        spec: The workload, in the format of this backend.
        on_failure: Whether the lease ends if its workload fails, or is placed again.
        attempts_max: The most starts of the workload, including the first.
        keep_warm_seconds: How long the workload stays after the release, for warm reuse.
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
    """The amount of each resource that is given.

    Attributes:
        gpu_milli: GPUs; 1000 is a whole GPU.
        cpu_milli: CPU; 1000 is a core.
        memory_mib: Memory.
    """

    gpu_milli: f.QuotaMilli | None = None
    cpu_milli: f.CpuMilli | None = None
    memory_mib: f.MemoryMib | None = None


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
        quota: model.Quota = convert(self, model.Quota, from_attributes=True)
        return quota


def cluster_ids(names: f.Clusters) -> tuple[model.ClusterId, ...] | None:
    """Convert cluster ids to the form of the core; None stays None."""
    return None if names is None else tuple(map(model.ClusterId, map(str, names)))
