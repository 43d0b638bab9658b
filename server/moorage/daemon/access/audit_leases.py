"""Changes of leases that are not durable yet; the audit log makes their entries.

Nearly all entries are about leases. Those of one commit are made together, which is quicker.
"""

from typing import Final

import msgspec

from moorage.core.state.facts import Ended, Granted, Preempted, Requeued
from moorage.model import Lease, Placement
from moorage.records.audit import AuditEntry
from moorage.records.json_values import JsonObject, JsonValue
from moorage.records.rights import Caller

LeaseFact = Granted | Ended | Requeued | Preempted
SERVER: Final[str] = "moored"
"""`who` of what no caller caused."""
_WHATS: Final = {
    Ended: "lease.ended",
    Requeued: "lease.requeued",
    Preempted: "lease.preempted",
}


class LeaseChange(msgspec.Struct, gc=False):
    """A change of a lease, before its entry is made.

    Args:
        fact: The change.
        lease: The lease; None: it is not known any more.
        caller: The caller who caused it; None without one.
        remote: Address of the caller.
        seq: As in `AuditEntry`.
    """

    fact: LeaseFact
    lease: Lease | None
    caller: Caller | None
    remote: str
    seq: int

    def entry(self) -> AuditEntry:
        """Return the entry. On the hot path."""
        fact, lease, caller = self.fact, self.lease, self.caller
        who, before, after = SERVER, None, None
        if isinstance(fact, Granted):
            lease = fact.lease
            at, what, who, why = lease.granted_at, "lease.granted", lease.tenant, lease.policy.uri
            about: JsonObject = {"lease": lease.id}
            after = _places(lease.placement)
        else:
            at, what, why = fact.at, _WHATS[type(fact)], fact.reason
            about = {"lease": fact.lease}
            if lease is not None:
                about["tenant"] = lease.tenant
                before = _places(lease.placement)
            if isinstance(fact, Preempted):
                why = f"{why} (for {fact.by})"
        role = token = ""
        if caller is not None:
            who, role, token = caller.tenant, caller.role, caller.token_name
        return AuditEntry(
            at, what, who, role, token, self.remote, about, before, after, why, self.seq
        )


def _places(placement: Placement) -> JsonValue:
    """Return the placement of a lease: cluster, node, GPUs and thousandths of each of them."""
    return [(share.cluster_id, share.node_id, share.gpus, share.gpu_milli) for share in placement]
