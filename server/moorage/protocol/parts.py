"""What messages are made of: resources, a lease, what to start under it, quotas, and changes.

`messages` is the only one that reads them; the fields themselves are in `fields`.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from moorage import model
from moorage.protocol import fields as f

CHANGES_MAX: Final = 100
"""Of each kind, in one what-if."""
_FEW = Meta(max_length=CHANGES_MAX, description=f"a list of at most {CHANGES_MAX} changes")
_FEW_POLICIES = Meta(
    max_length=CHANGES_MAX, description=f"an object of at most {CHANGES_MAX} policies' URIs"
)


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


class AddedNodes(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Nodes that a cluster would have, too: `like` one it has, or as `node` of its document."""

    cluster: f.Name
    like: f.OptionalName = ""
    node: f.Document = {}
    count: f.Nodes = 1


class DrainedPlace(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A node, or a whole cluster, that would be drained."""

    cluster: f.Name
    node: f.OptionalName = ""


class ChangedQuota(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A quota that would be set, with the fields of `set_quota`, or removed."""

    tenant: f.Name
    project: f.OptionalIdentifier | None = None
    weight: f.Weight = 1.0
    nominal: QuotaAmounts = QuotaAmounts()
    borrow: QuotaAmounts = QuotaAmounts()
    lend: QuotaAmounts = QuotaAmounts()
    notice_seconds: f.WaitSeconds = 0.0
    remove: f.Flag = False

    def quota(self) -> model.Quota | None:
        """Return it as the core knows it; None: there would be none."""
        if self.remove:
            return None
        limits = (self.nominal.amounts(), self.borrow.amounts(), self.lend.amounts())
        return model.Quota(self.weight, *limits, self.notice_seconds)


class Change(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What would be different; it is done in this order. `policies`: which one stands for which."""

    add_nodes: Annotated[tuple[AddedNodes, ...], _FEW] = ()
    quotas: Annotated[tuple[ChangedQuota, ...], _FEW] = ()
    policies: Annotated[dict[f.Uri, f.Uri], _FEW_POLICIES] = {}
    drain: Annotated[tuple[DrainedPlace, ...], _FEW] = ()
