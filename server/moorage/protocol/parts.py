"""What messages are made of: resources, a lease, what to start under it, and quotas.

`messages` is the only one that reads them; the fields themselves are in `fields`.
"""

from typing import Annotated

from msgspec import Meta, Struct

from moorage import model
from moorage.protocol import fields as f


class LabelRequirement(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One label of a node, as Kubernetes' `matchExpressions` say it."""

    key: f.Name
    operator: f.Operator
    values: f.LabelValues = ()

    def __post_init__(self) -> None:
        """Refuse what Kubernetes refuses: values where none are compared, none where some are."""
        compared = self.operator in {"In", "NotIn"}
        if compared and not self.values:
            raise ValueError(f"`values` beside {self.operator}, at least one")
        if self.values and not compared:
            raise ValueError(f"no `values` beside {self.operator}")


class Resources(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`resources` of a request: what must fit. Units as in `model.Demand`."""

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
        """Return `where` as the core knows it."""
        return tuple(model.Requirement(w.key, w.operator, w.values) for w in self.where)

    def demand(self) -> model.Demand:
        """Return it as the core knows it."""
        return model.Demand(
            gpus=self.gpus,
            gpu_milli=self.gpu_milli,
            models=self.models,
            gpu_memory_mib=self.gpu_memory_mib,
            cpu_milli=self.cpu_milli,
            memory_mib=self.memory_mib,
            nodes=self.nodes,
            topology=self.topology,
            where=self.requirements(),
        )


class LeaseRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`lease` of a request: for how long, how patiently. Units as in `model.LeaseTerms`."""

    ttl_seconds: f.TtlSeconds = f.TTL_SECONDS
    wait_seconds: f.WaitSeconds = 0.0
    priority: f.Priority = 0
    preemptible: f.Flag = False
    runtime_seconds_min: f.WaitSeconds = 0.0
    notice_seconds: f.WaitSeconds = 0.0
    idempotency_key: f.OptionalIdentifier = ""
    project: f.OptionalIdentifier = ""


class ProvisionRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`provision` of a request: which backend starts what, and what becomes of it if that fails."""

    backend: f.Name
    spec: f.Document = {}
    on_failure: f.OnFailure = "end"
    attempts_max: f.Attempts | None = None
    keep_warm_seconds: f.KeepSeconds = 0.0


class QuotaAmounts(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """So much of each resource; nothing is said of those that are left out."""

    gpu_milli: f.QuotaMilli | None = None
    cpu_milli: f.CpuMilli | None = None
    memory_mib: f.MemoryMib | None = None

    def amounts(self) -> model.Amounts:
        """Return them as the core knows them."""
        return model.Amounts(self.gpu_milli, self.cpu_milli, self.memory_mib)
